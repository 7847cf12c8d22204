"""Rules about single parameters: what FSDP2 cannot shard, and along which dim it should.

A table of small predicates. Each entry looks at one parameter and either says nothing or gives the reason; a test and
an explanation stand beside each code.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autoshard.analysis.facts import Facts
from autoshard.errors import Severity
from autoshard.findings import Finding
from autoshard.ir import LOSS, ParamInfo

SMALL_WASTE_BYTES = 64 * 2**10
"""Padding of one parameter that is not worth a decision of its own."""

LARGE_WASTE_BYTES = 2**20
"""Padding of one parameter that is worth a note."""


SHOWN_PLACES = 3
"""Places of second references that a finding names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRule:
    """One rule about a parameter.

    Attributes:
        code: of its diagnostics.
        severity: of its diagnostics.
        reason: what is wrong with this parameter, ``None`` if nothing is.
        remedy: what to do about it.
    """

    code: str
    severity: Severity
    reason: Callable[[ParamInfo, Facts], str | None]
    remedy: str


def is_replicated(param: ParamInfo) -> bool:
    """FSDP2 cannot shard it because it has no dimension or no element."""
    return not param.shape or param.numel == 0


def _no_dimension_or_element(param: ParamInfo, facts: Facts) -> str | None:
    if not param.shape:
        return "it is a scalar (shape ()), which fully_shard refuses"
    return "it has no elements, which the gradient reduction cannot take" if param.numel == 0 else None


def _non_contiguous(param: ParamInfo, facts: Facts) -> str | None:
    return None if param.contiguous else "its memory is not contiguous, which fully_shard refuses"


def _complex(param: ParamInfo, facts: Facts) -> str | None:
    # Complex parameters work where nothing is cast, which is what a trace in float32 stands for.
    if not param.dtype.startswith("complex") or not param.requires_grad or facts.graph.compute_dtype == "float32":
        return None
    return f"it is complex ({param.dtype}), and its gradient cannot be reduced in a real dtype"


def _dtensor(param: ParamInfo, facts: Facts) -> str | None:
    return "it is a DTensor already" if "dtensor" in param.traits else None


def _sparse(param: ParamInfo, facts: Facts) -> str | None:
    return (
        "its gradient is sparse (sparse=True), which a reduce-scatter cannot take"
        if ("sparse-grad" in param.traits)
        else None
    )


def _shares_storage(param: ParamInfo, facts: Facts) -> str | None:
    return (
        "it shares memory with another parameter without being the same object; sharding separates the two"
        if ("shares-storage" in param.traits)
        else None
    )


def _written(param: ParamInfo, facts: Facts) -> str | None:
    if "written-in-forward" not in param.traits or param.key in facts.updates:
        return None
    return "forward writes to it; where it is unsharded at that moment the change is lost"


def _updated_sharded(param: ParamInfo, facts: Facts) -> str | None:
    if param.key not in facts.updates or "written-in-forward" not in param.traits:
        return None
    who = ", ".join(module or "(root)" for module in sorted(facts.updates[param.key]))
    return (
        f"the forward of {who} updates it in place; its unit is sharded meanwhile, so that each rank updates its shard"
    )


def _read_by_alias(param: ParamInfo, facts: Facts) -> str | None:
    if "read-by-alias" not in param.traits or is_replicated(param) or not param.requires_grad:
        return None
    return (
        f"the step reads it through {param.kept_in[0]}, not as the attribute of the module that registers it; once "
        "sharded, that is the old whole tensor, which is never trained"
    )


def _frozen_alias(param: ParamInfo, facts: Facts) -> str | None:
    if "read-by-alias" not in param.traits or is_replicated(param) or param.requires_grad:
        return None
    return (
        f"the step reads it through {param.kept_in[0]}: each rank keeps it whole beside its shard, and a later change "
        "of its values (a state dict) does not reach that copy"
    )


def _kept_elsewhere(param: ParamInfo, facts: Facts) -> str | None:
    if not param.kept_in or "read-by-alias" in param.traits or is_replicated(param):
        return None
    return (
        f"it is also kept in {', '.join(param.kept_in[:SHOWN_PLACES])}; apply_plan puts the sharded parameter there "
        "where it can, else that stays the old whole tensor"
    )


def _grad_hook(param: ParamInfo, facts: Facts) -> str | None:
    if "grad-hook" not in param.traits or is_replicated(param):
        return None
    return "a gradient hook was set on it; it will run on the whole gradient of each rank, before the reduction"


def _accumulated_hook(param: ParamInfo, facts: Facts) -> str | None:
    if "accumulated-hook" not in param.traits or is_replicated(param):
        return None
    return "a post-accumulate hook was set on it; it will run on the shard, after the reduction"


def _outside_root(param: ParamInfo, facts: Facts) -> str | None:
    for stack in param.readers:
        if "" not in stack and stack[0] != LOSS:
            return f"it is read while the root's {facts.graph.entry} is not running (by {stack[0]})"
    return None


