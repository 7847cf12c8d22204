"""A model file: Python that says how to build a model, its example inputs and its loss.

``model.py``, ``model.py:factory`` and ``package.module:factory`` are understood. Without a named factory the file's
``build_model()``, ``build()`` or ``model`` is taken, in this order; ``example_inputs`` and ``loss`` are optional. The
user's code may fail in many ways; each is one ``ModelLoadError`` with the user's own line.
"""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from autoshard.capture.gpu_only import CODE, remedy_without_gpu
from autoshard.capture.inputs import EXPECTED, Pair, read_pairs
from autoshard.errors import ModelLoadError, RequestError

FACTORIES = ("build_model", "build")
NO_FACTORY = "define build_model() that returns the model, or name the factory as file.py:factory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """What a model file offers.

    Attributes:
        source: the file or module and the factory, as the user named them.
        path: the Python file, empty if the module has none.
        build: makes the model.
        example_inputs: gives ``(args, kwargs)``, possibly for a batch size and sequence length; ``None`` if missing.
        loss: scalar of the outputs; ``None`` if missing.
    """

    source: str
    path: str
    build: Callable[[], nn.Module]
    example_inputs: Callable[..., Any] | None = None
    loss: Callable[[Any], Any] | None = None

    def inputs(
        self, batch: int | None = None, seq: int | None = None, image_size: int | None = None
    ) -> tuple[Pair, ...]:
        """The pairs of example inputs.

        Args:
            batch: batch size to ask for.
            seq: sequence length to ask for.
            image_size: edge of an image to ask for, in pixels.

        Raises:
            ModelLoadError: there are none, they fail, or they are no pairs.
            RequestError: they cannot be asked for a batch size or sequence length.
        """
        if self.example_inputs is None:
            raise ModelLoadError(
                self.source,
                "it has no example inputs",
                "define example_inputs(batch=None, seq=None) that returns (args, kwargs) of one training step, "
                "or plan from the module tree alone with --frontend tree",
            )
        with importable(Path(self.path).parent), user_code(self.source, self.path, "example_inputs failed"):
            try:
                return read_pairs(self.example_inputs, batch, seq, image_size)
            except RequestError as error:
                if error.field != "inputs":
                    raise
                raise ModelLoadError(
                    self.source, f"example_inputs returned {error.value}", f"return {EXPECTED}", self._inputs_line()
                ) from None

    def _inputs_line(self) -> int:
        code = getattr(self.example_inputs, "__code__", None)
        return code.co_firstlineno if code is not None and _is_same(code.co_filename, self.path) else 0


def load_model_file(spec: str) -> ModelFile:
    """Import a model file and find its parts; nothing is built yet.

    Args:
        spec: ``model.py``, ``model.py:factory`` or ``package.module:factory``.

    Raises:
        ModelLoadError: it cannot be found or imported, or has no factory.
    """
    place, factory = _split(spec)
    is_file = place.endswith(".py") or "/" in place or Path(place).exists()
    path = _existing_file(spec, place) if is_file else None
    folder = path.parent if path is not None else Path.cwd()
    with importable(folder), user_code(spec, str(path or ""), "importing it failed"):
        module = _import_file(path) if path is not None else _import_module(spec, place)
    found = str(path or getattr(module, "__file__", None) or "")
    build = _factory(spec, module, factory)

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with importable(folder):
            return function(*args, **kwargs)

    example_inputs = getattr(module, "example_inputs", None)
    if example_inputs is not None and not callable(example_inputs):
        raise ModelLoadError(
            spec,
            f"example_inputs is a {type(example_inputs).__name__}, not a function",
            "write it as example_inputs(batch=None, seq=None) that returns (args, kwargs)",
        )
    return ModelFile(
        source=spec,
        path=found,
        build=lambda: run(build),
        example_inputs=example_inputs,
        loss=getattr(module, "loss", None),
    )


@contextmanager
def user_code(source: str, path: str, what: str) -> Iterator[None]:
    """Whatever the user's code raises becomes a ``ModelLoadError`` with the user's own line.

    Args:
        source: the model file as the user named it.
        path: the Python file.
        what: what was being done.
    """
    try:
        yield
    except (ModelLoadError, RequestError):
        raise
    except SyntaxError as error:
        # A file that is no text at all fails without naming a place.
        is_elsewhere = error.filename is not None and not _is_same(error.filename, path)
        where = f" in {error.filename}:{error.lineno}" if is_elsewhere else ""
        line = error.lineno if _is_same(error.filename, path) else user_line(error, path)
        raise ModelLoadError(source, f"syntax error{where}: {error.msg}", "correct the syntax", line or 0) from error
    except ImportError as error:
        raise _load_error(
            source, path, what, error, "install what is missing in this environment, or correct the import"
        ) from error
    except SystemExit as error:
        raise ModelLoadError(
            source,
            f"{what}: the file ended the program (SystemExit: {error.code})",
            'keep what must not run on import under if __name__ == "__main__":',
            user_line(error, path),
        ) from error
    except Exception as error:
        raise _load_error(
            source, path, what, error, "correct the code at that line; it has to run without arguments"
        ) from error


def _load_error(source: str, path: str, what: str, error: Exception, remedy: str) -> ModelLoadError:
    reason = f"{what}: {type(error).__name__}: {error}"
    found = remedy_without_gpu(error)
    if found is not None:
        needed, remedy = found
        reason += f"\n  {CODE}: {needed}, and there is none here"
    return ModelLoadError(source, reason, remedy, user_line(error, path))


def user_line(error: BaseException, path: str) -> int:
    """The deepest line of the traceback that stands in the user's file, 0 if none does."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_same(frame.filename, path):
            return frame.lineno or 0
    return 0


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Modules beside the model file can be imported."""
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


def _split(spec: str) -> tuple[str, str]:
    place, colon, factory = spec.rpartition(":")
    if colon and factory.isidentifier() and place:
        return place, factory
    return spec, ""


def _existing_file(spec: str, place: str) -> Path:
    path = Path(place)
    if path.is_dir():
        raise ModelLoadError(spec, "it is a folder", "name the Python file in it that builds the model")
    if not path.exists():
        raise ModelLoadError(spec, "no such file", "give the path of a Python file that defines build_model()")
    if path.suffix != ".py":
        raise ModelLoadError(spec, f"{path.name} is not a Python file", "give a .py file that defines build_model()")
    return path.resolve()


def _import_file(path: Path) -> ModuleType:
    """Run the file as a module of its own name, which stays importable (dataclasses and pickles ask for it)."""
    name = f"autoshard_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def _import_module(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        raise ModelLoadError(
            spec, f"there is no file and no module {error.name!r}", "give model.py, or package.module:factory"
        ) from None
    except (ValueError, TypeError) as error:
        raise ModelLoadError(spec, f"not the name of a module ({error})", "give model.py, or package.module") from None


def _factory(spec: str, module: ModuleType, factory: str) -> Callable[[], Any]:
    if factory:
        found = getattr(module, factory, None)
        if found is None:
            raise ModelLoadError(spec, f"it has no {factory!r}", "name a function in it that returns the model")
    else:
        found = next((getattr(module, name) for name in FACTORIES if hasattr(module, name)), None)
        if found is None:
            found = getattr(module, "model", None)
        if found is None:
            raise ModelLoadError(spec, "it has no build_model(), build() or model", NO_FACTORY)
    if isinstance(found, nn.Module):
        return lambda: found
    if not callable(found):
        raise ModelLoadError(spec, f"{factory or 'the factory'} is a {type(found).__name__}, not a model", NO_FACTORY)
    return found


def _is_same(filename: str | None, path: str) -> bool:
    return bool(filename) and bool(path) and Path(str(filename)).resolve() == Path(path).resolve()
