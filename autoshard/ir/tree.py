"""The module tree of a graph, indexed: who contains whom, and which parameters stand where.

Ancestry is always asked here and never of the text of FQNs: a shared module stands under several parents, so the tree
is a directed acyclic graph, and ``layers.1`` is not inside ``encoder`` because of its letters.
"""

from autoshard.ir.graph import ModelGraph, ModuleNode, ParamInfo
from autoshard.ir.recent import Recent


class Tree:
    """Containment in one graph. Build it with ``Tree.of``; all sets are made once, on first use.

    Attributes:
        nodes: modules by canonical FQN, in pre-order.
        params: parameters by key, in the order of the graph.
        parents: canonical FQNs of all parents by FQN; two or more for a shared module.
        pre_index: place of each module in pre-order.
        post_order: FQNs of all modules, children before parents, the root last.
        held_order: place of each parameter where children's parameters come before a module's own.
    """

    __slots__ = (
        "_above",
        "_below",
        "_canonical",
        "_keys",
        "held_order",
        "nodes",
        "params",
        "parents",
        "post_index",
        "post_order",
        "pre_index",
    )

    def __init__(self, graph: ModelGraph) -> None:
        self.nodes: dict[str, ModuleNode] = {node.fqn: node for node in graph.modules}
        self.pre_index = {fqn: index for index, fqn in enumerate(self.nodes)}
        self.params: dict[str, ParamInfo] = {param.key: param for param in graph.params}
        parents: dict[str, list[str]] = {fqn: [] for fqn in self.nodes}
        for node in graph.modules:
            for child in dict.fromkeys(node.children):
                parents[child].append(node.fqn)
        self.parents = {fqn: tuple(found) for fqn, found in parents.items()}
        self.post_order = _post_order(self.nodes)
        self.post_index = {fqn: index for index, fqn in enumerate(self.post_order)}
        self.held_order: dict[str, int] = {}
        for fqn in self.post_order:
            for key in self.nodes[fqn].own_params:
                self.held_order.setdefault(key, len(self.held_order))
        self._canonical = {alias: node.fqn for node in graph.modules for alias in (node.fqn, *node.aliases)}
        self._below: dict[str, frozenset[str]] = {}
        self._above: dict[str, frozenset[str]] = {}
        self._keys: dict[str, tuple[str, ...]] = {}

    @classmethod
    def of(cls, graph: ModelGraph) -> "Tree":
        """The tree of a graph; the trees of the last few graphs are kept, since every analysis asks for one."""
        return _RECENT.get(graph, None, lambda: cls(graph))

    def canonical(self, path: str) -> str | None:
        """Canonical FQN of a path, ``None`` if no module stands there."""
        return self._canonical.get(path)

    def below(self, fqn: str) -> frozenset[str]:
        """The module and everything inside it."""
        found = self._below.get(fqn)
        if found is None:
            found = frozenset((fqn,)).union(*(self.below(child) for child in self.nodes[fqn].children))
            self._below[fqn] = found
        return found

    def above(self, fqn: str) -> frozenset[str]:
        """All modules that contain it by any path, itself left out."""
        found = self._above.get(fqn)
        if found is None:
            parents = self.parents[fqn]
            found = frozenset(parents).union(*(self.above(parent) for parent in parents))
            self._above[fqn] = found
        return found

    def is_inside(self, fqn: str, outer: str) -> bool:
        """``fqn`` is ``outer`` or stands somewhere inside it."""
        return fqn == outer or outer in self.above(fqn)

    def keys(self, fqn: str) -> tuple[str, ...]:
        """Keys of all parameters registered in the module or inside it, each once, own ones first."""
        found = self._keys.get(fqn)
        if found is None:
            node = self.nodes[fqn]
            unique = dict.fromkeys(node.own_params)
            for child in node.children:
                unique.update(dict.fromkeys(self.keys(child)))
            found = tuple(unique)
            self._keys[fqn] = found
        return found


_RECENT: Recent[Tree] = Recent(4)


def _post_order(nodes: dict[str, ModuleNode]) -> tuple[str, ...]:
    order: dict[str, None] = {}
    stack = [("", False)]
    while stack:
        fqn, is_done = stack.pop()
        if fqn in order:
            continue
        if is_done:
            order[fqn] = None
        else:
            stack.append((fqn, True))
            stack += [(child, False) for child in reversed(nodes[fqn].children)]
    return tuple(order)
