"""What the analyses find: the facts about a graph, and the space of legal plans.

A planner chooses inside the ``LegalSpace`` and never repairs: a set of atoms in which every ``required`` atom and
either all or none of each ``joint`` set stands, applied in post-order with the root last, is a legal plan.
"""

from dataclasses import dataclass, field

from autoshard.errors import Diagnostic


@dataclass(frozen=True, slots=True, kw_only=True)
class Atom:
    """A module that may become a unit.

    Attributes:
        module: FQN; the root is ``""``.
        parent: FQN of the nearest atom that contains every place where it stands; the root's parent is ``""``.
        children: FQNs of the atoms whose parent this is, in execution order.
        params: keys of all parameters that a unit here could own: those in its subtree, without replicated ones and
            without those of a shared module that also stands elsewhere.
        residual: keys of the parameters that it owns when all its children atoms are units.
        num_calls: how often it runs in a step; 0 if never.
        order: rank in execution order (first call), parents before children; never-called atoms last.
        repeat_class: digest of its structure if it stands in a run of isomorphic siblings (a *block*), else ``""``.
        defers_post_backward: no input tensor needs grad, so FSDP2 frees it only at the end of backward.
    """

    module: str
    parent: str
    children: tuple[str, ...]
    params: tuple[str, ...]
    residual: tuple[str, ...]
    num_calls: int
    order: int
    repeat_class: str
    defers_post_backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalSpace:
    """The plans that FSDP2 runs rightly.

    Attributes:
        atoms: modules that may be units by themselves, in post-order (children before parents), the root last.
        required: FQNs of atoms that must be units (a shared module below two atoms).
        joint: sets of modules, in execution order, that may only be units together as one list unit (tied modules
            that run next to each other).
        groupable: pairs of atoms, consecutive in execution order and called once each, that may share a list unit;
            longer groups are chains of pairs. Two groups of which each contains a member of the other cannot be
            ordered, and so not both be chosen. Inner pairs come first, so that the last pair with a given member in a
            given place is the outermost one.
        replicated: keys of parameters that no unit may shard.
        shard_dims: tensor dim other than 0 along which a parameter has to be sharded.
        recomputable: FQNs of the blocks that may compute their activations again in backward, in execution order; one
            of them may recompute if no unit stands inside it.
        must_reshard: keys of parameters that are updated in place while sharded: a unit that owns one must reshard.
        root_must_keep: the root's parameters are read after its forward, so the root must not reshard.
        reduce_unused: parameters without gradient must take part in the reduction.
        methods: ``(module, method)`` pairs to register.
        rebuilt_buffers: non-persistent buffers to compute again after materialisation.
        diagnostics: why a module is no atom, and what was decided already.
    """

    atoms: tuple[Atom, ...]
    required: tuple[str, ...] = ()
    joint: tuple[tuple[str, ...], ...] = ()
    groupable: tuple[tuple[str, str], ...] = ()
    replicated: tuple[str, ...] = ()
    shard_dims: dict[str, int] = field(default_factory=dict)
    recomputable: tuple[str, ...] = ()
    must_reshard: tuple[str, ...] = ()
    root_must_keep: bool = False
    reduce_unused: bool = False
    methods: tuple[tuple[str, str], ...] = ()
    rebuilt_buffers: tuple[str, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """What a module keeps from forward to backward.

    Attributes:
        module: FQN.
        saved_bytes: bytes of the activations allocated in its own or its submodules' forward that live into backward.
        peak_bytes: most bytes alive at once in its forward beyond those at its start.
    """

    module: str
    saved_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A run of isomorphic siblings.

    Attributes:
        repeat_class: their common digest.
        modules: their FQNs in registration order.
    """

    repeat_class: str
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """All facts about one graph.

    Attributes:
        order: FQNs of the called modules by their first forward, parents before children.
        post_order: FQNs of all modules, children before parents, the root last.
        ties: groups of modules that share a parameter: (parameter key, holders).
        outside_reads: (parameter key, stack) for reads during which no holder's forward ran.
        memory: by module, in the order of ``order``.
        blocks: runs of isomorphic siblings, outermost first.
        space: the legal plans.
    """

    order: tuple[str, ...]
    post_order: tuple[str, ...]
    ties: tuple[tuple[str, tuple[str, ...]], ...]
    outside_reads: tuple[tuple[str, tuple[str, ...]], ...]
    memory: tuple[ModuleMemory, ...]
    blocks: tuple[Block, ...]
    space: LegalSpace
