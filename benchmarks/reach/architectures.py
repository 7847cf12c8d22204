"""transformers' architectures: which there are, which of them run at full size, and how the others lose their depth.

The class of a model type is the first match of causal LM, sequence to sequence, image and text, image classification,
masked LM and base model. 633 types of transformers 5.24 have one; 574 of these build from their default configuration
without any library beside torch and transformers. That is the number that shares are taken of, and on which two peers
were tried: their outcomes stand in ``peers.csv``.
"""

import csv
from pathlib import Path
from typing import Any

import torch

PEERS = Path(__file__).parent / "peers.csv"
LAYERS = 4
FULL_SIZE = 60
"""Architectures that keep their depth."""

DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth",
    "num_encoder_layers", "num_decoder_layers", "num_attention_layers", "encoder_num_layers", "decoder_num_layers",
    "num_blocks", "n_encoder_layers", "n_decoder_layers", "num_block_layers",
)  # fmt: skip
"""Names under which configurations keep the number of layers of a stack."""
TASKS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "IMAGE_CLASSIFICATION", "MASKED_LM")


def architectures() -> dict[str, str]:
    """The class of each model type, by task and name."""
    from transformers.models.auto import modeling_auto as auto

    mappings = [getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS]
    found: dict[str, str] = {}
    for mapping in (*mappings, auto.MODEL_MAPPING_NAMES):
        for kind, cls in sorted(mapping.items()):
            found.setdefault(kind, cls if isinstance(cls, str) else cls[0])
    return found


def peers() -> dict[str, dict[str, str]]:
    """What two peers do with each architecture that builds by default, by model type.

    ``accelerate`` is the outcome of ``fsdp2_prepare_model`` with the default list of classes, ``transformers`` how
    much of the parameters the root unit has under transformers' own plan.
    """
    with PEERS.open() as lines:
        return {row["type"]: row for row in csv.DictReader(lines)}


def keep_depth(kinds: list[str]) -> set[str]:
    """Those that run at full size: evenly over all, by task and name."""
    return {kinds[index * len(kinds) // FULL_SIZE] for index in range(FULL_SIZE)}


def make(kind: str, cls: str, *, is_full: bool) -> Any:
    """The model of an architecture on the meta device, and whether its depth was kept.

    Raises:
        ModelLoadError: the default configuration does not build.
    """
    import transformers

    from autoshard.errors import ModelLoadError
    from autoshard.integrations.transformers.configuration import build

    def built(is_cut: bool) -> Any:
        config = transformers.CONFIG_MAPPING[kind]()
        if is_cut:
            cut(config)
        fit(config)
        return build(kind, config, getattr(transformers, cls)).model

    if not is_full:
        try:
            return built(is_cut=True), False
        except ModelLoadError:  # lists by layer that do not survive the cut, or a class that does not build at all
            pass
    return built(is_cut=False), True


def builds_by_default(kind: str, cls: str) -> bool:
    """Whether the untouched default configuration builds on the meta device."""
    import transformers

    try:
        with torch.device("meta"):
            getattr(transformers, cls)(transformers.CONFIG_MAPPING[kind]())
    except Exception:  # whatever a constructor raises
        return False
    return True


def cut(config: Any, depth: int = 0, layers: int = LAYERS) -> None:
    """Leave each stack at most so many layers, also in the configurations within a configuration."""
    names = [name for name in DEPTHS if "stage" not in config.attribute_map.get(name, "")]  # stages differ in width
    before = {name: getattr(config, name, None) for name in names}
    for name, count in before.items():
        if isinstance(count, int) and not isinstance(count, bool) and count > layers:
            try:
                setattr(config, name, layers)
            except (AttributeError, NotImplementedError, ValueError):
                continue
    for name, value in list(vars(config).items()):
        is_list = isinstance(value, list) and len(value) > layers
        if (
            is_list
            and len(value) in before.values()
            and any(word in name for word in ("layer", "mlp", "block", "type"))
        ):
            setattr(config, name, value[:layers])
        if hasattr(value, "to_dict") and hasattr(value, "model_type") and depth < 4:
            cut(value, depth + 1, layers)


def fit(config: Any) -> None:
    """Mend default configurations that do not run: widths and rotary sections that do not fit each other."""
    text, vision = getattr(config, "text_config", None), getattr(config, "vision_config", None)
    width = getattr(text, "hidden_size", None)
    if isinstance(width, int) and isinstance(getattr(vision, "out_hidden_size", None), int):
        vision.out_hidden_size = width
    elif isinstance(width, int) and vision is not None and config.model_type == "qwen2_vl":
        vision.hidden_size = width
    if getattr(config, "mm_tokens_per_image", None) and vision is not None:
        config.mm_tokens_per_image = min(config.mm_tokens_per_image, (vision.image_size // vision.patch_size) ** 2)
    if getattr(config, "default_language", "") is None:
        config.default_language = config.languages[0]
    if getattr(config, "image_token_index", 0) is None:
        config.image_token_index = text.vocab_size - 1
    for part in (config, text):
        if getattr(part, "num_experts_per_tok", 0) is None:
            part.num_experts_per_tok = 2
        if getattr(part, "moe_intermediate_size", None):  # kernels of grouped products take multiples of 16 bytes
            part.moe_intermediate_size += -part.moe_intermediate_size % 8
        rope = getattr(part, "rope_parameters", None)
        if isinstance(rope, dict) and "mrope_section" in {*rope, *part.ignore_keys_at_rope_validation}:
            head = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
            pairs = -(-int(head * rope.get("partial_rotary_factor", 1.0)) // 2)
            if sum(rope.get("mrope_section", ())) != pairs:
                rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
