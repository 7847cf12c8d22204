"""Bytes and nanoseconds to text and back."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autoshard.sizes
from autoshard.errors import RequestError
from autoshard.request import Request, resolve
from autoshard.sizes import format_bytes, format_ns, parse_bytes


def test_the_examples_hold() -> None:
    assert doctest.testmod(autoshard.sizes) == doctest.TestResults(failed=0, attempted=5)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        (7, 7),
        ("1KiB", 1024),
        ("1 kib", 1024),
        ("1kB", 1000),
        ("3MB", 3_000_000),
        ("60GiB", 64424509440),
        ("1.5 GB", 1_500_000_000),
        (" 0.5TiB ", 549755813888),
        ("2tb", 2_000_000_000_000),
        ("9007199254740993", 9_007_199_254_740_993),
        ("12B", 12),
    ],
)
def test_sizes_are_read(text: int | str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", -1, 0, "0", "0.0001B", "1e9", "1,5GB", "60 GiBs", "1GiB 2", True, None, 1.5, "١GiB x"]
)
def test_what_is_no_size_names_the_option(text: object) -> None:
    with pytest.raises(ValueError, match="60GiB"):
        parse_bytes(text)  # type: ignore[arg-type]
    if text is None:
        return  # no allowance was asked for
    with pytest.raises(RequestError) as caught:
        resolve(Request(device="cpu", devices=2, memory=text))  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.value) == ("memory", text)
    assert "60GiB" in str(caught.value)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (100 * 1024, "100 KiB"),
        (-(2**20), "-1.00 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (3 * 2**40 + 2**39, "3.50 TiB"),
    ],
)
def test_bytes_are_written(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1.00 µs"),
        (12_345, "12.3 µs"),
        (123_456_789, "123 ms"),
        (2 * 10**9, "2.00 s"),
    ],
)
def test_times_are_written(nanoseconds: int, text: str) -> None:
    assert format_ns(nanoseconds) == text


@given(st.integers(min_value=1, max_value=2**50))
def test_what_is_written_is_read_back_to_three_digits(num_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= num_bytes / 200 + 1
