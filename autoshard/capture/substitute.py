"""``--attention sdpa``: models written for flash_attn are planned where it is not.

While the context is open ``import flash_attn`` gives functions with the same results and the same saved tensors
(``flash_attention``), and transformers' models that ask for one of its flash implementations take ``sdpa``, which runs
the same kernel on CUDA. Everything is put back afterwards; what a model file has imported meanwhile stays with it.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

from autoshard.capture import flash_attention

ASSUMED = "attention=sdpa (in place of flash_attn and flash_attention_2)"
ATTENTION = (
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
)  # fmt: skip
OFFERED = {
    "flash_attn": ATTENTION,
    "flash_attn.flash_attn_interface": ATTENTION,
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "unpad_input"),
}
"""What stands in for each module; a name that is not among it fails to be imported, with the remedy of AS105."""
_OPEN = ExitStack()
VERSION = "2.8.3"
"""Models ask for at least some version of flash_attn 2."""


@contextmanager
def substituted(attention: str | None) -> Iterator[None]:
    """Calls of flash_attn are exchanged while this is open.

    Args:
        attention: ``sdpa``, or ``None`` to exchange nothing.
    """
    if attention is None:
        yield
        return
    with mock.patch.dict(sys.modules, _modules()), as_sdpa(attention):
        yield


def stay_substituted(attention: str | None) -> None:
    """As ``substituted``, until the process ends: for one that trains the model and does nothing else."""
    _OPEN.enter_context(substituted(attention))


@contextmanager
def as_sdpa(attention: str | None) -> Iterator[None]:
    """A transformers model that asks for a flash implementation takes ``sdpa``; only a loaded library is touched."""
    library = sys.modules.get("transformers.modeling_utils")
    known = getattr(library, "PreTrainedModel", None)
    name = "_check_and_adjust_attn_implementation"
    original = getattr(known, name, None)
    if attention is None or original is None:
        yield
        return

    def adjust(model: Any, asked: str | None, *args: Any, **kwargs: Any) -> Any:
        return original(model, "sdpa" if asked is not None and "flash" in asked else asked, *args, **kwargs)

    with mock.patch.object(known, name, adjust):
        yield


def _modules() -> dict[str, ModuleType]:
    made = {}
    for name, functions in OFFERED.items():
        module = ModuleType(name, "Stands in for flash_attn, without a GPU.")
        # Code asks for the spec to see whether the package is there.
        module.__spec__ = ModuleSpec(name, None, is_package=name == "flash_attn")
        for function in functions:
            setattr(module, function, getattr(flash_attention, function))
        made[name] = module
    made["flash_attn"].__dict__.update(
        __version__=VERSION,
        __path__=[],
        flash_attn_interface=made["flash_attn.flash_attn_interface"],
        bert_padding=made["flash_attn.bert_padding"],
    )
    return made
