"""The only place that writes to stdout and stderr."""

import contextlib
import os
import sys

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Names in a plan file may hold anything; none of it may steer a terminal."""


def write_text(text: str) -> None:
    """Write text for people and a line break to stdout; what the terminal's encoding lacks is escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    clean = text.translate(_CONTROL) + "\n"
    sys.stdout.write(clean.encode(encoding, "backslashreplace").decode(encoding))


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
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    clean = f"autoshard: {text}".translate(_CONTROL) + "\n"
    sys.stderr.write(clean.encode(encoding, "backslashreplace").decode(encoding))
    sys.stderr.flush()


def flush() -> None:
    """Write what is buffered, so that a closed pipe is noticed here and not when the interpreter ends."""
    sys.stdout.flush()


def close_quietly() -> None:
    """Send what is still buffered nowhere, because nobody reads it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
