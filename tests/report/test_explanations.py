"""Each code that the source uses has its explanation, each explanation its code, and all have one form."""

import ast
import re
from pathlib import Path

import pytest

import autoshard
from autoshard.errors import RequestError
from autoshard.report import explain, list_codes, title
from autoshard.report.explain import FOLDER
from autoshard.report.reference import diagnostics_page, plan_file_page

SOURCE = Path(autoshard.__file__).parent
CODE = re.compile(r"AS\d{3}")


def codes_in_source() -> dict[str, str]:
    """Codes in string literals (docstrings and help texts are none of them), with a file that uses each."""
    found: dict[str, str] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value):
                found.setdefault(node.value, str(path.relative_to(SOURCE)))
    return found


def test_each_code_has_an_explanation_and_each_explanation_a_code() -> None:
    used = codes_in_source()
    missing = {code: place for code, place in used.items() if code not in list_codes()}
    assert missing == {}
    assert set(list_codes()) - set(used) == set()


def test_the_folder_holds_nothing_else() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == [f"{code}.md" for code in list_codes()]


@pytest.mark.parametrize("code", list_codes())
def test_form_of_an_explanation(code: str) -> None:
    text = explain(code)
    assert re.match(rf"# {code}: \S.*\n\n", text)
    assert title(code)
    places = [text.find(heading) for heading in ("What it means", "Why", "What to do", "Example")]
    assert -1 not in places
    assert places == sorted(places)
    example = text[places[-1] :].split("\n", 1)[1]
    assert re.fullmatch(r"\n(?:```\w+\n(?:.*\n)+?```\n|(?:(?: {4}.*)?\n)+)", example), "indent or fence the example"
    assert max(map(len, text.splitlines())) <= 120
    assert text.endswith("\n")


@pytest.mark.parametrize("code", ["as203", " AS203 ", "AS203"])
def test_a_code_is_found_however_it_is_written(code: str) -> None:
    assert explain(code).startswith("# AS203: ")


@pytest.mark.parametrize("code", ["AS000", "203", "", "../AS203", "AS203.md"])
def test_an_unknown_code_lists_the_known_ones(code: str) -> None:
    with pytest.raises(RequestError) as caught:
        explain(code)
    assert caught.value.field == "code"
    assert all(known in caught.value.expected for known in list_codes())


def test_the_page_of_diagnostics_is_current(golden) -> None:
    golden("docs/reference/diagnostics.md", diagnostics_page())


def test_the_page_of_the_plan_file_is_current(golden) -> None:
    golden("docs/reference/plan-file.md", plan_file_page())


def test_the_page_holds_every_explanation_and_links_to_it() -> None:
    page = diagnostics_page()
    headings = {
        re.sub(r"[^\w\- ]", "", line[4:].lower()).replace(" ", "-")
        for line in page.splitlines()
        if line.startswith("### ")
    }
    assert {link[2:-1] for link in re.findall(r"\(#[^)]*\)", page)} <= headings
    for code in list_codes():
        assert f"### {code}: {title(code)}\n" in page
