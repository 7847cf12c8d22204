"""Values to text: the tables of a plan, its diagnostics, and the explanation of each code. Imports no torch."""

from autoshard.report.explain import explain, list_codes, title
from autoshard.report.findings import format_diagnostics
from autoshard.report.memory import format_memory, memory_figures
from autoshard.report.plan_text import format_plan, format_verdict
from autoshard.report.table import Table, escape, format_table
from autoshard.report.tables import alternatives_table, memory_table, units_table

__all__ = [
    "Table",
    "alternatives_table",
    "escape",
    "explain",
    "format_diagnostics",
    "format_memory",
    "format_plan",
    "format_table",
    "format_verdict",
    "list_codes",
    "memory_figures",
    "memory_table",
    "title",
    "units_table",
]
