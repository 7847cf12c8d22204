"""Bytes and nanoseconds to text and back.

Binary units (KiB, MiB, GiB, TiB) are powers of 1024, decimal ones (kB, MB, GB, TB) powers of 1000; a bare number is
bytes. Text is always made with binary units.
"""

import re
from decimal import Decimal

_FACTORS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(size: int | str) -> int:
    """Bytes of a size given as a number of bytes or as text such as ``60GiB`` or ``1.5 GB``.

    Raises:
        ValueError: it is not a size, or not a positive one; the message says what would be.

    Examples:
        >>> parse_bytes("256MiB")
        268435456
        >>> parse_bytes(1024)
        1024
    """
    expected = "a positive size such as 60GiB, 500MB or a number of bytes"
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ValueError(expected)
    if isinstance(size, int):
        num_bytes = size
    else:
        found = _SIZE.fullmatch(size)
        if found is None or found[2].lower() not in _FACTORS:
            raise ValueError(expected)
        num_bytes = int(Decimal(found[1]) * _FACTORS[found[2].lower()])
    if num_bytes <= 0:
        raise ValueError(expected)
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Text of a number of bytes, three significant digits or more.

    Examples:
        >>> format_bytes(268435456)
        '256 MiB'
        >>> format_bytes(1536)
        '1.50 KiB'
    """
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= factor:
            value = size / factor
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{sign}{value:.{digits}f} {unit}"
    return f"{sign}{size} B"


def format_ns(nanoseconds: int) -> str:
    """Text of a time given in nanoseconds.

    Examples:
        >>> format_ns(1_500_000)
        '1.50 ms'
    """
    for factor, unit in ((10**9, "s"), (10**6, "ms"), (10**3, "µs")):
        if nanoseconds >= factor:
            value = nanoseconds / factor
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{nanoseconds} ns"
