"""Lets torchvision be imported beside a torch without its compiled ops: their schemas are declared, nothing else.

torchvision's wheels are built for one build of torch; beside another one its Python half fails at import, because it
registers fake versions of ops that were never declared. Declaring them is enough for models that call none of them.
"""

from importlib.util import find_spec

import torch

BOXES = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
INPUT = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
POOLED = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
DEFORMED = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
    "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
    "bool use_mask"
)
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({BOXES}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {POOLED}, {INPUT}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({BOXES}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {POOLED}, {INPUT}) -> Tensor",
    f"ps_roi_align({BOXES}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {POOLED}, int sampling_ratio, {INPUT})"
    " -> Tensor",
    f"ps_roi_pool({BOXES}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {POOLED}, {INPUT}) -> Tensor",
    f"deform_conv2d({DEFORMED}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {DEFORMED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)

_library: torch.library.Library | None = None


def declare() -> None:
    """Declare the ops where torchvision is installed; to be called before it is imported."""
    global _library
    if _library is None and find_spec("torchvision") is not None:
        _library = torch.library.Library("torchvision", "DEF")
        for schema in SCHEMAS:
            _library.define(schema)
