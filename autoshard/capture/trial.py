"""One forward on fake tensors, to see whether inputs are of the right form; nothing is kept of it.

The tensors, known values and exchanged functions are those of a captured step, so that a forward which runs here runs
there. What the forward raises is passed on as it is.
"""

from typing import Any

import torch
from torch import nn

from autoshard.capture.attention import TargetFunctions
from autoshard.capture.fake import FakeMode, FakeModel
from autoshard.capture.inputs import fake_pair
from autoshard.capture.libraries import as_in_training
from autoshard.capture.quiet import quiet_machine
from autoshard.capture.spans import ModuleStack
from autoshard.capture.storages import StorageLog
from autoshard.capture.tracer import Tracer
from autoshard.capture.tree import ModuleTree
from autoshard.capture.values import Values, may_keep


def try_forward(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Run the forward in the stored dtypes, without gradients; the model is left as it was.

    Args:
        model: the root, real or on the meta device.
        kwargs: arguments of its forward.

    Raises:
        Exception: whatever the forward raises.
    """
    tree = ModuleTree(model)
    mode, log, values = FakeMode(), StorageLog(), Values()
    stack = ModuleStack(tree, log)
    with quiet_machine(), FakeModel(tree, mode, None) as fake:
        for twin, original in fake.buffers:
            if may_keep(original) and original.device.type == "cpu":
                values.set(twin, original.detach().clone())
        (_, faked), _ = fake_pair(((), kwargs), mode, values, None)
        model.train()
        with (
            torch.no_grad(),
            as_in_training(),
            torch.compiler.set_stance("force_eager"),
            stack.watching(),
            mode,
            TargetFunctions("cpu", values),
            Tracer(log, stack, values),
        ):
            model(**faked)
