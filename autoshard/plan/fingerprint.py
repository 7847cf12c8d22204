"""The fingerprint of a model: a digest of what a plan relies on.

Made at planning from the captured graph and again at ``apply_plan`` from the real model; if the two differ, the plan
was made for another model. It covers names, shapes, dtypes, ``requires_grad`` and ties of parameters, the names of
buffers, and the modules that the plan names. It does not cover class names, versions or values, so that a model which
was only moved, renamed as a class or trained further keeps its plan. No torch here: both ends hand in plain values.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

PREFIX = "sha256:"


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintItems:
    """What a fingerprint is made of, beside the modules that a plan names. The order of the items is irrelevant.

    Attributes:
        params: for each parameter its key, its aliases, its shape, its dtype name (``float32``), and whether it
            requires a gradient.
        buffers: FQNs of all buffers.
    """

    params: tuple[tuple[str, tuple[str, ...], tuple[int, ...], str, bool], ...]
    buffers: tuple[str, ...]


def fingerprint(items: FingerprintItems, fqns: Iterable[str]) -> str:
    """Fingerprint of a model for a plan that names some of its modules.

    Each item becomes one line, a JSON array, so that no name can be mistaken for a border between items. Lines are
    sorted within their kind; aliases are sorted within their line.

    Args:
        items: parameters and buffers of the model.
        fqns: FQNs of the modules that the plan names; duplicates and order are irrelevant.

    Returns:
        ``sha256:`` and 64 hex digits.

    Examples:
        >>> one = FingerprintItems(params=(("weight", (), (2, 3), "float32", True),), buffers=())
        >>> fingerprint(one, [""])[:15]
        'sha256:cf571ae0'
    """
    params = sorted(
        _line("param", key, sorted(aliases), list(shape), dtype, requires_grad)
        for key, aliases, shape, dtype, requires_grad in items.params
    )
    buffers = sorted(_line("buffer", name) for name in items.buffers)
    modules = sorted(_line("module", fqn) for fqn in set(fqns))
    text = "".join(line + "\n" for line in (*params, *buffers, *modules))
    return PREFIX + hashlib.sha256(text.encode("ascii")).hexdigest()


def _line(kind: str, *values: object) -> str:
    return json.dumps([kind, *values], ensure_ascii=True, separators=(",", ":"))
