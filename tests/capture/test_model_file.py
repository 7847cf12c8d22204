"""Model files: what is understood, and one clear error for each way in which the user's code fails."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard.capture import build_model, capture, load_model_file
from autoshard.errors import ModelLoadError, RequestError

GOOD = """
import torch
from torch import nn

def build_model():
    return nn.Linear(3, 2)

def example_inputs(batch=None, seq=None):
    return (torch.zeros(batch or 4, 3),), {}

def loss(outputs):
    return outputs.sum()
"""


def _write(folder: Path, text: str, name: str = "model.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_good_file(tmp_path: Path) -> None:
    model_file = load_model_file(_write(tmp_path, GOOD))
    model = build_model(model_file)
    assert model.weight.device.type == "meta"
    assert model_file.loss is not None
    ((args, kwargs),) = model_file.inputs()
    assert args[0].shape == (4, 3)
    assert kwargs == {}
    assert model_file.inputs(batch=7)[0][0][0].shape == (7, 3)
    assert capture(model, model_file.inputs(), loss=model_file.loss).loss == "loss(outputs)"


@pytest.mark.parametrize(
    ("text", "factory"),
    [
        ("def build(): return make()", ""),
        ("model = make()", ""),
        ("def other(): return make()", ":other"),
        ("def build(): raise RuntimeError\ndef build_model(): return make()", ""),
        ("model = 3\ndef other(): return make()", ":other"),
    ],
)
def test_factories(tmp_path: Path, text: str, factory: str) -> None:
    head = "from torch import nn\ndef make(): return nn.Linear(3, 2)\n"
    model_file = load_model_file(_write(tmp_path, head + text) + factory)
    assert isinstance(build_model(model_file), nn.Linear)


def test_modules_by_name_and_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "somepackage"
    package.mkdir()
    _write(package, "", "__init__.py")
    _write(package, "from somepackage.parts import Net\ndef make(): return Net()", "models.py")
    _write(package, "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self): super().__init__(2, 3)",
           "parts.py")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert type(build_model(load_model_file("somepackage.models:make"))).__name__ == "Net"
    _write(tmp_path, "from torch import nn\ndef neighbour(): return nn.Linear(2, 2)", "beside_it.py")
    late = _write(tmp_path, "def build_model():\n    from beside_it import neighbour\n    return neighbour()")
    monkeypatch.chdir("/")
    assert isinstance(build_model(load_model_file(late)), nn.Linear)
    assert sys.path == before


FAILURES = {
    "syntax": ("import torch\ndef build_model(:\n    pass", "syntax error", 2),
    "import": ("import torch\n\nimport no_such_library", "No module named 'no_such_library'", 3),
    "raises": ("x = 1\nx / 0", "ZeroDivisionError", 2),
    "exits": ("import sys\n\n\nsys.exit(3)", "SystemExit: 3", 4),
    "no factory": ("import torch", "no build_model(), build() or model", 0),
    "not callable": ("build_model = 3", "is a int, not a model", 0),
    "inputs no function": ("def build(): pass\nexample_inputs = 3", "not a function", 0),
}


@pytest.mark.parametrize("name", sorted(FAILURES))
def test_failures_of_loading(tmp_path: Path, name: str) -> None:
    text, reason, line = FAILURES[name]
    source = _write(tmp_path, text)
    before = list(sys.path)
    with pytest.raises(ModelLoadError) as caught:
        load_model_file(source)
    error = caught.value
    assert reason in error.reason
    assert (error.source, error.line) == (source, line)
    assert error.remedy
    assert sys.path == before


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("no_such_file.py", "no such file"),
        ("", "it is a folder"),
        ("notes.txt", "not a Python file"),
        ("good.py:missing", "it has no 'missing'"),
        ("no_such_package.models:make", "no module 'no_such_package'"),
    ],
)
def test_failures_of_finding(tmp_path: Path, spec: str, reason: str) -> None:
    _write(tmp_path, GOOD, "good.py")
    _write(tmp_path, "", "notes.txt")
    with pytest.raises(ModelLoadError) as caught:
        load_model_file(spec if spec.startswith("no_such_package") else f"{tmp_path}/{spec}")
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("body", "reason", "line"),
    [
        ("def build_model():\n    x = 1\n    raise ValueError('too wide')", "ValueError: too wide", 4),
        ("def build_model():\n    return {'a': 1}", "returned a dict, not a torch.nn.Module", 0),
        ("def build_model(width): return nn.Linear(width, 1)", "missing 1 required positional argument", 0),
        ("def build_model():\n    raise SystemExit(2)", "SystemExit: 2", 3),
    ],
)
def test_failures_of_building(tmp_path: Path, body: str, reason: str, line: int) -> None:
    model_file = load_model_file(_write(tmp_path, "from torch import nn\n" + body))
    with pytest.raises(ModelLoadError) as caught:
        build_model(model_file)
    assert reason in caught.value.reason
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("body", "reason", "line"),
    [
        ("", "it has no example inputs", 0),
        ("def example_inputs():\n    return None + 1", "TypeError", 4),
        ("def example_inputs():\n    return [1, 2]", "returned list of (int, int)", 3),
        ("def example_inputs(): return {'ids': 1}", "returned dict", 3),
    ],
)
def test_failures_of_inputs(tmp_path: Path, body: str, reason: str, line: int) -> None:
    text = "from torch import nn\ndef build_model(): return nn.Linear(1, 1)\n" + body
    with pytest.raises(ModelLoadError) as caught:
        load_model_file(_write(tmp_path, text)).inputs()
    assert reason in caught.value.reason
    assert caught.value.line == line


@pytest.mark.parametrize("asked", [{"batch": 2}, {"seq": 9}, {"batch": 2, "seq": 9}])
def test_inputs_without_parameters_cannot_be_asked_for_sizes(tmp_path: Path, asked: dict[str, int]) -> None:
    text = GOOD.replace("batch=None, seq=None", "").replace("batch or 4", "4")
    model_file = load_model_file(_write(tmp_path, text))
    assert model_file.inputs()
    with pytest.raises(RequestError, match=r"example_inputs\(batch=None, seq=None\)") as caught:
        model_file.inputs(**asked)
    assert caught.value.field == " and ".join(asked)


def test_a_constructor_that_needs_values_is_built_with_parameters_on_meta(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = torch.linspace(0, 1, 3).tolist()
        self.lin, self.tied = nn.Linear(3, 3), nn.Linear(3, 3)
        self.tied.weight = self.lin.weight
        self.register_buffer("steps", torch.arange(3))
    def forward(self, x):
        return self.tied(self.lin(x))
def build_model(): return Net()
"""
    original = nn.Module.register_parameter
    model = build_model(load_model_file(_write(tmp_path, text)))
    assert model.rates == [0.0, 0.5, 1.0]
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.tied.weight is model.lin.weight
    assert model.steps.tolist() == [0, 1, 2]
    assert nn.Module.register_parameter is original
    assert capture(model, ((torch.zeros(2, 3),), {})).params[0].aliases == ("tied.weight",)
