"""What a transformers configuration tells of the inputs that its model takes.

Configurations name the same fact in several ways and keep it at several depths; each fact here is a list of the names
that are in use, looked up in the order of the sub-configurations.
"""

import itertools
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 4
TEXT_PARTS = ("text_config", "text_encoder", "llm_config", "language_config", "encoder", "thinker_config", "decoder")
VISION_PARTS = ("vision_config", "vision_encoder", "image_encoder_config", "encoder", "backbone_config", "vq_config")
AUDIO_PARTS = ("audio_config", "audio_encoder", "encoder_config", "speech_encoder", "audio_encoder_config", "encoder")
POSITIONS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length", "max_sequence_length", "n_ctx",
    "seq_length", "max_target_positions", "block_size", "max_text_len",
)  # fmt: skip


def sub_configs(config: Any, depth: int = 0) -> Iterator[Any]:
    """A configuration and the configurations in it, outer before inner."""
    yield config
    if depth < MAX_DEPTH:
        for value in vars(config).values():
            if hasattr(value, "to_dict") and hasattr(value, "model_type"):
                yield from sub_configs(value, depth + 1)


def parts(config: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """The named sub-configurations, outer before inner, then the configuration itself."""
    for inner in sub_configs(config):
        for name in names:
            found = getattr(inner, name, None)
            if hasattr(found, "to_dict"):
                yield found
    yield config


def has_none(config: Any, names: tuple[str, ...]) -> bool:
    """Whether the configuration has a place for such a part and leaves it empty: the model is built without it."""
    there = [vars(config)[name] for name in names if name in vars(config)]
    return bool(there) and all(value is None for value in there)


def part(config: Any, names: tuple[str, ...]) -> Any:
    """The first of the named sub-configurations; the configuration itself if there is none."""
    return next(parts(config, names))


def number(configs: Any, *names: str) -> int | None:
    """The first of the named attributes that is a whole number from 1; of a list, its first element.

    Args:
        configs: a configuration, or several in the order of their say.
        names: attributes, in the order of their say.
    """
    for config in configs if isinstance(configs, list | tuple) else (configs,):
        for name in names:
            found = value(config, name)
            found = found[0] if isinstance(found, list | tuple) and found else found
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
    return None


def value(config: Any, name: str) -> Any:
    """An attribute of a configuration, ``None`` where it has none or cannot compute it."""
    try:
        return getattr(config, name, None)
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError, IndexError):
        return None


def size_pair(configs: list[Any], *names: str) -> tuple[int, int] | None:
    """Height and width from the first of the named attributes that gives them, in the order of the configurations."""
    for config, name in itertools.product(configs, names):
        found = value(config, name)
        if isinstance(found, dict):
            edge = found.get("shortest_edge") or found.get("longest_edge")
            found = (found.get("height", edge), found.get("width", edge))
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found, found
        if isinstance(found, list | tuple) and len(found) == 2 and all(isinstance(n, int) and n > 0 for n in found):
            return found[0], found[1]
    return None


def special_tokens(config: Any) -> dict[str, int]:
    """Every token id that has a name of its own, by that name without its ending, the outermost first."""
    found: dict[str, int] = {}
    for inner in sub_configs(config):
        for name, token in vars(inner).items():
            stem = name.removesuffix("_id").removesuffix("_index").removesuffix("_idx")
            if stem != name and stem.endswith("token") and isinstance(token, int) and not isinstance(token, bool):
                found.setdefault(stem.removesuffix("_token"), token)
    return found


def longest_text(config: Any) -> int | None:
    """The most positions that the text part takes, as a round number; ``None`` where there is no limit."""
    limit = number(list(parts(config, TEXT_PARTS)), *POSITIONS)
    if limit is None:
        return None
    # Some models keep a few positions for themselves (514 for texts of 512).
    return limit - limit % 64 if limit > 64 else limit
