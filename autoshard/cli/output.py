"""The only place that writes to stdout and stderr."""

import contextlib
import os
import sys
from typing import TextIO

from autoshard.report import escape


def write_text(text: str) -> None:
    """Write text for people and a line break to stdout; what the terminal's encoding lacks is escaped."""
    _write(sys.stdout, text)


def write_bytes(data: bytes) -> None:
    """Write data for programs to stdout, byte for byte."""
    sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:
        sys.stdout.write(data.decode("utf-8"))
    else:
        buffer.write(data)


def write_error(text: str) -> None:
    """Write one message to stderr, with the name of the program before it."""
    sys.stdout.flush()
    _write(sys.stderr, f"autoshard: {text}")
    sys.stderr.flush()


def _write(stream: TextIO, text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    clean = "\n".join(escape(line) for line in text.split("\n")) + "\n"
    stream.write(clean.encode(encoding, "backslashreplace").decode(encoding))


def flush() -> None:
    """Write what is buffered, so that a closed pipe is noticed here and not when the interpreter ends."""
    sys.stdout.flush()


def close_quietly() -> None:
    """Send what is still buffered nowhere, because nobody reads it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
