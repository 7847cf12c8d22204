"""The models of the table: small, of every kind, and with sizes that divide nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, HIDDEN, LAYERS, HEADS, SEQ, BATCH = 997, 96, 4, 4, 61, 3
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _ids(num: int = SEQ) -> Tensor:
    return torch.arange(BATCH * num).reshape(BATCH, num) % VOCAB


def _language(config: str, model: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(vocab_size=VOCAB, **sizes))

    return build


def _labelled() -> Inputs:
    return (), {"input_ids": _ids(), "labels": _ids()}


def _images() -> Inputs:
    return (torch.ones(BATCH, 3, 64, 64),), {"labels": torch.zeros(BATCH, dtype=torch.long)}


def _vectors() -> Inputs:
    return (torch.ones(BATCH * SEQ, HIDDEN),), {}


DECODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 251,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "use_cache": False,
}
ENCODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 251,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}


class Lora(nn.Module):
    """A frozen linear layer and two thin trained ones."""

    def __init__(self, base: nn.Linear, rank: int = 5) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        return self.base(x) + self.up(self.down(x))


def _lora() -> nn.Module:
    model = _language("LlamaConfig", "LlamaForCausalLM", **DECODER)().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = Lora(layer.self_attn.q_proj), Lora(layer.self_attn.v_proj)
    return model


class Seq2Seq(nn.Module):
    """torch's own ``nn.Transformer``, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.transformer = nn.Transformer(HIDDEN, HEADS, 2, 2, 251, dropout=0.1, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The loss of naming the target."""
        hidden = self.transformer(self.embed(source), self.embed(target))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), target.flatten())


class Residual(nn.Module):
    """A convolutional block that keeps statistics over batches, so it may not recompute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """A residual."""
        return x + F.relu(self.norm(self.conv(x)))


class Convolutional(nn.Module):
    """A stem, blocks at one resolution, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 53, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Residual(53) for _ in range(LAYERS))
        self.head = nn.Linear(53, 211)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Mlp(nn.Module):
    """Two matrices of uneven rows and a scale; adds to its input."""

    def __init__(self, width: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, width), nn.Linear(width, hidden, bias=False)
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """A residual."""
        return x + self.down(F.gelu(self.up(x))) * self.scale


class Tree(nn.Module):
    """Own parameters around children: what is left to a unit between the units inside it."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(HIDDEN, 257), nn.Linear(257, HIDDEN)
        self.inner = nn.ModuleList(Mlp(width) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        """A residual, then the children."""
        x = x + self.after(self.before(x))
        for child in self.inner:
            x = child(x)
        return x


def _frozen_half() -> nn.Module:
    model = nn.Sequential(*(Mlp(width) for width in (499, 251, 997, 61)))
    for index in (0, 2):
        model[index].requires_grad_(False)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the table.

    Attributes:
        name: in the table.
        kind: what it stands for.
        build: with random weights.
        inputs: of one step.
        takes_bf16: it runs with parameters in bf16; batch statistics stay in fp32, and on the CPU the two do not meet.
        is_transformer: it has LAYERS layers of HIDDEN values on SEQ tokens, for which calculators have a rule.
    """

    name: str
    kind: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    takes_bf16: bool = True
    is_transformer: bool = False


MODELS = (
    Model(
        name="llama",
        is_transformer=True,
        kind="dense",
        build=_language("LlamaConfig", "LlamaForCausalLM", **DECODER),
        inputs=_labelled,
    ),
    Model(
        name="gpt2",
        is_transformer=True,
        kind="tied, dropout",
        build=_language(
            "GPT2Config",
            "GPT2LMHeadModel",
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=64,
            use_cache=False,
        ),
        inputs=_labelled,
    ),
    Model(
        name="qwen3",
        is_transformer=True,
        kind="tied, norms in attention",
        build=_language("Qwen3Config", "Qwen3ForCausalLM", head_dim=24, tie_word_embeddings=True, **DECODER),
        inputs=_labelled,
    ),
    Model(
        name="mixtral",
        is_transformer=True,
        kind="experts",
        build=_language(
            "MixtralConfig",
            "MixtralForCausalLM",
            num_local_experts=4,
            num_experts_per_tok=2,
            **{**DECODER, "intermediate_size": 256},
        ),
        inputs=_labelled,
    ),
    Model(
        name="t5",
        is_transformer=True,
        kind="encoder and decoder, tied",
        build=_language(
            "T5Config",
            "T5ForConditionalGeneration",
            d_model=HIDDEN,
            d_kv=24,
            d_ff=251,
            num_layers=2,
            num_heads=HEADS,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
        ),
        inputs=_labelled,
    ),
    Model(
        name="bert",
        is_transformer=True,
        kind="encoder, tied",
        build=_language("BertConfig", "BertForMaskedLM", max_position_embeddings=64, **ENCODER),
        inputs=_labelled,
    ),
    Model(
        name="vit",
        kind="vision",
        build=lambda: _vision("ViTConfig", "ViTForImageClassification", image_size=64, patch_size=8, **ENCODER),
        inputs=_images,
    ),
    Model(
        name="convnext",
        kind="convolutional",
        build=lambda: _vision(
            "ConvNextConfig", "ConvNextForImageClassification", hidden_sizes=[31, 62, 93, 124], depths=[2, 2, 2, 2]
        ),
        inputs=_images,
    ),
    Model(name="residual", kind="batch statistics", build=Convolutional, inputs=_images, takes_bf16=False),
    Model(name="lora", is_transformer=True, kind="frozen with adapters", build=_lora, inputs=_labelled),
    Model(
        name="nn.Transformer",
        is_transformer=True,
        kind="torch's own",
        build=Seq2Seq,
        inputs=lambda: ((_ids(), _ids()), {}),
    ),
    Model(
        name="mlps",
        kind="uneven widths",
        build=lambda: nn.Sequential(*(Mlp(width) for width in (499, 251, 997, 61))),
        inputs=_vectors,
    ),
    Model(
        name="trees",
        kind="parameters between units",
        build=lambda: nn.Sequential(*(Tree(499, 251) for _ in range(3))),
        inputs=_vectors,
    ),
    Model(name="frozen half", kind="frozen blocks", build=_frozen_half, inputs=_vectors),
)


def _vision(config: str, model: str, **sizes: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(num_labels=211, **sizes))
