"""``autoshard explain``: the whole story of a diagnostic code."""

import argparse
import json

from autoshard.cli.output import write_bytes, write_text
from autoshard.report import explain, list_codes, title

NAME = "explain"
HELP = "tell what a diagnostic means"
DESCRIPTION = "Tell what a diagnostic code means, why it matters and what to do. Without a code: list them all."
EPILOG = """\
examples:
  autoshard explain AS203
  autoshard explain

`autoshard --help` lists the exit codes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("code", metavar="CODE", nargs="?", help="such as AS203; without it all codes are listed")
    parser.add_argument("--json", action="store_true", help="print the same as JSON and nothing else")


def run(args: argparse.Namespace) -> int:
    """Look up and print."""
    if args.code is None:
        titles = {code: title(code) for code in list_codes()}
        if args.json:
            _write_json(titles)
        else:
            write_text("\n".join(f"{code}  {text}" for code, text in titles.items()))
        return 0
    text = explain(args.code)
    code = args.code.strip().upper()
    if args.json:
        _write_json({"code": code, "title": title(code), "text": text})
    else:
        write_text(text.rstrip())
    return 0


def _write_json(value: dict[str, str]) -> None:
    write_bytes((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))
