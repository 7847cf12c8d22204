"""The table of rules, in the order in which their findings are listed."""

from collections.abc import Callable, Iterator

from autoshard.findings import Finding
from autoshard.verify import structure, units
from autoshard.verify.subject import Subject

Rule = Callable[[Subject], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    structure.names_exist,
    structure.named_once,
    structure.root_last,
    structure.inner_first,
    structure.owned_once,
    structure.mesh_is_known,
    structure.forced_decisions,
    units.modules_take_hooks,
    units.not_on_demand,
    units.read_while_unsharded,
    units.written_while_sharded,
    units.one_trainable_dtype,
    units.params_can_be_sharded,
    units.shard_dims_divide,
    units.lists_run_once,
    units.results_carry_hooks,
    units.hooks_in_time,
    units.inputs_stay,
    structure.recompute_inside_units,
    structure.figures_agree,
)
"""Each rule looks at the whole plan and yields every finding, none of which depends on another rule's."""
