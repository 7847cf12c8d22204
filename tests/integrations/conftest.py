"""Configurations on disk, and no network."""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _quiet_and_offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers does not log, and whoever opens a connection fails the test."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """``write_config(model_type="llama", …)``: the path of a config.json."""

    def write(**fields: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields))
        return path

    return write


LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
"""A small causal LM."""
