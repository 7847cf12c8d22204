"""Architectures made small by their configuration, so that two processes train them in a second.

Widths and numbers of heads are divided by one factor, so that the size of a head stays; layers are cut, experts and
words are few, and the tokens with a name of their own get numbers among these. A configuration has its own rules about
what divides what, so several factors are tried and the smallest model is taken whose forward runs on the inputs that
autoshard makes for it.
"""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.reach.architectures import architectures, cut, fit, keep_depth, peers

SEQ = 32
IMAGE = 64
VOCAB = 512
EXPERTS = 8
FACTORS = (16, 12, 8, 6, 4, 3, 2, 1)
LAYERS = 2
MAX_BYTES = 400 * 10**6
"""Parameters of the largest model that is trained: each rank holds four copies of them."""
DIVIDED = (
    "hidden_size", "d_model", "n_embd", "intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim",
    "num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads",
    "decoder_attention_heads", "moe_intermediate_size", "shared_expert_intermediate_size", "mlp_dim", "dim",
    "hidden_dim", "embed_dim", "n_inner", "ffn_hidden_size", "encoder_hidden_size", "word_embed_proj_dim",
    "q_lora_rank", "kv_lora_rank", "vocab_size_per_layer_input", "embedding_size", "d_inner",
)  # fmt: skip
"""Fields that are divided by the factor."""
WIDTHS_BY_STAGE = ("hidden_sizes", "embed_dims", "neck_hidden_sizes", "dims")
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
RANDOMNESS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "mask_feature_prob")
"""Each rank would draw for itself which layers run: the rules warn of it, and a reference has nothing to compare."""

DOZEN = (
    "llama", "gpt2", "bert", "t5", "bart", "vit", "convnext", "clip", "mixtral", "gemma2", "mamba2", "whisper",
)  # fmt: skip
"""Trained in every run of the test suite: of each kind of architecture one."""


def sample() -> dict[str, str]:
    """Sixty architectures, evenly by task and name, and the dozen; the class of each."""
    known, classes = peers(), architectures()
    kinds = [kind for kind in classes if kind in known]
    chosen = keep_depth(kinds) | set(DOZEN)
    return {kind: classes[kind] for kind in classes if kind in chosen}


def small_config(kind: str, factor: int) -> Any:
    """The default configuration of an architecture, divided by a factor."""
    import transformers

    config = transformers.CONFIG_MAPPING[kind]()
    cut(config, layers=LAYERS)
    fit(config)
    for inner in _all(config):
        _divide(inner, factor)
        _shrink_image(inner)
        _shorten_vocabulary(inner)
        inner.use_cache = False
    return config


def _all(config: Any) -> Iterator[Any]:
    from autoshard.integrations.transformers.facts import sub_configs

    return sub_configs(config)


def _divide(config: Any, factor: int) -> None:
    for name, value in list(vars(config).items()):
        if name in DIVIDED and type(value) is int and value % factor == 0 and value >= factor:
            _set(config, name, value // factor)
        elif name in DIVIDED and type(value) is int and "head" in name and value < factor:
            _set(config, name, 1)
        elif name in EXPERT_COUNTS and type(value) is int:
            _set(config, name, min(value, EXPERTS))
        elif name in WIDTHS_BY_STAGE and isinstance(value, list | tuple) and all(type(n) is int for n in value):
            _set(config, name, type(value)(max(n // factor, 1) for n in value))
        elif name == "depths" and isinstance(value, list | tuple):
            _set(config, name, type(value)(min(n, LAYERS) for n in value))
        elif name in RANDOMNESS:
            _set(config, name, 0.0)


def _shrink_image(config: Any) -> None:
    """Images of at least four patches along each edge."""
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if type(size) is int and type(patch) is int and patch > 0:
        smallest = -(-max(4 * patch, IMAGE) // patch) * patch
        if smallest < size:
            _set(config, "image_size", smallest)


def _shorten_vocabulary(config: Any) -> None:
    """Fewer words; the tokens with a name of their own keep apart from each other."""
    vocab = getattr(config, "vocab_size", None)
    if type(vocab) is not int or vocab <= VOCAB:
        return
    _set(config, "vocab_size", VOCAB)
    taken = VOCAB
    for name, value in list(vars(config).items()):
        if "token" in name and name.endswith(("_id", "_index", "_idx")) and type(value) is int and value >= VOCAB:
            taken -= 1
            _set(config, name, taken)


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, NotImplementedError, ValueError):
        return


def load(kind: str, cls: str, factor: int) -> Any:
    """The small model with its values and the inputs of two steps, as a trial takes them."""
    import transformers

    from autoshard.integrations.transformers import make_inputs
    from autoshard.integrations.transformers.configuration import build
    from autoshard.integrations.transformers.facts import longest_text
    from autoshard.runtime.trial import Case

    torch.manual_seed(0)
    random.seed(0)
    config = small_config(kind, factor)
    model_class = getattr(transformers, cls)
    meta = build(kind, config, model_class).model
    made = make_inputs(meta, kind, batch=2, seq=min(SEQ, longest_text(config) or SEQ)).pair
    model = model_class._from_config(config, dtype=torch.float32)
    return Case(model=model.train(), pairs=tuple(_drawn(made, seed) for seed in range(2)))


def _drawn(pair: Any, seed: int) -> Any:
    """The inputs with random values in place of zeros."""
    from autoshard.capture.containers import map_tensors

    generator = torch.Generator().manual_seed(seed)

    def draw(given: torch.Tensor) -> torch.Tensor:
        if not given.is_floating_point():
            return given
        return torch.randn(given.shape, generator=generator, dtype=given.dtype)

    return map_tensors(pair, draw)


def loader(kind: str, cls: str) -> Any:
    """How to load the smallest model of an architecture that runs, and its bytes.

    Raises:
        ModelLoadError: no factor gives a model that runs and is small enough.
    """
    from autoshard.errors import ModelLoadError
    from autoshard.runtime.trial import find_loss

    reasons = []
    for factor in FACTORS:
        try:
            config = small_config(kind, factor)
            num_bytes = _bytes(kind, cls, config)
            if num_bytes > MAX_BYTES:
                reasons.append(f"1/{factor}: {num_bytes >> 20} MiB")
                break
            case = load(kind, cls, factor)
            args, kwargs = case.pairs[0]
            value = find_loss(case.model(*args, **kwargs), None)[0]
            if not torch.isfinite(value):
                raise ValueError(f"the loss is {float(value)}")
        except Exception as error:  # a configuration that does not survive this division
            reasons.append(
                f"1/{factor}: {type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
            )
            continue
        return partial(load, kind, cls, factor), num_bytes
    raise ModelLoadError(kind, f"no small model of it runs: {'; '.join(reasons)}", "choose other sizes")


def _bytes(kind: str, cls: str, config: Any) -> int:
    import transformers

    from autoshard.capture.build import on_meta

    model: nn.Module = on_meta(lambda: getattr(transformers, cls)._from_config(config, dtype=torch.float32))
    return sum(param.numel() * param.element_size() for param in model.parameters())
