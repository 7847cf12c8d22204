"""The answer, as data: the schema of a plan.

``Decisions`` is everything that ``apply_plan`` does; ``Plan`` adds what is for people. Nothing in ``Plan`` alone
changes what is applied.
"""

import msgspec

from autoshard.errors import Diagnostic

VERSION = 1


class Axis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One axis of the device mesh, outermost first.

    Attributes:
        name: the axis' name in the mesh.
        size: number of devices along it.
        role: ``replicate`` or ``shard``.
    """

    name: str
    size: int
    role: str


class Precision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mixed precision, as FSDP2's ``MixedPrecisionPolicy``.

    Attributes:
        param: dtype in which parameters are gathered and computed with; ``same`` keeps the stored dtype.
        reduce: dtype of the gradient reduction; ``same`` takes the compute dtype.
        output: dtype to which floating point outputs of each unit are cast; ``same`` leaves them.
        cast_inputs: floating point inputs of each unit are cast to ``param``.
    """

    param: str = "same"
    reduce: str = "same"
    output: str = "same"
    cast_inputs: bool = True


class Unit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The modules that one ``fully_shard`` call groups.

    Attributes:
        modules: their FQNs, in execution order; the root is ``[""]``.
        reshard: reshard after forward; false keeps the parameters unsharded until backward.
        shard_dims: tensor dim along which a parameter is sharded where it is not 0, by parameter key.
        num_params: parameters that it owns.
        num_bytes: their bytes as stored, unsharded and without padding.
        digest: first 16 hex digits of the sha256 of its sorted parameter keys.
    """

    modules: tuple[str, ...]
    reshard: bool
    num_params: int
    num_bytes: int
    digest: str
    shard_dims: dict[str, int] = {}


class Method(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A method other than forward that runs a unit, registered with ``register_fsdp_forward_method``.

    Attributes:
        module: FQN.
        method: name of the method.
    """

    module: str
    method: str


class Decisions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that ``apply_plan`` does.

    Attributes:
        entry: the root's method that runs the training step.
        mesh: axes, outermost first; the shard axis is the last.
        precision: mixed precision of every unit.
        units: in the order of application; the root last.
        recompute: FQNs of the modules whose activations are computed again in backward, in execution order.
        compile: FQNs of the modules that ``torch.compile`` compiles, each by itself, in place.
        methods: methods to register.
        replicated: keys of parameters that no unit shards; their gradients are averaged.
        reduce_unused: parameters without a gradient take part in the reduction.
        rebuilt_buffers: non-persistent buffers to compute again after materialisation.
        offload: ``none``.
        micro_batches: forwards and backwards before one step of the optimizer, as ``autoshard.accumulate`` runs them.
        gradient_sync: gradients are reduced in ``every`` micro-batch, or in the ``last`` alone.
    """

    entry: str = "forward"
    mesh: tuple[Axis, ...]
    precision: Precision
    units: tuple[Unit, ...]
    recompute: tuple[str, ...] = ()
    compile: tuple[str, ...] = ()
    methods: tuple[Method, ...] = ()
    replicated: tuple[str, ...] = ()
    reduce_unused: bool = False
    rebuilt_buffers: tuple[str, ...] = ()
    offload: str = "none"
    micro_batches: int = 1
    gradient_sync: str = "every"

    @property
    def named_modules(self) -> frozenset[str]:
        """FQNs of all modules that are named, which a model has to have."""
        units = (module for unit in self.units for module in unit.modules)
        return frozenset((*units, *self.recompute, *self.compile, *(method.module for method in self.methods)))

    @property
    def num_shards(self) -> int:
        """Size of the shard axis."""
        return self.mesh[-1].size

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        size = 1
        for axis in self.mesh:
            size *= axis.size
        return size


class PhasePeak(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most that is alive at once in a phase of the step.

    Attributes:
        phase: ``forward``, ``backward`` or ``optimizer``.
        peak_bytes: the most that is alive at once in it.
        peak_at: where that is: phase, unit or module, and what happens there.
        end_bytes: alive at its end.
        by_kind: what its peak is made of, bytes by kind.
    """

    phase: str
    peak_bytes: int
    peak_at: str
    end_bytes: int
    by_kind: dict[str, int]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the peak.

    Attributes:
        kind: as in ``by_kind``.
        where: what made it: a unit, or a module with ``*`` for the numbers of like ones; empty where a kind is not told
            apart.
        num_bytes: its bytes.
    """

    kind: str
    where: str
    num_bytes: int


class Stretch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stretch of the step and its highest moment.

    Attributes:
        phase: of the step.
        peak_bytes: the most that is alive at once in it.
        peak_at: where that is.
        end_ns: when it ends, from the start of the step under the cost model.
    """

    phase: str
    peak_bytes: int
    peak_at: str
    end_ns: int


