"""Models of transformers, built from small configurations: the facts, and the bytes of a real step."""

from typing import Any

import pytest
import torch

from autoshard.capture import capture, capture_tree
from autoshard.ir import ModelGraph
from autoshard.ir.check import check
from tests.capture.memory import real_step, replay
from tests.models import ids

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """transformers logs its configurations to stderr when it warns about them."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def _llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = {"llama": _llama, "gpt2": _gpt2, "t5": _t5}


def _inputs(length: int = 24) -> Any:
    tokens = ids(2, length)
    return (), {"input_ids": tokens, "labels": tokens}


def _graph(name: str, **options: Any) -> ModelGraph:
    with torch.device("meta"):
        model = MODELS[name]()
    return capture(model, _inputs(), **options)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_bytes_equal_those_of_a_real_step(name: str) -> None:
    model = MODELS[name]().train()
    args, kwargs = _inputs()
    real = [real_step(model, args, kwargs, lambda outputs: outputs.loss) for _ in range(2)][-1]
    assert replay(capture(model, (args, kwargs)).root) == real


@pytest.mark.parametrize("name", sorted(MODELS))
def test_facts(name: str) -> None:
    graph = _graph(name, compute_dtype="bfloat16", device_kind="cuda")
    assert check(graph) == ()
    assert graph.diagnostics == ()
    assert graph.loss == "outputs.loss"
    assert all(param.gets_grad for param in graph.params)
    for param in graph.params:
        assert param.readers
        assert all(any(holder in stack for holder in param.holders) for stack in param.readers), param.key
    assert not any(span.escapes for span in graph.root.spans)
    assert check(capture_tree(MODELS[name]())) == ()


def test_llama() -> None:
    graph = _graph("llama", compute_dtype="bfloat16", device_kind="cuda")
    layers = [f"model.layers.{i}" for i in range(3)]
    nodes = {node.fqn: node for node in graph.modules}
    assert len({nodes[layer].repeat_class for layer in layers}) == 1
    spans = {span.module: span for span in graph.root.spans}
    assert [m for m in (s.module for s in graph.root.spans) if m in layers] == layers
    assert {spans[layer].output_kind for layer in layers} == {"tensor"}
    assert spans["model.layers.0.self_attn"].output_kind == "tuple"
    assert spans[""].output_kind == "dataclass"
    attention = [op.target for op in graph.root.forward if "attention" in op.target]
    assert attention == ["aten._scaled_dot_product_flash_attention.default"] * 3
    batch, length, hidden, ffn, vocab = 2, 24, 32, 48, 97
    linear = 3 * (2 * hidden * hidden + 2 * hidden * hidden // 2 + 3 * hidden * ffn) + hidden * vocab
    scores = 3 * 2 * (2 * batch * length * length * hidden)
    assert sum(op.flops for op in graph.root.forward) == 2 * batch * length * linear + scores


def test_ties() -> None:
    ties = {name: [(p.key, p.aliases) for p in _graph(name).params if p.aliases] for name in MODELS}
    assert ties == {
        "llama": [],
        "gpt2": [("transformer.wte.weight", ("lm_head.weight",))],
        "t5": [("shared.weight", ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"))],
    }


def test_repeated_blocks_of_gpt2_and_t5() -> None:
    def digests(name: str, prefix: str) -> list[str]:
        nodes = _graph(name).modules
        return [n.repeat_class for n in nodes if n.fqn.startswith(prefix) and n.fqn.removeprefix(prefix).isdigit()]

    blocks = digests("gpt2", "transformer.h.")
    assert len(blocks) == 2
    assert len(set(blocks)) == 1
    assert len(set(digests("t5", "encoder.block."))) == 2  # the first has the table of relative positions


def test_gradient_checkpointing() -> None:
    model = _llama().train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    args, kwargs = _inputs()
    real = [real_step(model, args, kwargs, lambda outputs: outputs.loss) for _ in range(2)][-1]
    graph = capture(model, (args, kwargs))
    assert replay(graph.root) == real
    found = {node.fqn for node in graph.modules if "checkpointed" in node.traits}
    assert found == {f"model.layers.{i}" for i in range(3)}
