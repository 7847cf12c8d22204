"""Hand-made ModelGraphs for tests of everything between capture and plan; no torch.

A model is written as nested ``Mod`` and ``Par`` objects; the same object in two places is a shared module or a tied
parameter. ``build`` walks the tree as a step of training would: each module's forward calls its children and then runs
one op that reads its own parameters (``body`` says otherwise), the data is a chain from the input to the loss, and the
backward is the chain in reverse. So every count in a test can be made by hand.

    graph = build(mod("", mod("embed", weight=(97, 8)), stack("layers", 3, block(8)), mod("head", weight=(97, 8))))
"""

import hashlib
from dataclasses import dataclass, field, replace

from autoshard.ir import (
    CALLER,
    LOSS,
    BufferInfo,
    InputInfo,
    ModelGraph,
    ModuleNode,
    ModuleSpan,
    Moment,
    OpNode,
    ParamInfo,
    Region,
    StorageInfo,
)
from autoshard.request import DTYPE_BYTES

TOKENS = 4
"""An op costs ``2 * TOKENS`` floating point operations per element of the parameters that it reads."""


@dataclass(kw_only=True, eq=False)
class Par:
    """A parameter object; put the same one into two modules to tie them."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    requires_grad: bool = True
    contiguous: bool = True
    traits: tuple[str, ...] = ()


@dataclass(kw_only=True, eq=False)
class Mod:
    """A module object; put the same one under two parents to share it.

    ``body`` is what its forward does, in order: ``"own"`` runs one op on its own parameters, ``"read KEY"`` runs one op
    on the parameter with that FQN (from the root), ``"peek PATH"`` one op on the parameters of the module at that path
    below this one, any other text calls the module at that path below this one (``"/PATH"`` from the root). Without
    ``body``: call every child in order (looking through those without forward, leaving out those with
    ``called=False``), then ``own`` if it has parameters or no children.
    """

    name: str
    children: tuple["Mod", ...] = ()
    params: dict[str, Par] = field(default_factory=dict)
    buffers: dict[str, tuple[tuple[int, ...], bool]] = field(default_factory=dict)
    body: tuple[str, ...] | None = None
    cls: str = ""
    has_forward: bool = True
    called: bool = True
    no_grad: bool = False
    takes_grad: bool = True
    output_kind: str = "tensor"
    output_is_view: bool = False
    output_grad: bool = True
    act: int = 64
    saved: int = 0
    temp: int = 0
    traits: tuple[str, ...] = ()


def mod(name: str, *children: Mod, **options: object) -> Mod:
    """A module; options that ``Mod`` does not know are parameters, given as a shape or a ``Par``."""
    known = set(Mod.__dataclass_fields__)
    params = {key: _par(value) for key, value in options.items() if key not in known}
    given = {key: value for key, value in options.items() if key in known}
    return Mod(name=name, children=children, **{"params": params, **given})  # type: ignore[arg-type]


def _par(value: object) -> Par:
    return value if isinstance(value, Par) else Par(shape=tuple(value))  # type: ignore[arg-type]


def stack(name: str, *children: Mod, cls: str = "ModuleList") -> Mod:
    """A container without forward; its children are renamed ``0, 1, …`` (a shared one keeps its first name)."""
    for index, child in enumerate(children):
        child.name = child.name or str(index)
    return mod(name, *children, cls=cls, has_forward=False)


def block(hidden: int, name: str = "", ffn: int = 0, cls: str = "Block", **options: object) -> Mod:
    """A decoder block: norm, attention, norm, feed-forward; ``4 h² + 2 h ffn + 2 h`` parameters (``ffn`` is 4h)."""
    ffn = ffn or 4 * hidden
    attn = [mod(part, weight=(hidden, hidden), cls="Linear") for part in ("q", "k", "v", "o")]
    mlp = [mod("up", weight=(ffn, hidden), cls="Linear"), mod("down", weight=(hidden, ffn), cls="Linear")]
    return mod(
        name,
        mod("norm1", weight=(hidden,), cls="Norm"),
        mod("attn", *attn, cls="Attention", output_kind="tuple"),
        mod("norm2", weight=(hidden,), cls="Norm"),
        mod("mlp", *mlp, cls="Mlp"),
        cls=cls,
        **options,
    )


def decoder(num_layers: int = 3, hidden: int = 8, vocab: int = 97, tied: bool = False, ffn: int = 0) -> Mod:
    """embed, layers, norm, head; with ``tied`` the head has the embedding's weight."""
    embedding = Par(shape=(vocab, hidden))
    head = embedding if tied else Par(shape=(vocab, hidden))
    return mod(
        "",
        mod("embed", weight=embedding, cls="Embedding"),
        stack("layers", *(block(hidden, ffn=ffn) for _ in range(num_layers))),
        mod("norm", weight=(hidden,), cls="Norm"),
        mod("head", weight=head, cls="Linear"),
        cls="Decoder",
    )


