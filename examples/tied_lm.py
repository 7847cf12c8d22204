"""A language model whose output weight is its input embedding.

Tied weights break most hand-written ``fully_shard`` code: two units would own one parameter. The plan keeps the
embedding and the head together, so the tie holds during and after training::

    autoshard plan examples/tied_lm.py -o tied.json --device cpu --devices 2
    torchrun --nproc-per-node 2 examples/train.py --plan tied.json --model tied_lm --check
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, LAYERS, HEADS, LENGTH = 8000, 96, 6, 6, 128


class TiedLM(nn.Module):
    """A decoder with learned positions; returns the loss where labels are given, else the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Loss of predicting each next token, or the logits."""
        seq = input_ids.shape[1]
        x = self.tokens(input_ids) + self.positions.weight[:seq]
        later = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=later)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def build_model() -> TiedLM:
    """The model."""
    return TiedLM()


def example_inputs(batch: int | None = None, seq: int | None = None, seed: int = 0) -> tuple[tuple, dict[str, Tensor]]:
    """Inputs of one training step on one device: random tokens, which are their own labels."""
    shape = (batch or 2, min(seq or LENGTH, LENGTH))
    tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
    return (), {"input_ids": tokens, "labels": tokens}
