"""The page about profiles names all that there are."""

import re
from pathlib import Path

from autoshard.hardware import known_profiles

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "device-profile.md"


def test_every_profile_is_named() -> None:
    (named,) = re.findall(r"Those that come with it: (.*?)\. Their", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert tuple(re.findall(r"`([^`]+)`", named)) == known_profiles()
