"""The IR: one training step of one model as data. Imports no torch."""

from autoshard.ir.graph import (
    CALLER,
    LOSS,
    BufferInfo,
    Call,
    DtypeRead,
    InputInfo,
    ModelGraph,
    ModuleNode,
    ModuleSpan,
    Moment,
    OpNode,
    Outline,
    ParamInfo,
    Region,
    StorageInfo,
)

__all__ = [
    "CALLER",
    "LOSS",
    "BufferInfo",
    "Call",
    "DtypeRead",
    "InputInfo",
    "ModelGraph",
    "ModuleNode",
    "ModuleSpan",
    "Moment",
    "OpNode",
    "Outline",
    "ParamInfo",
    "Region",
    "StorageInfo",
]
