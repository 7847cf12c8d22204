"""What a command does to its own process: imports that wait, and garbage that is collected seldom."""

import gc
import subprocess
import sys

import pytest

from autoshard.cli.collection import THRESHOLDS, seldom_collected

WITH_COMPILER = """
import sys
from autoshard.cli.deferred import defer_compiler
defer_compiler()
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
calls = []
@torch.compiler.allow_in_graph
def marked(x):
    return x + 1
def asked(x):
    calls.append(x.shape)
    return x * 2
with torch.device("meta"), torch.compiler.set_stance("force_eager"):
    torch.nn.Embedding(4, 4)
    with FakeTensorMode():
        torch.ones(2) + 1
    assert "torch._dynamo.eval_frame" not in sys.modules, "by itself"
    compiled = torch.compile(asked, backend="eager")
    assert "torch._dynamo.eval_frame" in sys.modules
    x = torch.ones(2, device="cpu")
    compiled(x), compiled(x)
    assert len(calls) == 2, "the stance that was asked for before the compiler came"
from torch._dynamo import trace_rules, variables
assert trace_rules.lookup_callable(marked) == variables.TorchInGraphFunctionVariable
left = [f for f in vars(torch.nn.init).values() if hasattr(f, "__dynamo_disable")]
assert not left
graphs = []
again = torch.compile(lambda x: asked(x) + 1, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
calls.clear()
again(x), again(x)
assert graphs, "the stance ended with its with"
torch._dynamo.reset()
assert type(torch._dynamo) is type(sys)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch._dynamo.utils", "torch._inductor", "torch._inductor.utils"])
def test_modules_of_the_compiler_are_loaded_once(name: str) -> None:
    code = (
        "from autoshard.cli.deferred import defer_compiler; defer_compiler()\n"
        f"import importlib, sys; first = importlib.import_module({name!r})\n"
        "import torch._dynamo.utils, torch._inductor.utils\n"
        f"assert sys.modules[{name!r}] is first is eval({name!r})\n"
        "assert torch._inductor.utils.IndentedBuffer and torch._dynamo.utils.counters is not None\n"
        "assert type(first.__spec__.loader).__name__ == 'SourceFileLoader'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_compiler_comes_when_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", WITH_COMPILER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_garbage_is_collected_as_before_afterwards() -> None:
    before = gc.get_threshold()

    @seldom_collected
    def command(code: int) -> int:
        assert gc.get_threshold() == THRESHOLDS
        if code:
            raise ValueError("asked for")
        return code

    assert command(0) == 0
    with pytest.raises(ValueError, match="asked for"):
        command(1)
    assert gc.get_threshold() == before != THRESHOLDS