PARAM_RULES = (
    ParamRule(
        code="AS208",
        severity="error",
        reason=_outside_root,
        remedy="run the step through the root's forward, or name the method that runs it with --entry",
    ),
    ParamRule(
        code="AS210",
        severity="note",
        reason=_no_dimension_or_element,
        remedy="each rank keeps it whole and apply_plan averages its gradient; nothing needs doing",
    ),
    ParamRule(
        code="AS211",
        severity="error",
        reason=_non_contiguous,
        remedy="replace its data by param.data.contiguous() before planning",
    ),
    ParamRule(
        code="AS212",
        severity="error",
        reason=_complex,
        remedy="plan with precision fp32, or store it as two real parameters (torch.view_as_real)",
    ),
    ParamRule(
        code="AS213",
        severity="error",
        reason=_dtensor,
        remedy="plan the model before tensor, expert or pipeline parallelism is applied; mixing is out of scope",
    ),
    ParamRule(
        code="AS214",
        severity="error",
        reason=_sparse,
        remedy="build the embedding with sparse=False",
    ),
    ParamRule(
        code="AS215",
        severity="error",
        reason=_shares_storage,
        remedy="assign the same nn.Parameter object in both places if they are meant to be tied",
    ),
    ParamRule(
        code="AS216",
        severity="error",
        reason=_written,
        remedy="move the update out of forward, to after the optimizer step",
    ),
    ParamRule(
        code="AS221",
        severity="error",
        reason=_read_by_alias,
        remedy="read the parameter as an attribute of the module that registers it, at the moment of use",
    ),
    ParamRule(
        code="AS221",
        severity="warning",
        reason=_frozen_alias,
        remedy="nothing if its values stay; else read it as an attribute of the module that registers it",
    ),
    ParamRule(
        code="AS221",
        severity="note",
        reason=_kept_elsewhere,
        remedy="nothing; an optimizer is best made from model.parameters() after apply_plan",
    ),
    ParamRule(code="AS224", severity="note", reason=_grad_hook, remedy="nothing"),
    ParamRule(
        code="AS224",
        severity="warning",
        reason=_accumulated_hook,
        remedy="nothing if it works element by element; set it after apply_plan if it holds on to the old parameter",
    ),
    ParamRule(code="AS240", severity="note", reason=_updated_sharded, remedy="nothing"),
)  # fmt: skip
"""Every rule about a single parameter, in the order of their codes."""


def param_findings(facts: Facts) -> Iterator[Finding]:
    """What the rules say about each parameter."""
    for param in facts.graph.params:
        for rule in PARAM_RULES:
            reason = rule.reason(param, facts)
            if reason is not None:
                yield Finding(
                    code=rule.code, severity=rule.severity, where=param.key, message=reason, remedy=rule.remedy
                )


def padding_bytes(param: ParamInfo, num_shards: int) -> int:
    """Bytes that the unsharded buffer of a parameter gains by padding dim 0 to a multiple of the shards."""
    if not param.shape or not param.shape[0]:
        return 0
    rows = -(-param.shape[0] // num_shards) * num_shards
    return param.nbytes // param.shape[0] * (rows - param.shape[0])


def divisible_dim(param: ParamInfo, num_shards: int) -> int:
    """The smallest dim other than 0 that the shards divide; 0 if there is none."""
    return next((dim for dim, size in enumerate(param.shape) if dim and size and size % num_shards == 0), 0)


def choose_shard_dims(facts: Facts) -> tuple[dict[str, int], tuple[Finding, ...]]:
    """Shard dims of the parameters whose dim 0 is smaller than the number of shards, with notes.

    Sharded along dim 0 such a parameter is padded to one row for each rank: its buffers grow by the number of shards
    over its rows, and most ranks hold nothing of it.
    """
    dims: dict[str, int] = {}
    notes = []
    for param in facts.graph.params:
        waste = padding_bytes(param, facts.num_shards)
        if is_replicated(param) or param.shape[0] >= facts.num_shards or waste < SMALL_WASTE_BYTES:
            continue
        rows = f"{param.shape[0]} rows" if param.shape[0] > 1 else "one row"
        dim = divisible_dim(param, facts.num_shards)
        if dim:
            dims[param.key] = dim
            message = f"it has {rows} for {facts.num_shards} shards, so it is sharded along dim {dim} instead of 0"
            notes.append(Finding(code="AS219", severity="note", where=param.key, message=message))
        elif waste >= LARGE_WASTE_BYTES:
            message = f"it has {rows} for {facts.num_shards} shards, which divide no other dim: padded by {waste} bytes"
            notes.append(
                Finding(
                    code="AS220",
                    severity="note",
                    where=param.key,
                    message=message,
                    remedy=f"shard over at most {param.shape[0]} devices, or give it a dim that the shards divide",
                )
            )
    return dims, tuple(notes)
