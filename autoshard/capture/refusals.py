"""Why a block is not written down from a recording, as exceptions. None of them reaches the user.

Two of them are no ``Exception``: they are raised in the middle of the user's code, which must not catch them.
"""


class NotReplayable(Exception):
    """A block cannot be written down from a recording; the text is the reason."""


class ReadsItsPlace(NotReplayable):
    """The forward of a block reads an attribute that says where the block stands."""


class Different(Exception):
    """Two blocks are not alike; the text says where."""


class NotAsOutlined(BaseException):
    """The step has to be traced again without replaying blocks of one form.

    Attributes:
        digest: of the form.
        reason: why.
    """

    def __init__(self, digest: str, reason: str) -> None:
        super().__init__(digest, reason)
        self.digest, self.reason = digest, reason


class NotInOutline(BaseException):
    """A parameter of a replayed block is read outside the block: the step has to be traced again.

    Attributes:
        key: the parameter.
    """

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key
