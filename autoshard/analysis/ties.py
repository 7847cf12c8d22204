"""Which modules share a parameter."""

from autoshard.ir import ModelGraph


def tied_parameters(graph: ModelGraph) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Each parameter that two or more modules register, with these modules, in the order of the graph.

    A module that registers one parameter under two names ties nothing: it is always sharded as a whole.
    """
    return tuple((param.key, param.holders) for param in graph.params if len(param.holders) > 1)