def chain(*sizes: int) -> Mod:
    """A root without parameters over modules ``0, 1, …`` of one parameter each, with the given numbers of elements."""
    return mod("", *(mod(str(index), weight=(size,)) for index, size in enumerate(sizes)))


def build(
    root: Mod, *, entry: str = "forward", loss_reads: tuple[str, ...] = (), outside: tuple[str, ...] = ()
) -> ModelGraph:
    """The graph of one training step.

    Args:
        root: the model; its name is ``""``.
        entry: name of the method that runs the step.
        loss_reads: FQNs of parameters that the loss reads.
        outside: paths of modules that run before the root's forward.
    """
    return _Builder(root).run(entry, loss_reads, outside)


def repeat_class(module: Mod) -> str:
    """Digest of a module's structure, names of siblings left out."""
    params = [(key, par.shape, par.dtype, par.requires_grad) for key, par in module.params.items()]
    shape = (module.cls, module.has_forward, params, [repeat_class(child) for child in module.children])
    return hashlib.sha256(repr(shape).encode()).hexdigest()[:12]


@dataclass(kw_only=True)
class _Op:
    node: OpNode
    trains: bool
    x: int
    y: int
    extra: tuple[int, ...]
    x_needs_grad: bool


class _Builder:
    def __init__(self, root: Mod) -> None:
        self.names: dict[int, list[str]] = {}
        self.modules: list[tuple[str, str, Mod]] = []
        self.param_names: dict[int, list[str]] = {}
        self.param_holders: dict[int, list[str]] = {}
        self.params: list[Par] = []
        self.root = root
        self._walk("", "", root)
        self.by_path = {name: module for _, _, module in self.modules for name in self.names[id(module)]}
        self.by_key = {name: par for par in self.params for name in self.param_names[id(par)]}
        self.readers: dict[int, list[tuple[str, ...]]] = {id(par): [] for par in self.params}
        self.calls: dict[int, int] = {id(module): 0 for _, _, module in self.modules}
        self.storages: list[StorageInfo] = [StorageInfo(nbytes=64, born=CALLER, dies=CALLER, kind="input")]
        self.ops: list[_Op] = []
        self.spans: list[tuple[int, ModuleSpan]] = []
        self.x, self.x_needs_grad, self.grad_mode = 0, False, True

    def _walk(self, path: str, parent: str, module: Mod) -> None:
        if id(module) not in self.names:
            self.modules.append((path, parent, module))
        self.names.setdefault(id(module), []).append(path)
        canonical = self.names[id(module)][0]
        for name, par in module.params.items():
            if id(par) not in self.param_names:
                self.params.append(par)
            self.param_names.setdefault(id(par), []).append(_join(path, name))
            holders = self.param_holders.setdefault(id(par), [])
            if canonical not in holders:
                holders.append(canonical)
        for child in module.children:
            self._walk(_join(path, child.name), canonical, child)

    def run(self, entry: str, loss_reads: tuple[str, ...], outside: tuple[str, ...]) -> ModelGraph:
        for path in outside:
            self._call(self.by_path[path], ())
        self._call(self.root, ())
        self._op(LOSS, (LOSS,), [self.by_key[key] for key in loss_reads], act=4)
        backward, spans = self._backward()
        region = Region(
            name="root",
            module="",
            forward=tuple(op.node for op in self.ops),
            backward=backward,
            storages=tuple(self.storages),
            spans=spans,
        )
        grads = {storage.param for storage in self.storages if storage.kind == "gradient"}
        return ModelGraph(
            frontend="trace",
            entry=entry,
            loss="mean of the output",
            compute_dtype="float32",
            inputs=(InputInfo(name="0", shape=(TOKENS,), dtype="int64"),),
            modules=tuple(self._node(path, parent, module) for path, parent, module in self.modules),
            params=tuple(self._param(par, grads) for par in self.params),
            buffers=tuple(
                BufferInfo(
                    name=_join(path, name), shape=shape, dtype="float32", nbytes=4 * _numel(shape), persistent=kept
                )
                for path, _, module in self.modules
                for name, (shape, kept) in module.buffers.items()
            ),
            regions=(region,),
        )

    def _call(self, module: Mod, stack: tuple[str, ...]) -> None:
        fqn = self.names[id(module)][0]
        assert module.has_forward, f"{fqn} has no forward"
        self.calls[id(module)] += 1
        stack = (*stack, fqn)
        mode, self.grad_mode = self.grad_mode, self.grad_mode and not module.no_grad
        start, inputs_need_grad, slot = len(self.ops), self.x_needs_grad and module.takes_grad, len(self.spans)
        self.spans.append((0, None))  # type: ignore[arg-type]
        for step in self._body(module):
            if step == "own":
                self._op(fqn, stack, list(module.params.values()), module.act, module.saved, module.temp)
            elif step.startswith("read "):
                self._op(fqn, stack, [self.by_key[step.removeprefix("read ")]], module.act)
            elif step.startswith("peek "):
                peeked = self.by_path[_join(self.names[id(module)][0], step.removeprefix("peek "))]
                self._op(fqn, stack, list(peeked.params.values()), module.act)
            elif step.startswith("/"):
                self._call(self.by_path[step[1:]], stack)
            else:
                self._call(self.by_path[_join(self.names[id(module)][0], step)], stack)
        self.grad_mode = mode
        self.x_needs_grad = self.x_needs_grad and module.output_grad and not module.no_grad
        self.spans[slot] = (
            start,
            ModuleSpan(
                module=fqn,
                forward=(start, len(self.ops)),
                backward=None,
                inputs_need_grad=inputs_need_grad,
                output_needs_grad=self.x_needs_grad and not module.output_kind.startswith("opaque:"),
                output_kind=module.output_kind,
                output_is_view=module.output_is_view,
                input_bytes=64,
                output_bytes=self.storages[self.x].nbytes,
            ),
        )

    def _body(self, module: Mod) -> tuple[str, ...]:
        if module.body is not None:
            return module.body
        steps = calls_of(module, "")
        return (*steps, "own") if module.params or not module.children else tuple(steps)

    def _op(self, fqn: str, stack: tuple[str, ...], pars: list[Par], act: int, saved: int = 0, temp: int = 0) -> None:
        index = len(self.ops)
        for par in pars:
            if stack not in self.readers[id(par)]:
                self.readers[id(par)].append(stack)
        trains = self.grad_mode and (self.x_needs_grad or any(par.requires_grad for par in pars))
        at = Moment(phase="forward", index=index)
        y = self._store(act, at)
        extra = ((self._store(saved, at),) if saved else ()) + ((self._store(temp, at),) if temp else ())
        keys = tuple(self.param_names[id(par)][0] for par in pars)
        numel = sum(_numel(par.shape) for par in pars)
        node = OpNode(
            target="aten.mm.default" if pars else "aten.relu.default",
            module=fqn,
            inputs=(self.x,),
            outputs=(y, *extra),
            params=keys,
            flops=2 * TOKENS * numel,
            bytes_read=self.storages[self.x].nbytes + sum(_nbytes(par) for par in pars),
            bytes_written=act + saved + temp,
        )
        saved_index = extra[:1] if saved else ()
        self.ops.append(_Op(node=node, trains=trains, x=self.x, y=y, extra=saved_index, x_needs_grad=self.x_needs_grad))
        self.x, self.x_needs_grad = y, trains

    def _store(self, nbytes: int, born: Moment) -> int:
        self.storages.append(StorageInfo(nbytes=nbytes, born=born, dies=born, kind="temporary"))
        return len(self.storages) - 1

    def _lives_to(self, index: int, dies: Moment) -> None:
        storage = self.storages[index]
        if storage.kind != "input":
            crosses = storage.born.phase == "forward" and dies.phase == "backward"
            self.storages[index] = replace(storage, dies=dies, kind="activation" if crosses else storage.kind)

    def _backward(self) -> tuple[tuple[OpNode, ...], tuple[ModuleSpan, ...]]:
        for index, op in enumerate(self.ops):
            self._lives_to(op.x, Moment(phase="forward", index=index))
        ops: list[OpNode] = []
        position: dict[int, int] = {}
        grads: dict[str, int] = {}
        grad_y = -1
        for index in reversed(range(len(self.ops))):
            op = self.ops[index]
            if not op.trains:
                break
            at = Moment(phase="backward", index=len(ops))
            position[index] = len(ops)
            for kept in (op.x, *op.extra):
                self._lives_to(kept, at)
            outputs = []
            if grad_y >= 0:
                self._lives_to(grad_y, at)
            inputs = (op.x, *op.extra) + ((grad_y,) if grad_y >= 0 else ())
            if op.x_needs_grad:
                grad_y = self._store(self.storages[op.x].nbytes, at)
                outputs.append(grad_y)
            else:
                grad_y = -1
            for key in op.node.params:
                par = self.by_key[key]
                if par.requires_grad:
                    if key not in grads:
                        grads[key] = self._store(_nbytes(par), at)
                        self.storages[grads[key]] = replace(
                            self.storages[grads[key]], dies=CALLER, kind="gradient", param=key
                        )
                    outputs.append(grads[key])
            ops.append(
                replace(
                    op.node,
                    target=op.node.target.replace("default", "backward"),
                    inputs=inputs,
                    outputs=tuple(outputs),
                    flops=2 * op.node.flops,
                )
            )
            if not op.x_needs_grad:
                break
        return tuple(ops), tuple(self._span(span, position) for _, span in self.spans)

    @staticmethod
    def _span(span: ModuleSpan, position: dict[int, int]) -> ModuleSpan:
        inside = [position[index] for index in range(*span.forward) if index in position]
        return replace(span, backward=(min(inside), max(inside) + 1) if inside else None)

    def _node(self, path: str, parent: str, module: Mod) -> ModuleNode:
        return ModuleNode(
            fqn=path,
            aliases=tuple(self.names[id(module)][1:]),
            class_name=module.cls or "Module",
            parent=parent,
            children=tuple(dict.fromkeys(self.names[id(child)][0] for child in module.children)),
            own_params=tuple(self.param_names[id(par)][0] for par in module.params.values()),
            own_buffers=tuple(_join(path, name) for name in module.buffers),
            has_forward=module.has_forward,
            num_calls=self.calls[id(module)],
            repeat_class=repeat_class(module),
            traits=module.traits,
        )

    def _param(self, par: Par, grads: set[str]) -> ParamInfo:
        names = self.param_names[id(par)]
        return ParamInfo(
            key=names[0],
            aliases=tuple(names[1:]),
            shape=par.shape,
            dtype=par.dtype,
            nbytes=_nbytes(par),
            requires_grad=par.requires_grad,
            contiguous=par.contiguous,
            holders=tuple(self.param_holders[id(par)]),
            readers=tuple(self.readers[id(par)]),
            gets_grad=names[0] in grads,
            traits=par.traits,
        )


def calls_of(module: Mod, prefix: str) -> list[str]:
    steps: list[str] = []
    for child in module.children:
        path = _join(prefix, child.name)
        if child.called:
            steps += [path] if child.has_forward else calls_of(child, path)
    return steps


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _nbytes(par: Par) -> int:
    return _numel(par.shape) * DTYPE_BYTES[par.dtype]
