"""What a well-formed plan must hold beyond the types of its fields.

Used by ``load`` after the types are right, by ``save`` before anything is written, and by ``json_schema`` for the
choices and forms. Everything here can be seen from the plan alone; whether the plan is right for a model is asked by
``verify`` and by ``apply_plan``.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from autoshard.plan.schema import Axis, Decisions, Method, Optimal, Plan, Projection, Unit

Violation = tuple[str, str]
"""JSON path and what is wrong there."""

ROLES = ("replicate", "shard")
PRECISION_DTYPES = ("same", "bfloat16", "float16", "float32", "float64")
GRADIENT_SYNCS = ("every", "last")
SOUNDNESS = ("dry-run", "rules", "assumed")
OPTIMAL_STATUS = ("proved", "bounded", "heuristic")
PHASES = ("forward", "backward", "optimizer")
VERDICTS = ("fits", "does not fit", "not legal")
FRONTENDS = ("trace", "tree")
FINGERPRINT_FORM = "sha256:[0-9a-f]{64}"
DIGEST_FORM = "[0-9a-f]{16}"
CODE_FORM = "AS[0-9]{3}"
MAX_INT = 2**63 - 1
MAX_DEPTH = 1000
"""Modules nested deeper than this cannot run: Python's own recursion ends before."""


def violations(plan: Plan) -> Iterator[Violation]:
    """Everything that keeps a plan from being well formed, in the order of the file."""
    yield from _matches("$.fingerprint", plan.fingerprint, FINGERPRINT_FORM, "`sha256:` and 64 hex digits")
    yield from _decisions(plan)
    yield from _choice("$.soundness", plan.soundness, SOUNDNESS)
    yield from _optimal(plan.optimal)
    yield from _projection(plan.projection)
    for i, alternative in enumerate(plan.alternatives):
        at = f"$.alternatives[{i}]"
        yield from _choice(f"{at}.verdict", alternative.verdict, VERDICTS)
        for name in ("num_units", "peak_bytes", "step_ns"):
            yield from _at_least(f"{at}.{name}", getattr(alternative, name), 0)
    for i, diagnostic in enumerate(plan.diagnostics):
        at = f"$.diagnostics[{i}]"
        yield from _matches(f"{at}.code", diagnostic.code, CODE_FORM, "`AS` and three digits")
        if not diagnostic.where:
            yield f"{at}.where", "must not be empty"
    yield from _choice("$.provenance.frontend", plan.provenance.frontend, FRONTENDS)


def _decisions(plan: Decisions) -> Iterator[Violation]:
    if not plan.entry.isidentifier():
        yield "$.entry", f"must be the name of a method, got {quote(plan.entry)}"
    yield from _mesh(plan.mesh)
    for name in ("param", "reduce", "output"):
        yield from _choice(f"$.precision.{name}", getattr(plan.precision, name), PRECISION_DTYPES)
    yield from _units(plan.units)
    yield from _names("$.recompute", plan.recompute)
    yield from _names("$.compile", plan.compile)
    yield from _methods(plan.methods)
    yield from _names("$.replicated", plan.replicated)
    yield from _names("$.rebuilt_buffers", plan.rebuilt_buffers)
    yield from _at_least("$.micro_batches", plan.micro_batches, 1)
    yield from _choice("$.gradient_sync", plan.gradient_sync, GRADIENT_SYNCS)
    if not plan.offload:
        yield "$.offload", "must not be empty"


def _mesh(mesh: tuple[Axis, ...]) -> Iterator[Violation]:
    if len(mesh) not in (1, 2):
        yield "$.mesh", f"must have one or two axes, got {len(mesh)}"
        return
    for i, (axis, role) in enumerate(zip(mesh, ROLES[-len(mesh) :], strict=True)):
        at = f"$.mesh[{i}]"
        if not axis.name:
            yield f"{at}.name", "must not be empty"
        if i and axis.name == mesh[0].name:
            yield f"{at}.name", f"the axes need distinct names, got {quote(axis.name)} twice"
        yield from _at_least(f"{at}.size", axis.size, 1)
        if axis.role != role:
            yield (
                f"{at}.role",
                f"must be {quote(role)} (one axis shards; of two the first replicates), got {quote(axis.role)}",
            )


def _units(units: tuple[Unit, ...]) -> Iterator[Violation]:
    if not units:
        yield "$.units", "must not be empty: the root is always a unit, the last one"
        return
    tree = _Node()
    dims: dict[str, str] = {}
    for i, unit in enumerate(units):
        at = f"$.units[{i}]"
        if not unit.modules:
            yield f"{at}.modules", "must name at least one module"
        yield from _modules(f"{at}.modules", i, unit.modules, tree)
        if "" in unit.modules and (unit.modules != ("",) or i != len(units) - 1):
            yield f"{at}.modules", 'the root "" must stand alone in the last unit'
        for name in ("num_params", "num_bytes"):
            yield from _at_least(f"{at}.{name}", getattr(unit, name), 0)
        yield from _matches(f"{at}.digest", unit.digest, DIGEST_FORM, "16 hex digits")
        yield from _shard_dims(at, unit.shard_dims, dims)
    if units[-1].modules != ("",):
        yield (
            f"$.units[{len(units) - 1}].modules",
            f'the last unit must be the root [""], got {quote(list(units[-1].modules))}',
        )


