"""One maker for each argument that a forward may take, by its name: the table of what can be made, in one file.

A maker returns the forms that the argument may have, the likeliest first; where there are several the caller finds out
which one runs. It returns none where the argument is better left out. Values are plausible where models look at them
(token ids, grids, masks) and of no meaning elsewhere.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.integrations.transformers.facts import (
    AUDIO_PARTS,
    TEXT_PARTS,
    VISION_PARTS,
    has_none,
    number,
    parts,
    special_tokens,
    sub_configs,
)
from autoshard.integrations.transformers.sizes import Sizes

Form = Any
Maker = Callable[["Wanted"], list[Form]]
BBOX_VALUES = 4
FIRST_ORDINARY_TOKEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What inputs are made for.

    Attributes:
        config: the model's configuration.
        class_name: name of the model's class; its ending tells the task.
        params: names of the forward's parameters.
        sizes: how large.
        placeholders: by modality (``image``, ``audio``, ``video``), how many tokens of a text stand for its features.
    """

    config: Any
    class_name: str
    params: frozenset[str]
    sizes: Sizes
    placeholders: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> dict[str, int]:
        """The special tokens of the configuration, by name."""
        return special_tokens(self.config)

    def is_task(self, *endings: str) -> bool:
        """Whether the class is for one of these tasks."""
        return any(ending in self.class_name for ending in endings)


def ordinary_tokens(wanted: Wanted, length: int) -> torch.Tensor:
    """Ids of tokens that have no meaning of their own, the same for each sample; the last one ends the text."""
    special = set(wanted.tokens.values())
    vocab = wanted.sizes.vocab
    ordinary = [n for n in range(min(FIRST_ORDINARY_TOKEN, vocab - 1), min(vocab, 200)) if n not in special] or [0]
    row = torch.tensor([ordinary[i % len(ordinary)] for i in range(length)], dtype=torch.long)
    end = wanted.tokens.get("eos")
    if end is not None and 0 <= end < vocab and length > 1:
        row[-1] = end
    return row.expand(wanted.sizes.batch, length).contiguous()


