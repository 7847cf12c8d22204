"""What a plan may say and ``apply_plan`` of this release cannot do yet.

The schema has all driving fields from its first version; the loader refuses, by name, those that would be ignored.
Whoever makes ``apply_plan`` do one more of them removes its entry here in the same change.
"""

from collections.abc import Callable

from autoshard.errors import PlanFormatError
from autoshard.plan.schema import Decisions

_NOT_YET: tuple[tuple[str, str, Callable[[Decisions], bool]], ...] = (
    ("$.offload", "offloading to the host", lambda plan: plan.offload != "none"),
)


def unsupported() -> tuple[str, ...]:
    """What cannot be applied yet, in words."""
    return tuple(what for _, what, _ in _NOT_YET)


def require_supported(plan: Decisions, source: str = "") -> None:
    """Refuse a plan that asks for what ``apply_plan`` cannot apply yet.

    Args:
        plan: a plan, or its decisions alone.
        source: the file, for the message.

    Raises:
        PlanFormatError: with the field that asks for it.
    """
    for where, what, asks in _NOT_YET:
        if asks(plan):
            raise PlanFormatError(where, f"{what} cannot be applied by this release yet", source)