@dataclass(slots=True)
class _Node:
    """One module in the tree of the paths that units name."""

    children: dict[str, "_Node"] = field(default_factory=dict)
    unit: int = -1
    path: str = ""


def _modules(at: str, unit: int, modules: tuple[str, ...], root: _Node) -> Iterator[Violation]:
    for j, fqn in enumerate(modules):
        path = f"{at}[{j}]"
        if fqn and not _is_fqn(fqn):
            yield path, f"is not the path of a module: {quote(fqn)}"
            continue
        node = root
        for part in fqn.split(".") if fqn else ():
            # The modules of one list unit are applied at once, none of them before another.
            if node is not root and 0 <= node.unit < unit:
                yield path, f"module {quote(fqn)} must come before its ancestor at {node.path}"
            node = node.children.setdefault(part, _Node())
        if node.unit >= 0:
            yield path, f"module {quote(fqn)} is named already at {node.path}"
        else:
            node.unit, node.path = unit, path


def _shard_dims(at: str, shard_dims: dict[str, int], seen: dict[str, str]) -> Iterator[Violation]:
    for key, dim in shard_dims.items():
        path = f"{at}.shard_dims[{quote(key)}]"
        if not _is_fqn(key):
            yield path, "is not the path of a parameter"
        if key in seen:
            yield path, f"stands already at {seen[key]}"
        seen[key] = path
        yield from _at_least(path, dim, 1)


def _methods(methods: tuple[Method, ...]) -> Iterator[Violation]:
    seen: set[Method] = set()
    for i, method in enumerate(methods):
        at = f"$.methods[{i}]"
        if method.module and not _is_fqn(method.module):
            yield f"{at}.module", f"is not the path of a module: {quote(method.module)}"
        if not method.method.isidentifier() or method.method == "forward":
            yield f"{at}.method", f"must be the name of a method other than forward, got {quote(method.method)}"
        if method in seen:
            yield at, "stands twice"
        seen.add(method)


def _optimal(optimal: Optimal) -> Iterator[Violation]:
    yield from _choice("$.optimal.status", optimal.status, OPTIMAL_STATUS)
    yield from _at_least("$.optimal.bound_ns", optimal.bound_ns, 0)
    if not math.isfinite(optimal.gap):
        yield "$.optimal.gap", f"must be a finite number, got {optimal.gap}"
    elif optimal.status == "proved" and optimal.gap != 0:
        yield "$.optimal.gap", f"must be 0 where optimality is proved, got {optimal.gap}"
    elif optimal.status == "heuristic" and (optimal.gap, optimal.bound_ns) != (-1, 0):
        yield "$.optimal.gap", f"must be -1 (and bound_ns 0) where no bound was computed, got {optimal.gap}"
    elif optimal.status == "bounded" and optimal.gap < 0:
        yield "$.optimal.gap", f"must not be negative, got {optimal.gap}"


def _projection(projection: Projection) -> Iterator[Violation]:
    for name in projection.__struct_fields__:
        value = getattr(projection, name)
        if isinstance(value, int):
            yield from _at_least(f"$.projection.{name}", value, 0)
    for kind, num_bytes in projection.by_kind.items():
        yield from _at_least(f"$.projection.by_kind[{quote(kind)}]", num_bytes, 0)
    for i, phase in enumerate(projection.phases):
        yield from _choice(f"$.projection.phases[{i}].phase", phase.phase, PHASES)
        for name, value in (("peak_bytes", phase.peak_bytes), ("end_bytes", phase.end_bytes)):
            yield from _at_least(f"$.projection.phases[{i}].{name}", value, 0)
        for kind, num_bytes in phase.by_kind.items():
            yield from _at_least(f"$.projection.phases[{i}].by_kind[{quote(kind)}]", num_bytes, 0)
    for i, part in enumerate(projection.parts):
        yield from _at_least(f"$.projection.parts[{i}].num_bytes", part.num_bytes, 0)
    for i, stretch in enumerate(projection.course):
        yield from _choice(f"$.projection.course[{i}].phase", stretch.phase, PHASES)
        for name, value in (("peak_bytes", stretch.peak_bytes), ("end_ns", stretch.end_ns)):
            yield from _at_least(f"$.projection.course[{i}].{name}", value, 0)


def _names(at: str, names: Iterable[str]) -> Iterator[Violation]:
    seen: set[str] = set()
    for i, name in enumerate(names):
        if not _is_fqn(name):
            yield f"{at}[{i}]", f"is not a path in a model: {quote(name)}"
        if name in seen:
            yield f"{at}[{i}]", f"{quote(name)} stands twice"
        seen.add(name)


def quote(value: object) -> str:
    """Text of a value from a file, cut so that a message stays one line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:60] + "…" + text[-19:]


def _is_fqn(name: str) -> bool:
    # Torch forbids dots and emptiness in the name of a child, and nothing else.
    return name.count(".") < MAX_DEPTH and all(name.split("."))


def _choice(at: str, value: str, choices: tuple[str, ...]) -> Iterator[Violation]:
    if value not in choices:
        yield at, f"must be one of {', '.join(map(repr, choices))}, got {quote(value)}"


def _matches(at: str, value: str, form: str, words: str) -> Iterator[Violation]:
    if re.fullmatch(form, value) is None:
        yield at, f"must be {words}, got {quote(value)}"


def _at_least(at: str, value: int, least: int) -> Iterator[Violation]:
    if not least <= value <= MAX_INT:
        yield at, f"must be a whole number from {least} to 2**63-1, got {value}"