def text_tokens(wanted: Wanted) -> torch.Tensor:
    """Ids of a text, with as many placeholders as the features of images and sounds need."""
    per_sample = {name: -(-count // wanted.sizes.batch) for name, count in wanted.placeholders.items()}
    marks = {name: _around(wanted.tokens, name) for name in per_sample}
    needed = sum(per_sample.values()) + sum(len(before) + len(after) for before, after in marks.values())
    length = max(wanted.sizes.seq, needed + 32 if needed else 0)
    ids = ordinary_tokens(wanted, length)
    at = 1
    for name, count in per_sample.items():
        before, after = marks[name]
        run = [*before, *[wanted.tokens[name]] * count, *after]
        ids[:, at : at + len(run)] = torch.tensor(run)
        at += len(run)
    return ids


def placeholder_kinds(wanted: Wanted) -> torch.Tensor:
    """For each token of the text 1 if it stands for an image, 2 for a video, 3 for a sound, else 0."""
    ids = text_tokens(wanted)
    kinds = torch.zeros_like(ids)
    for kind, name in enumerate(("image", "video", "audio"), start=1):
        if name in wanted.placeholders:
            kinds[ids == wanted.tokens[name]] = kind
    return kinds


def _around(tokens: dict[str, int], name: str) -> tuple[list[int], list[int]]:
    def first(*names: str) -> list[int]:
        return [tokens[n] for n in names if n in tokens][:1]

    short = {"image": ("vision_start", "image_start", "boi"), "audio": ("audio_start", "audio_bos", "boa")}
    long = {"image": ("vision_end", "image_end", "eoi"), "audio": ("audio_end", "audio_eos", "eoa")}
    return first(*short.get(name, ())), first(*long.get(name, ()))


def _like_text(fill: int) -> Maker:
    return lambda wanted: [torch.full_like(text_tokens(wanted), fill)]


def _decoder_ids(wanted: Wanted) -> list[Form]:
    return _with_codebooks(wanted, ordinary_tokens(wanted, wanted.sizes.seq))


def _with_codebooks(wanted: Wanted, ids: torch.Tensor) -> list[Form]:
    """Ids of a text, and where the configuration tells of codebooks one for each of them, and for the text beside them.

    Codes are small numbers, so that each codebook has them.
    """
    decoder = [*parts(wanted.config, ("decoder_config",)), *sub_configs(wanted.config)]
    books = number(decoder, "num_codebooks")
    if not books and "decoder_input_ids" in wanted.params and not wanted.params & {"pixel_values"}:
        books = number(getattr(wanted.config, "decoder_config", None) or (), "num_channels")
    deep = [torch.ones(*ids.shape, count, dtype=torch.long) for count in (books, books + 1)] if books else []
    return [ids, *deep]


def _pixel_values(wanted: Wanted) -> list[Form]:
    s = wanted.sizes
    if "input_ids" in wanted.params and has_none(wanted.config, VISION_PARTS):  # a text goes without a picture
        return []
    image = torch.zeros(s.batch, s.channels, s.height, s.width)
    video = torch.zeros(s.batch, s.frames, s.channels, s.height, s.width)
    several = torch.zeros(s.batch, 1, s.channels, s.height, s.width)
    if wanted.params & {"image_grid_thw", "grid_thw"}:
        rows, columns = _grid(s)
        num_patches = s.batch * rows * columns
        flat = torch.zeros(num_patches, s.channels * s.temporal_patch * s.patch**2)
        square = torch.zeros(num_patches, s.channels, s.patch, s.patch)
        wide = [torch.zeros(num_patches, width) for width in s.widths if width > 1]
        return [flat, square, image, *wide]
    if wanted.params & {"spatial_shapes", "image_position_ids", "pixel_position_ids", "target_sizes"}:
        rows, columns = _grid(s)
        flat = torch.zeros(s.batch, rows * columns, s.channels * s.patch**2)
        return [image, flat, several, torch.zeros(s.batch, s.channels, s.patch, rows * columns * s.patch)]
    if any(hasattr(inner, "num_frames") for inner in sub_configs(wanted.config)):
        return [video, image]
    patches = torch.zeros(math.prod(_grid(s)) * s.batch, s.channels * s.patch**2)
    tiles = [torch.zeros(s.batch, count, s.channels, s.height, s.width) for count in (2, 3, 5)]
    in_patches = torch.zeros(s.batch, 1, math.prod(_grid(s)), s.channels * s.patch**2)
    return [image, several, *tiles, patches, in_patches]


def _video(wanted: Wanted) -> list[Form]:
    s = wanted.sizes
    return [torch.zeros(s.batch, s.frames, s.channels, s.height, s.width)]


def _grid(s: Sizes) -> tuple[int, int]:
    """Patches along the height and width of an image, multiples of those that are merged."""
    return tuple(max(edge // s.patch // s.merge, 1) * s.merge for edge in (s.height, s.width))  # type: ignore[return-value]


def _grid_thw(wanted: Wanted) -> list[Form]:
    return [torch.tensor([[1, *_grid(wanted.sizes)]] * wanted.sizes.batch)]


def _patches(wanted: Wanted) -> list[Form]:
    """The hidden states that a vision tower of its own takes: patches that are still pixels."""
    s = wanted.sizes
    rows, columns = _grid(s)
    width = s.channels * s.temporal_patch * s.patch**2
    hidden = number(wanted.config, "hidden_size", "embed_dim") or width
    patches = [torch.zeros(s.batch * rows * columns, size) for size in (width, hidden)]
    sounds = [torch.zeros(s.batch, size, length) for length in (s.seq, s.samples) for size in s.mels]
    return [*patches, *sounds]


WIDTHS = ("hidden_size", "d_model", "n_embd", "encoder_hidden_size")


def _embeddings(length: int | None = None, names: tuple[str, ...] = WIDTHS) -> Maker:
    """Vectors as wide as the model, of a text or of a fixed length."""

    def make(wanted: Wanted) -> list[Form]:
        text = list(parts(wanted.config, TEXT_PARTS))
        widths = [number(text, name) for name in names]
        if not any(widths):
            return []
        shape = wanted.sizes.batch, length or wanted.sizes.seq
        return [torch.zeros(*shape, width) for width in dict.fromkeys([*widths, *wanted.sizes.widths]) if width]

    return make


def _image_sizes(wanted: Wanted) -> list[Form]:
    return [torch.tensor([[wanted.sizes.height, wanted.sizes.width]] * wanted.sizes.batch)]


def _pixel_mask(wanted: Wanted) -> list[Form]:
    s = wanted.sizes
    return [torch.ones(s.batch, s.height, s.width, dtype=torch.long)]


def _spectrogram(wanted: Wanted) -> list[Form]:
    s = wanted.sizes
    if has_none(wanted.config, AUDIO_PARTS):
        return []
    is_whisper_like = any(getattr(inner, "max_source_positions", None) for inner in sub_configs(wanted.config))
    # A model that adds a sound to a text, token by token, says how many frames make one.
    per_token = number(wanted.config, "audio_length_per_tok")
    frames = per_token * s.seq if per_token else s.mel_frames
    shapes = [shape for mel in s.mels for shape in ((mel, frames), (frames, mel))]
    if not is_whisper_like:
        shapes = [shape[::-1] for shape in shapes]
    flat = [torch.zeros(s.batch, *shape) for shape in shapes]
    return [*flat, *(form.unsqueeze(1) for form in flat[:2])]


def _spectrogram_mask(wanted: Wanted) -> list[Form]:
    s = wanted.sizes
    ones = torch.ones(s.batch, s.mel_frames, dtype=torch.long)
    return [ones, ones.bool()]


def _sound(wanted: Wanted) -> list[Form]:
    s = wanted.sizes
    flat, channel = torch.zeros(s.batch, s.samples), torch.zeros(s.batch, 1, s.samples)
    if has_none(wanted.config, AUDIO_PARTS):
        return []
    spectrogram = torch.zeros(s.batch, s.mel_frames, s.mels[0])
    has_mel = number(wanted.config, "num_mel_bins") is not None
    widths = dict.fromkeys([*s.widths, *(number(wanted.config, name) or 0 for name in WIDTHS)])
    features = [torch.zeros(s.batch, s.mel_frames, width) for width in widths if width > 1]
    return [*([spectrogram] if has_mel else []), flat, channel, *features]


def _latents(wanted: Wanted) -> list[Form]:
    """What a codec's decoder takes: the vectors of a sound, one after the other."""
    s = wanted.sizes
    widths = [number(wanted.config, name) for name in ("codebook_dim", "latent_dim", *WIDTHS)]
    likely = [width for width in dict.fromkeys([*widths, *s.widths]) if width]
    return [
        form for width in likely for form in (torch.zeros(s.batch, width, s.seq), torch.zeros(s.batch, s.seq, width))
    ]


def _sound_mask(wanted: Wanted) -> list[Form]:
    return [torch.ones(wanted.sizes.batch, wanted.sizes.samples, dtype=torch.long)]


def _attention_mask(wanted: Wanted) -> list[Form]:
    s = wanted.sizes
    if "input_ids" in wanted.params:
        return [torch.ones_like(text_tokens(wanted))]
    if "input_features" in wanted.params:
        return _spectrogram_mask(wanted)
    if "input_values" in wanted.params:
        return _sound_mask(wanted)
    return [torch.ones(s.batch, s.seq, dtype=torch.long)]


def _patch_mask(wanted: Wanted) -> torch.Tensor:
    rows, columns = _grid(wanted.sizes)
    return torch.ones(wanted.sizes.batch, rows * columns, dtype=torch.long)


def _mask_of_images(wanted: Wanted) -> torch.Tensor:
    """One image for each sample, which every token sees."""
    return torch.ones(*text_tokens(wanted).shape, 1, dtype=torch.long)


def _places_of_latents(wanted: Wanted) -> torch.Tensor:
    """The first tokens of a text stand for what a resampler makes of the image."""
    places = torch.zeros_like(text_tokens(wanted))
    places[:, : number(wanted.config, "latent_query_num") or 1] = 1
    return places


def _patch_positions(wanted: Wanted) -> torch.Tensor:
    rows, columns = _grid(wanted.sizes)
    cells = [[column, row] for row in range(rows) for column in range(columns)]
    return torch.tensor([cells] * wanted.sizes.batch)


def _boxes(wanted: Wanted) -> list[Form]:
    ids = text_tokens(wanted)
    return [torch.zeros(*ids.shape, BBOX_VALUES, dtype=torch.long)]


def _labels(wanted: Wanted) -> list[Form]:
    s = wanted.sizes
    if wanted.is_task("TokenClassification"):
        return [torch.zeros_like(text_tokens(wanted))]
    if wanted.is_task("CausalLM", "LMHead", "MaskedLM"):
        return [text_tokens(wanted)]
    if wanted.is_task("ForConditionalGeneration", "ForVisionText2Text", "EncoderDecoderModel", "Seq2Seq"):
        return [ordinary_tokens(wanted, s.seq) if is_encoder_decoder(wanted) else text_tokens(wanted)]
    if wanted.is_task("ForCTC"):
        return [torch.ones(s.batch, 4, dtype=torch.long)]
    if wanted.is_task("SemanticSegmentation"):
        return [torch.zeros(s.batch, s.height, s.width, dtype=torch.long)]
    if wanted.is_task("Classification", "MultipleChoice"):
        return [torch.zeros(s.batch, dtype=torch.long)]
    return []


def is_encoder_decoder(wanted: Wanted) -> bool:
    """Whether the decoder has a text of its own."""
    has_flag = bool(getattr(wanted.config, "is_encoder_decoder", False))
    return has_flag or bool(wanted.params & {"decoder_input_ids"} and not wanted.params & {"input_ids"})


def _position(wanted: Wanted) -> list[Form]:
    return [torch.zeros(wanted.sizes.batch, dtype=torch.long)] if wanted.is_task("QuestionAnswering") else []


def _flattened_patches(wanted: Wanted) -> list[Form]:
    s = wanted.sizes
    return [torch.zeros(s.batch, 256, 2 + s.channels * s.patch**2)]


def _past_length(wanted: Wanted) -> int:
    lags = getattr(wanted.config, "lags_sequence", None) or [0]
    return (number(wanted.config, "context_length", "seq_len") or 64) + max(lags)


def _past_values(wanted: Wanted) -> list[Form]:
    batch, length = wanted.sizes.batch, _past_length(wanted)
    channels = number(wanted.config, "num_input_channels", "input_size") or 1
    flat, deep = torch.zeros(batch, length), torch.zeros(batch, length, channels)
    series = [torch.zeros(length) for _ in range(batch)]
    return [flat, deep, series] if channels == 1 else [deep, flat]


def _time_features(is_future: bool) -> Maker:
    def make(wanted: Wanted) -> list[Form]:
        count = getattr(wanted.config, "num_time_features", 0)
        length = number(wanted.config, "prediction_length") or 1 if is_future else _past_length(wanted)
        return [torch.zeros(wanted.sizes.batch, length, count), torch.zeros(wanted.sizes.batch, length, count + 1)]

    return make


def _future_values(wanted: Wanted) -> list[Form]:
    length = number(wanted.config, "prediction_length") or 1
    channels = number(wanted.config, "num_input_channels", "input_size") or 1
    flat = torch.zeros(wanted.sizes.batch, length)
    deep = torch.zeros(wanted.sizes.batch, length, channels)
    return [flat, deep] if channels == 1 else [deep, flat]


def _static(name: str, dtype: torch.dtype) -> Maker:
    def make(wanted: Wanted) -> list[Form]:
        count = getattr(wanted.config, name, 0)
        return [torch.zeros(wanted.sizes.batch, count, dtype=dtype)] if count else []

    return make


def _steps(*widths: str, dtype: torch.dtype = torch.float32) -> Maker:
    """A trajectory: one entry for each step, of a width that the configuration names."""

    def make(wanted: Wanted) -> list[Form]:
        shape = (wanted.sizes.batch, number(wanted.config, "chunk_size") or 20)
        width = number(wanted.config, *widths) or 1
        return [torch.zeros(*shape, width, dtype=dtype) if widths else torch.zeros(*shape, dtype=dtype)]

    return make


def _vectors(width: str) -> Maker:
    """Regions of an image, as a detector describes them."""
    return lambda wanted: [torch.zeros(wanted.sizes.batch, 16, number(wanted.config, width) or 1)]


def _truth(wanted: Wanted) -> list[Form]:
    return [True]


def _no(wanted: Wanted) -> list[Form]:
    return [False]


MAKERS: dict[str, Maker] = {
    "input_ids": lambda wanted: _with_codebooks(wanted, text_tokens(wanted)),
    "decoder_input_ids": _decoder_ids,
    "labels": _labels,
    "start_positions": _position,
    "end_positions": _position,
    "pixel_values": _pixel_values,
    "pixel_values_videos": _video,
    "pixel_values_images": _pixel_values,
    "high_res_pixel_values": lambda wanted: [torch.zeros(wanted.sizes.batch, wanted.sizes.channels, 1024, 1024)],
    "image_grid_thw": _grid_thw,
    "grid_thw": _grid_thw,
    "flattened_patches": _flattened_patches,
    "mm_token_type_ids": lambda wanted: [placeholder_kinds(wanted)],
    "moe_mm_token_type_ids": lambda wanted: [placeholder_kinds(wanted)],
    "bbox": _boxes,
    "input_features": _spectrogram,
    "input_values": _sound,
    "past_values": _past_values,
    "past_time_features": _time_features(is_future=False),
    "past_observed_mask": lambda wanted: [torch.ones_like(form) for form in _past_values(wanted)[:2]],
    "future_values": _future_values,
    "future_time_features": _time_features(is_future=True),
    "static_categorical_features": _static("num_static_categorical_features", torch.long),
    "static_real_features": _static("num_static_real_features", torch.float32),
    "states": _steps("state_dim"),
    "actions": _steps("act_dim", "max_action_dim"),
    "rewards": _steps("reward_dim"),
    "returns_to_go": _steps("reward_dim"),
    "timesteps": _steps(dtype=torch.long),
    "return_loss": _truth,
    "use_cache": _no,
}
"""Made wherever the forward takes them."""

IF_NEEDED: dict[str, Maker] = {
    "attention_mask": _attention_mask,
    "token_type_ids": _like_text(0),
    "image_sizes": _image_sizes,
    "merge_sizes": lambda wanted: [torch.tensor([wanted.sizes.merge] * wanted.sizes.batch)],
    "image_merge_sizes": lambda wanted: [torch.tensor([wanted.sizes.merge] * wanted.sizes.batch)],
    "inputs_embeds": _embeddings(),
    "query_embeds": _embeddings(32),
    "encoder_hidden_states": _embeddings(64, ("encoder_hidden_size", *WIDTHS)),
    "visual_feats": _vectors("visual_feat_dim"),
    "visual_pos": _vectors("visual_pos_dim"),
    "visual_embeds": _vectors("visual_embedding_dim"),
    "noise_embeds": _embeddings(),
    "latents": _latents,
    "context_hidden_states": _embeddings(),
    "hidden_states": _patches,
    "target_sizes": lambda wanted: [torch.tensor([_grid(wanted.sizes)] * wanted.sizes.batch)],
    "spatial_shapes": lambda wanted: [torch.tensor([_grid(wanted.sizes)] * wanted.sizes.batch)],
    "pixel_attention_mask": lambda wanted: [
        *_pixel_mask(wanted),
        _patch_mask(wanted),
        torch.ones(wanted.sizes.batch, 1, dtype=torch.bool),
    ],
    "image_attention_mask": lambda wanted: [_mask_of_images(wanted)],
    "image_embeds_position_mask": lambda wanted: [_places_of_latents(wanted)],
    "image_position_ids": lambda wanted: [_patch_positions(wanted)],
    "pixel_position_ids": lambda wanted: [_patch_positions(wanted)],
    "padding_mask": _sound_mask,
    "audio_mel": _spectrogram,
    "audio_mel_mask": lambda wanted: [torch.zeros(wanted.sizes.batch, wanted.sizes.mel_frames, dtype=torch.bool)],
    "state": lambda wanted: [torch.zeros(wanted.sizes.batch, number(wanted.config, "max_state_dim") or 1)],
    "pixel_mask": _pixel_mask,
    "input_features_mask": _spectrogram_mask,
    "feature_attention_mask": _spectrogram_mask,
    "task_inputs": lambda wanted: [ordinary_tokens(wanted, number(wanted.config, "task_seq_len") or 77)],
    "prompt_pixel_values": _pixel_values,
    "prompt_masks": _pixel_values,
    "qformer_input_ids": lambda wanted: [ordinary_tokens(wanted, 32)],
}
"""Made only where the forward cannot do without: it has no default, or nothing runs without it."""
