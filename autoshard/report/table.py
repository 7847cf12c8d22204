"""Rows, and how they are drawn.

What a report says is decided in the files that make rows; how it looks is decided here alone.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table before it is drawn.

    Attributes:
        title: one line above it.
        headers: the columns.
        rows: cells as text, one tuple for each row.
        numeric: columns that stand to the right.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[str, ...] = ()


_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


def escape(text: str) -> str:
    """Text on one line in which nothing can steer a terminal: names in a plan file may hold anything."""
    return text.translate(_CONTROL)


def format_table(table: Table) -> str:
    """Text of a table, without a line break at the end."""
    if not table.rows:
        return f"{table.title}: none"
    # Imported here: whoever imports the report to explain a code draws no table.
    from tabulate import tabulate

    align = tuple("right" if name in table.numeric else "left" for name in table.headers)
    rows = [[escape(cell) for cell in row] for row in table.rows]
    drawn = tabulate(rows, headers=table.headers, tablefmt="simple", colalign=align, disable_numparse=True)
    return f"{table.title}\n" + "\n".join(line.rstrip() for line in drawn.split("\n"))
