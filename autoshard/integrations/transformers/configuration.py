"""A ``config.json`` to a model without weights: nothing is downloaded, nothing is computed.

The class is the one that the configuration names in ``architectures``; where it names none that exists, the first auto
class that knows the configuration, in the order in which a training job most often wants them. Code that lies beside
the configuration runs only when it is trusted.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from autoshard.capture.build import on_meta, parameters_on_meta
from autoshard.capture.gpu_only import CODE, remedy_without_gpu
from autoshard.errors import ModelLoadError
from autoshard.integrations.transformers.facts import sub_configs

CONFIG_NAME = "config.json"
AUTO_CLASSES = (
    "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText",
    "AutoModelForImageClassification", "AutoModelForMaskedLM", "AutoModel",
)  # fmt: skip
"""Auto classes in the order in which they are tried."""
PORTABLE = ("sdpa", "eager")
"""Implementations of attention that a step can be captured with on any machine."""
TRUST = "custom code runs only with --trust-remote-code; read it first"
WRITE_A_FILE = "write a model file with build_model() and example_inputs(), and plan that"


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model made from a configuration.

    Attributes:
        model: on the meta device, in training mode.
        assumed: what had to be assumed, as ``field=value (why)``.
    """

    model: nn.Module
    assumed: tuple[str, ...]


def is_config(spec: str) -> bool:
    """Whether what the user named is a configuration: a ``config.json``, or a folder that holds one."""
    path = Path(spec)
    return path.name.endswith(CONFIG_NAME) or (path / CONFIG_NAME).is_file()


def build_from_config(spec: str, *, trust_remote_code: bool = False) -> Built:
    """The model that a configuration describes, on the meta device.

    Args:
        spec: path of a ``config.json``, or of the folder that holds it.
        trust_remote_code: run Python code that lies beside the configuration.

    Raises:
        ModelLoadError: transformers is missing, the file is no configuration, or the model cannot be built from it.
    """
    with offline():
        config = read_config(spec, trust_remote_code)
        model_class, why = _model_class(spec, config, trust_remote_code)
        return build(spec, config, model_class, (f"model={model_class.__name__} ({why})",) if why else ())


def build(source: str, config: Any, model_class: type, assumed: tuple[str, ...] = ()) -> Built:
    """A model of a class and a configuration, on the meta device, as it is trained: no cache, fused attention.

    Args:
        source: names the configuration in errors.
        config: the configuration; it is changed.
        model_class: a class that transformers' ``PreTrainedModel`` is a base of.
        assumed: what was assumed before.

    Raises:
        ModelLoadError: the constructor fails.
    """
    notes: list[str] = []
    for inner in sub_configs(config):
        if getattr(inner, "use_cache", None):
            inner.use_cache = False
        if getattr(inner, "_attn_implementation", None) not in (None, *PORTABLE):
            notes.append(f"attention=sdpa ({inner._attn_implementation} runs on a GPU only)")
            inner._attn_implementation = None  # each part of the model then takes sdpa if it has it
    stored = getattr(config, "dtype", None)
    if stored not in (None, torch.float32, "float32"):
        notes.append(f"parameters=float32 (the configuration names {str(stored).removeprefix('torch.')})")
    if getattr(config, "quantization_config", None) is not None:
        notes.append("quantization=none (the configuration's is not applied)")
    try:
        model = _construct(model_class, config)
    except ImportError as error:
        found = remedy_without_gpu(error)
        needed, remedy = found or ("", "install it in this environment")
        reason = f"{model_class.__name__} needs more: {_first_line(error)}"
        raise ModelLoadError(source, f"{reason}\n  {CODE}: {needed}" if found else reason, remedy) from error
    except OSError as error:
        raise ModelLoadError(
            source,
            f"building {model_class.__name__} asked for a file that is not here: {_first_line(error)}",
            f"nothing is ever downloaded; {WRITE_A_FILE}",
        ) from error
    except Exception as error:  # a constructor may raise anything
        raise ModelLoadError(
            source,
            f"building {model_class.__name__} failed: {type(error).__name__}: {_first_line(error)}",
            f"correct the configuration, or {WRITE_A_FILE}",
        ) from error
    model.train()
    if not notes or not notes[0].startswith("attention="):
        notes.insert(0, f"attention={getattr(config, '_attn_implementation', None) or 'eager'} (default)")
    return Built(model=model, assumed=(*assumed, *dict.fromkeys(notes)))


