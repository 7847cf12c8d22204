"""One captured step as bytes, and back: data only, so that a file of the cache can do nothing but be read."""

import hashlib
import zlib
from dataclasses import dataclass

import msgspec

from autoshard.ir import ModelGraph

MAGIC = b"autoshard step 1\n"
DIGEST_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """A file that a capture depends on.

    Attributes:
        path: absolute.
        size: bytes.
        mtime_ns: when it was last changed.
        digest: of its content; empty for installed packages, of which size and time are enough.
    """

    path: str
    size: int
    mtime_ns: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStep:
    """What the cache keeps.

    Attributes:
        graph: the captured step.
        assumed: what was assumed of the model and its inputs.
        files: what it depends on.
    """

    graph: ModelGraph
    assumed: tuple[str, ...]
    files: tuple[FileState, ...]


def encode_step(step: CachedStep) -> bytes:
    """The step as bytes that say whether they are whole."""
    packed = zlib.compress(msgspec.msgpack.encode(step), 1)
    return MAGIC + hashlib.blake2b(packed, digest_size=DIGEST_SIZE).digest() + packed


def decode_step(data: bytes) -> CachedStep | None:
    """The step; ``None`` for anything that ``encode_step`` has not made."""
    start = len(MAGIC) + DIGEST_SIZE
    packed = data[start:]
    if (
        not data.startswith(MAGIC)
        or hashlib.blake2b(packed, digest_size=DIGEST_SIZE).digest() != data[len(MAGIC) : start]
    ):
        return None
    try:
        return msgspec.msgpack.decode(zlib.decompress(packed), type=CachedStep)
    except (msgspec.MsgspecError, zlib.error):
        return None
