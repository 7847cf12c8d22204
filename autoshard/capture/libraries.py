"""What has to be said to libraries while a model runs on fake tensors.

transformers takes a fake tensor for a sign that it is traced by a compiler, and then materialises attention masks and
repeats key and value heads, which it does not do when it trains. Its question is answered with no; what it then asks
of the data is answered by known values. Only modules that are loaded already are touched.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def as_in_training() -> Iterator[None]:
    """Libraries behave as in an ordinary training step."""
    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "transformers" and callable(getattr(module, "__dict__", {}).get("is_tracing")):
                patches.enter_context(mock.patch.dict(module.__dict__, is_tracing=_no))
        yield


def _no(tensor: Any = None) -> bool:
    return False
