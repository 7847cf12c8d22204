"""The sizes of made inputs: what the user gave, what the configuration tells, and defaults, each default named."""

from dataclasses import dataclass
from typing import Any

from autoshard.integrations.transformers.facts import (
    AUDIO_PARTS,
    TEXT_PARTS,
    VISION_PARTS,
    longest_text,
    number,
    parts,
    size_pair,
    sub_configs,
)

DEFAULT_BATCH = 1
DEFAULT_SEQ = 2048
DEFAULT_IMAGE = 224
DEFAULT_VOCAB = 1000
DEFAULT_FRAMES = 8
MEL_NAMES = (
    "num_mel_bins", "input_feat_size", "input_feat_per_channel", "feature_projection_input_dim", "input_dim",
    "input_size", "feature_size", "mel_bins", "n_mels", "audio_mel_bins", "in_features", "spectrogram_size",
)  # fmt: skip
USUAL_MELS = (80, 128)
IMAGE_NAMES = ("image_size", "input_size", "img_size", "force_image_size", "vision_feature_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the inputs are.

    Attributes:
        batch: samples.
        seq: tokens of a text, or of a decoder's text.
        vocab: token ids are below it.
        height: of an image, in pixels.
        width: of an image, in pixels.
        channels: of an image.
        frames: of a video.
        patch: edge of an image patch in pixels, where patches are cut before the model.
        temporal_patch: frames of such a patch.
        merge: patches along an edge that become one token.
        mels: features of one frame of a spectrogram, the likeliest first.
        mel_frames: frames of a spectrogram.
        samples: samples of a sound.
        widths: features that the first layers of the model and of its parts take.
        classes: labels are below it.
        assumed: the sizes that were not given, as ``field=value (why)``.
    """

    batch: int
    seq: int
    vocab: int
    height: int
    width: int
    channels: int
    frames: int
    patch: int
    temporal_patch: int
    merge: int
    mels: tuple[int, ...]
    mel_frames: int
    samples: int
    widths: tuple[int, ...]
    classes: int
    assumed: dict[str, str]


def read_sizes(
    config: Any,
    batch: int | None,
    seq: int | None,
    image_size: int | None,
    first_widths: tuple[int, ...] = (),
    child_widths: tuple[int, ...] = (),
) -> Sizes:
    """The sizes for a configuration.

    Args:
        config: the model's configuration.
        batch: number of samples, if it was given.
        seq: tokens of a text, if it was given.
        image_size: edge of an image in pixels, if it was given.
        first_widths: features that the first layers of the model take, for where the configuration does not tell.
        child_widths: features that the first layer of each part of the model takes.
    """
    text = list(parts(config, TEXT_PARTS))
    vision = [*parts(config, VISION_PARTS), *sub_configs(config)]
    audio = [*parts(config, AUDIO_PARTS), *sub_configs(config)]
    assumed: dict[str, str] = {}
    if batch is None:
        assumed["batch"] = f"{DEFAULT_BATCH} (default)"
    longest = longest_text(config)
    if seq is None:
        seq = min(DEFAULT_SEQ, longest or DEFAULT_SEQ)
        assumed["seq"] = f"{seq} ({'default' if seq == DEFAULT_SEQ else 'the longest that the model takes'})"
    stated_patch = number(vision, "patch_size", "spatial_patch_size")
    patch = stated_patch or 16
    merge = (
        number(
            vision, "spatial_merge_size", "merge_size", "merge_kernel_size", "downsample_factor", "scale_factor",
            "pooling_kernel_size", "num_windows",
        )
        or 1
    )  # fmt: skip
    if image_size is not None:
        height = width = image_size
    else:
        found = size_pair(vision, *IMAGE_NAMES)
        # Patches that are merged come in whole groups.
        step = patch * merge if stated_patch else merge
        height, width = (_rounded(edge, step) for edge in found or (DEFAULT_IMAGE, DEFAULT_IMAGE))
        assumed["image_size"] = f"{height}x{width} ({'the configuration' if found == (height, width) else 'default'})"
    temporal_patch = number(vision, "temporal_patch_size", "video_temporal_patch_size") or 1
    frames = number(vision, "num_frames", "frames_per_clip") or DEFAULT_FRAMES
    mel_frames = number(audio, "max_length") or 2 * (number(audio, "max_source_positions") or 200)
    return Sizes(
        batch=batch or DEFAULT_BATCH,
        seq=seq,
        vocab=number([*text, *sub_configs(config)], "vocab_size", "text_vocab_size") or DEFAULT_VOCAB,
        height=height,
        width=width,
        channels=number(vision, "num_channels", "in_channels", "in_chans", "num_image_channels") or 3,
        frames=frames,
        patch=patch,
        temporal_patch=temporal_patch,
        merge=merge,
        mels=tuple(
            dict.fromkeys([*(n for name in MEL_NAMES if (n := number(audio, name))), *first_widths, *USUAL_MELS])
        ),
        mel_frames=min(mel_frames, 3000),
        widths=tuple(dict.fromkeys([*first_widths, *child_widths])),
        samples=15360,  # whole frames of every codec, about a second
        classes=number(config, "num_labels") or 2,
        assumed=assumed,
    )


def _rounded(edge: int, step: int) -> int:
    return edge if edge % step == 0 or edge < step else edge - edge % step
