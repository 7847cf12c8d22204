"""What a stage found, as stable text: ``autoshard plan --dump ir|analysis|space|timeline``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoshard.pipeline import PlanResult

DUMPS = ("ir", "analysis", "space", "timeline")


def format_dump(name: str, result: "PlanResult") -> str:
    """Text of one of the values from which a plan was made, without a line break at the end.

    Args:
        name: one of ``DUMPS``.
        result: the plan and what it was made from.
    """
    # Imported here: of all commands only a dump needs the stages.
    from autoshard.analysis.text import format_analysis, format_space
    from autoshard.ir.text import format_graph
    from autoshard.simulate import format_timeline

    if name == "ir":
        text = format_graph(result.graph)
    elif name == "analysis":
        text = format_analysis(result.analysis)
    elif name == "space":
        text = format_space(result.analysis.space)
    else:
        assert name == "timeline"
        text = format_timeline(result.timeline)
    return text.rstrip("\n")
