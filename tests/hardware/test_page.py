"""The page on device profiles tells every field, in the words of the types."""

from pathlib import Path

import msgspec
import pytest

from autoshard.hardware import profile
from autoshard.plan.json_schema import field_descriptions, summary

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "device-profile.md"
MARK = "## The fields\n"
STRUCTS = [
    value
    for value in vars(profile).values()
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not msgspec.Struct
]
STRUCTS.sort(key=lambda struct: struct.__name__ != "DeviceProfile")


def _tables() -> str:
    parts = [MARK]
    for struct in STRUCTS:
        rows = "\n".join(
            f"| `{name}` | {text.replace('``', '`').replace('|', chr(92) + '|')} |"
            for name, text in field_descriptions(struct).items()
        )
        parts.append(f"### {struct.__name__}\n\n{summary(struct)}\n\n| field | meaning |\n| --- | --- |\n{rows}\n")
    return "\n".join(parts)


@pytest.mark.golden
def test_the_page_tells_every_field(request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text(encoding="utf-8")
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page.partition(MARK)[0] + _tables(), encoding="utf-8")
    assert MARK + PAGE.read_text(encoding="utf-8").partition(MARK)[2] == _tables()
    for struct in STRUCTS:
        assert all(field_descriptions(struct).values())
