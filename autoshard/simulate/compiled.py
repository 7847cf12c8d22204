"""How far the memory of compiled blocks may lie from what is projected for them.

A projection is that of the ops as the model writes them. ``torch.compile`` fuses ops, so that their results in between
are never made, and decides by itself what backward computes again; what it keeps cannot be known without compiling. So
it is measured once, over several models, and told beside a projection as a range.
"""

MEASURED: dict[str, tuple[int, int]] = {
    "decoder (RMS norm, grouped attention, SwiGLU)": (6172676, 4861956),
    "GPT-2 (layer norm, GELU by hand, dropout)": (8536116, 4997124),
    "ConvNeXt (depthwise convolution, GELU)": (3805188, 3805188),
    "experts (softmax router, squared ReLU)": (7483396, 7483396),
    "batch norm feed-forward": (4071428, 3022852),
}
"""By model: bytes held at the end of forward as written and compiled (inductor on a CPU, float32, torch 2.13).

Measured by ``make bench-compile``, which prints this table.
"""


def held_range() -> tuple[float, float]:
    """Least and greatest ratio of compiled to projected bytes at the end of forward."""
    ratios = [compiled / written for written, compiled in MEASURED.values()]
    return min(ratios), max(ratios)


def uncertainty() -> str:
    """The phrase that a projection of a plan with compiled blocks carries."""
    low, high = held_range()
    return (
        f"what torch.compile keeps in compiled blocks (an estimate: {low:.2f} to {high:.2f} times the activations that "
        f"are projected, over {len(MEASURED)} models on a CPU)"
    )
