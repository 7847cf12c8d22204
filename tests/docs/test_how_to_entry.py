"""The page on entries trains as written."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "entry.md"


@pytest.mark.slow
def test_the_code_trains_through_its_entry() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    namespace: dict[str, object] = {}
    exec(code, namespace)  # the page's own code
    assert namespace["plan"].entry == "training_step"  # type: ignore[attr-defined]
