"""The whole story of a diagnostic code, from one text file for each code."""

from pathlib import Path

from autoshard.errors import RequestError

FOLDER = Path(__file__).parent / "explanations"


def list_codes() -> tuple[str, ...]:
    """All codes that can be explained, in order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("AS[0-9][0-9][0-9].md")))


def explain(code: str) -> str:
    """The explanation of a code, in Markdown: what it means, why, what to do, an example.

    Args:
        code: such as ``AS203``; case is irrelevant.

    Raises:
        RequestError: there is no such code; the known ones are listed.
    """
    known = list_codes()
    name = code.strip().upper()
    if name not in known:
        raise RequestError("code", code, "one of " + ", ".join(known), "`autoshard explain` without a code lists them")
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def title(code: str) -> str:
    """The short title of a code.

    Raises:
        RequestError: there is no such code.
    """
    return explain(code).partition("\n")[0].partition(": ")[2]
