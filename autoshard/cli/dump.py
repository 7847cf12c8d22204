"""What a stage found, as stable text: ``autoshard plan --dump ir|analysis|space|timeline``."""

import json
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


def format_record(result: "PlanResult") -> bytes:
    """The whole timeline as JSON, one event a line."""
    from autoshard.simulate import timeline_record

    fields = []
    for name, value in timeline_record(result.timeline).items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines = ",\n".join(f"    {json.dumps(item, ensure_ascii=False)}" for item in value)
            fields.append(f'  "{name}": [\n{lines}\n  ]')
        else:
            fields.append(f'  "{name}": {json.dumps(value, ensure_ascii=False)}')
    return ("{\n" + ",\n".join(fields) + "\n}\n").encode()
