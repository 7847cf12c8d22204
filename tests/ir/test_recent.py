"""What was made of a graph is made once, as long as few others are asked for in between."""

from collections.abc import Callable

from autoshard.ir.recent import Recent


def _counting(made: list[str], name: str) -> Callable[[], str]:
    def make() -> str:
        made.append(name)
        return name

    return make


def test_the_same_object_and_an_equal_key_are_answered_once() -> None:
    recent, made, one = Recent[str](2), list[str](), [1]
    for key in ((1, "a"), (1, "a"), (1, "b"), (1, "a")):
        assert recent.get(one, key, _counting(made, key[1])) == key[1]
    assert made == ["a", "b"]


def test_an_equal_object_is_another_one() -> None:
    recent, made, one, other = Recent[str](2), list[str](), [1], [1]
    assert recent.get(one, None, _counting(made, "one")) == "one"
    assert recent.get(other, None, _counting(made, "other")) == "other"


def test_the_oldest_is_forgotten() -> None:
    recent, made, sources = Recent[str](2), list[str](), ([1], [2], [3])
    for source in (*sources, sources[1], sources[0]):
        recent.get(source, None, _counting(made, str(source[0])))
    assert made == ["1", "2", "3", "1"]