class Projection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan will cost on one device under the cost model.

    Attributes:
        allowed_bytes: what tensors may occupy.
        peak_bytes: the most that is alive at once over the step.
        steady_bytes: alive between steps: sharded parameters and optimizer state.
        by_kind: what the peak is made of, bytes by kind.
        peak_at: where the peak stands: phase, unit and what happens there.
        phases: the peak of each phase, in order.
        parts: what made the bytes of the peak, the largest first; their sum is the peak.
        course: the step in a few stretches, in order.
        step_ns: time of one step under the cost model.
        exposed_ns: part of it in which compute waits for communication.
        num_all_gathers: all-gathers of one step.
        num_reduce_scatters: reduce-scatters of one step.
        num_all_reduces: all-reduces of one step.
        all_gather_bytes: sum of their output buffers.
        reduce_scatter_bytes: sum of their input buffers.
        all_reduce_bytes: sum of their buffers.
        not_modelled: what the figures leave out, one phrase each.
    """

    allowed_bytes: int
    peak_bytes: int
    steady_bytes: int
    by_kind: dict[str, int]
    peak_at: str
    phases: tuple[PhasePeak, ...] = ()
    parts: tuple[Part, ...] = ()
    course: tuple[Stretch, ...] = ()
    step_ns: int
    exposed_ns: int
    num_all_gathers: int
    num_reduce_scatters: int
    num_all_reduces: int
    all_gather_bytes: int
    reduce_scatter_bytes: int
    all_reduce_bytes: int
    not_modelled: tuple[str, ...]


class Alternative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A plan that was considered beside the one chosen.

    Attributes:
        name: such as ``root only``.
        verdict: ``fits``, ``does not fit`` or ``not legal``.
        num_units: its units.
        peak_bytes: projected peak; 0 if not legal.
        step_ns: time of one step under the cost model; 0 if not legal.
        reasons: codes and places of the diagnostics that forbid it.
    """

    name: str
    verdict: str
    num_units: int
    peak_bytes: int = 0
    step_ns: int = 0
    reasons: tuple[str, ...] = ()


class Optimal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known about better plans under the same cost model.

    Attributes:
        status: ``proved``, ``bounded``, or ``heuristic`` where no bound was computed.
        bound_ns: no plan in the search space is faster than this; 0 for ``heuristic``.
        gap: ``step_ns / bound_ns - 1``; 0 for ``proved``, -1 for ``heuristic``.
        space: the search space in words.
    """

    status: str
    bound_ns: int
    gap: float
    space: str


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the plan was made with.

    Attributes:
        autoshard: version.
        torch: version, empty if torch was not needed.
        frontend: ``trace`` or ``tree``.
        device: name of the device profile.
        optimizer: as asked.
        zero_grad: what ``zero_grad`` leaves, as asked.
        clip: gradients are clipped, as asked.
        loss: how the loss was found.
        inputs: tensors of the example inputs as ``name: dtype[shape]``.
        assumed: defaults that were taken.
    """

    autoshard: str
    torch: str
    frontend: str
    device: str
    optimizer: str
    loss: str
    inputs: tuple[str, ...]
    assumed: tuple[str, ...]
    zero_grad: str = "none"
    clip: bool = False


class Plan(Decisions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan: the decisions, and for people what they cost and why.

    Attributes:
        version: schema version.
        fingerprint: ``sha256:`` and the digest of the model that it was made for.
        soundness: ``dry-run``, ``rules`` or ``assumed``: the level of verification that it passed.
        optimal: what is known about better plans.
        projection: what it will cost.
        alternatives: what else was considered, the baselines first.
        diagnostics: what the stages had to say.
        provenance: what it was made with.
    """

    version: int
    fingerprint: str
    soundness: str
    optimal: Optimal
    projection: Projection
    alternatives: tuple[Alternative, ...]
    diagnostics: tuple[Diagnostic, ...]
    provenance: Provenance


def decisions_of(plan: Plan) -> Decisions:
    """The part of a plan that ``apply_plan`` does; nothing else of the plan can change what is applied."""
    return Decisions(**{name: getattr(plan, name) for name in Decisions.__struct_fields__})
