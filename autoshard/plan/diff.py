"""Differences between two plans in what they do.

For comparing and reviewing: only driving fields are looked at, so two plans without a difference apply alike, whatever
their projections say.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from autoshard.plan.schema import Decisions, Plan, Unit

ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDifference:
    """One decision that two plans take differently.

    Attributes:
        where: the field, or ``unit`` and its modules.
        before: what the first plan says, ``absent`` if it says nothing.
        after: what the second plan says.
    """

    where: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.where}: {self.before} → {self.after}"


def diff_plans(before: Decisions, after: Decisions) -> tuple[PlanDifference, ...]:
    """What changes from one plan to another, in the order of the file; units are matched by their modules.

    Args:
        before: a plan, or its decisions alone.
        after: another. Fingerprints are compared if both are whole plans.
    """
    found: list[PlanDifference] = []
    if isinstance(before, Plan) and isinstance(after, Plan):
        found += _fields("", before, after, ("fingerprint",))
    for name in Decisions.__struct_fields__:
        if name == "units":
            found += _units(before.units, after.units)
        elif name == "precision":
            found += _fields("precision.", before.precision, after.precision, before.precision.__struct_fields__)
        else:
            found += _fields("", before, after, (name,))
    return tuple(found)


def _fields(
    prefix: str, before: msgspec.Struct, after: msgspec.Struct, names: tuple[str, ...]
) -> Iterator[PlanDifference]:
    for name in names:
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield PlanDifference(where=prefix + name, before=_text(old), after=_text(new))


def _units(before: tuple[Unit, ...], after: tuple[Unit, ...]) -> Iterator[PlanDifference]:
    old = {unit.modules: unit for unit in before}
    new = {unit.modules: unit for unit in after}
    for modules in [*old, *(modules for modules in new if modules not in old)]:
        where = "unit " + ", ".join(name or "(root)" for name in modules)
        if modules not in new:
            yield PlanDifference(where=where, before=_text(old[modules]), after=ABSENT)
        elif modules not in old:
            yield PlanDifference(where=where, before=ABSENT, after=_text(new[modules]))
        else:
            yield from _fields(f"{where}: ", old[modules], new[modules], Unit.__struct_fields__)
    common_before = [modules for modules in old if modules in new]
    common_after = [modules for modules in new if modules in old]
    for index, (one, other) in enumerate(zip(common_before, common_after, strict=True)):
        if one != other:
            first = f"order of the units from position {index}"
            yield PlanDifference(where=first, before=_text(one), after=_text(other))
            return


def _text(value: object) -> str:
    if isinstance(value, Unit):
        return f"{value.num_params} parameters, reshard {_text(value.reshard)}"
    return msgspec.json.encode(value).decode()
