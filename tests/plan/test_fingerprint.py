"""What the fingerprint sees, and what it does not see."""

import doctest
import hashlib
import sys

import pytest

import autoshard.plan.load
from autoshard.plan import FingerprintItems, fingerprint

PARAMS = (
    ("a.weight", ("b.weight", "c.weight"), (2, 3), "float32", True),
    ("d.bias", (), (3,), "bfloat16", False),
)
ITEMS = FingerprintItems(params=PARAMS, buffers=("rope.inv_freq", "mask"))
FQNS = ("layers.0", "layers.1", "")


def test_is_the_sha256_of_the_canonical_lines() -> None:
    # Written out by hand: the format is a contract between releases, so no code of the package may make it here.
    text = (
        '["param","a.weight",["b.weight","c.weight"],[2,3],"float32",true]\n'
        '["param","d.bias",[],[3],"bfloat16",false]\n'
        '["buffer","mask"]\n'
        '["buffer","rope.inv_freq"]\n'
        '["module",""]\n'
        '["module","layers.0"]\n'
        '["module","layers.1"]\n'
    )
    assert fingerprint(ITEMS, FQNS) == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def test_order_and_repetition_do_not_matter() -> None:
    shuffled = FingerprintItems(
        params=(PARAMS[1], ("a.weight", ("c.weight", "b.weight"), (2, 3), "float32", True)),
        buffers=("mask", "rope.inv_freq"),
    )
    assert fingerprint(shuffled, ("", "layers.1", "layers.0", "layers.1")) == fingerprint(ITEMS, FQNS)


def _with_param(**changes: object) -> FingerprintItems:
    names = ("key", "aliases", "shape", "dtype", "requires_grad")
    first = tuple(changes.get(name, value) for name, value in zip(names, PARAMS[0], strict=True))
    return FingerprintItems(params=(first, PARAMS[1]), buffers=ITEMS.buffers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("items", "fqns"),
    [
        (_with_param(key="a.weights"), FQNS),
        (_with_param(aliases=("b.weight",)), FQNS),
        (_with_param(aliases=("b.weight,c.weight",)), FQNS),
        (_with_param(shape=(3, 2)), FQNS),
        (_with_param(shape=(6,)), FQNS),
        (_with_param(dtype="float16"), FQNS),
        (_with_param(requires_grad=False), FQNS),
        (FingerprintItems(params=PARAMS, buffers=("mask",)), FQNS),
        (FingerprintItems(params=PARAMS, buffers=(*ITEMS.buffers, "layers.0")), FQNS),
        (FingerprintItems(params=PARAMS[:1], buffers=ITEMS.buffers), FQNS),
        (ITEMS, ("layers.0", "")),
        (ITEMS, ("layers.0,layers.1", "")),
        (ITEMS, ("layers.0\nlayers.1", "")),
    ],
)
def test_every_item_counts(items: FingerprintItems, fqns: tuple[str, ...]) -> None:
    assert fingerprint(items, fqns) != fingerprint(ITEMS, FQNS)


def test_names_outside_unicode_do_not_raise() -> None:
    odd = FingerprintItems(params=(("\udc80", (), (), "float32", True),), buffers=("ü",))
    assert len(fingerprint(odd, ["模型"])) == len("sha256:") + 64


def test_the_examples_hold() -> None:
    for module in (sys.modules["autoshard.plan.fingerprint"], autoshard.plan.load):
        results = doctest.testmod(module)
        assert results.attempted > 0
        assert results.failed == 0
