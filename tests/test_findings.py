"""Findings that are alike become one diagnostic: the rules' and those of a run alike."""

from autoshard.findings import Finding, condense, pattern


def test_findings_are_condensed_by_cause() -> None:
    findings = [
        Finding(code="AS203", severity="note", where="a.1.x", message="read by a.1"),
        Finding(code="AS203", severity="note", where="a.2.x", message="read by a.2"),
        Finding(code="AS203", severity="note", where="b", message="read by b"),
        Finding(code="AS210", severity="error", where="c", message="scalar"),
    ]
    assert [each.where for each in condense(findings)] == ["c", "a.1.x", "b"]
    assert condense(findings)[1].message == "read by a.1 (and 1 more alike: a.*.x)"
    assert pattern("model.layers.10.mlp has 12 rows, 0.norm too") == "model.layers.*.mlp has 12 rows, *.norm too"


def test_the_outermost_place_stands_for_all_and_errors_come_first() -> None:
    alike = [Finding("AS402", "warning", where, "the same") for where in ("a.b.c", "a.b", "x.y.z")]
    found = condense([*alike, Finding("AS410", "error", "(root)", "worse", "mend it")])
    assert [(each.code, each.where) for each in found] == [("AS410", "(root)"), ("AS402", "a.b")]
    assert found[1].message == "the same (and 2 more alike: a.b.c, x.y.z)"