@contextmanager
def offline() -> Iterator[None]:
    """No network, whatever is asked for."""
    try:
        import huggingface_hub.constants as constants
    except ImportError:
        yield
        return
    variables = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with mock.patch.dict(os.environ, variables), mock.patch.object(constants, "HF_HUB_OFFLINE", True):
        yield


def read_config(spec: str, trust_remote_code: bool = False) -> Any:
    """The configuration in a file or folder.

    Raises:
        ModelLoadError: there is none, or transformers cannot read it.
    """
    path = Path(spec)
    file = path / CONFIG_NAME if path.is_dir() else path
    raw = _read_json(spec, file)
    transformers = import_transformers(spec)
    known = raw.get("model_type") in transformers.CONFIG_MAPPING
    is_custom = "AutoConfig" in (raw.get("auto_map") or {})
    if "model_type" not in raw and not is_custom:
        raise ModelLoadError(spec, "it has no model_type", "name a model_type that transformers knows")
    if not known and not (is_custom and trust_remote_code):
        kind, version = raw.get("model_type"), transformers.__version__
        reason = f"transformers {version} does not know model_type {kind!r}"
        raise ModelLoadError(
            spec,
            f"{reason}; the configuration brings code of its own" if is_custom else reason,
            TRUST if is_custom else f"install a transformers that knows it, or {WRITE_A_FILE}",
        )
    # A folder is read as such: code beside the configuration is found from there.
    place = file.parent if file.name == CONFIG_NAME else file
    try:
        return transformers.AutoConfig.from_pretrained(
            str(place), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the classes of configurations raise many kinds of errors
        raise ModelLoadError(
            spec,
            f"the configuration cannot be read: {type(error).__name__}: {_first_line(error)}",
            "correct the value that is named there",
        ) from error


def import_transformers(source: str) -> Any:
    """The library.

    Raises:
        ModelLoadError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ModelLoadError(source, f"transformers cannot be imported: {error}", "pip install transformers") from error
    return transformers


def _read_json(spec: str, file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(spec, "no such file", f"give the path of a {CONFIG_NAME} or of its folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(spec, f"it cannot be read: {error}", f"give a readable {CONFIG_NAME}") from None
    except json.JSONDecodeError as error:
        raise ModelLoadError(spec, f"it is not JSON: {error.msg}", "correct it at that line", error.lineno) from None
    if not isinstance(raw, dict):
        raise ModelLoadError(spec, f"it holds a {type(raw).__name__}, not an object", "give a model's configuration")
    return raw


def _model_class(spec: str, config: Any, trust_remote_code: bool) -> tuple[type, str]:
    """The class to build, and why it was taken if the configuration does not name it."""
    transformers = import_transformers(spec)
    named = list(getattr(config, "architectures", None) or ())
    for name in named:
        found = getattr(transformers, name, None)
        if isinstance(found, type):
            return found, ""
    why = f"{' and '.join(named)} unknown" if named else "no architectures in the configuration"
    auto_map = getattr(config, "auto_map", None) or {}
    for auto_name in AUTO_CLASSES:
        auto = getattr(transformers, auto_name)
        if trust_remote_code and auto_name in auto_map:
            return _custom_class(spec, config, auto_map[auto_name]), "" if named else f"{why}, {auto_name}"
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            return found[0] if isinstance(found, tuple | list) else found, f"{why}, {auto_name}"
    if set(auto_map) & set(AUTO_CLASSES) and not trust_remote_code:
        raise ModelLoadError(spec, "the model's code lies beside its configuration", TRUST)
    raise ModelLoadError(spec, f"no class for it: {why}, and no auto class knows {config.model_type}", WRITE_A_FILE)


def _custom_class(spec: str, config: Any, reference: str) -> type:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    if "--" in reference:
        raise ModelLoadError(spec, f"its code lies elsewhere: {reference}", "put that code beside the configuration")
    try:
        found = get_class_from_dynamic_module(reference, config.name_or_path, local_files_only=True)
    except Exception as error:  # the code may raise anything when it is imported
        raise ModelLoadError(
            spec, f"importing {reference} failed: {type(error).__name__}: {_first_line(error)}", "correct that code"
        ) from error
    return found


def _construct(model_class: type, config: Any) -> nn.Module:
    def make() -> nn.Module:
        return model_class._from_config(config, dtype=torch.float32)  # type: ignore[attr-defined]

    try:
        return on_meta(make)
    except (NotImplementedError, RuntimeError):  # constructors that compute with tensors, which meta has no values for
        with parameters_on_meta():
            return make()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"
