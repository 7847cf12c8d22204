"""From timings to the figures of a profile: least squares on relative errors, and how well they describe the timings.

A timing is modelled as a start and a rate: ``ns = start + work / rate``. Relative errors are squared, so that a timing
of a microsecond counts as much as one of a second.
"""

from collections.abc import Sequence

import msgspec

from autoshard.hardware.profile import Fit

NS_PER_SECOND = 10**9


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One timing.

    Attributes:
        figure: what was run, such as ``matmul float32`` or ``all-gather``.
        work: operations, bytes on the wire or in memory, or a count of units or kernels, whatever the figure is about.
        ns: its time.
        num_ranks: ranks that took part together.
        num_nodes: nodes over which they were spread.
    """

    figure: str
    work: int
    ns: int
    num_ranks: int = 1
    num_nodes: int = 1


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """``ns = start_ns + work * ns_per_work``.

    Attributes:
        start_ns: time without work, not less than 0.
        ns_per_work: time of one unit of work.
        fit: how well it describes the timings.
    """

    start_ns: float
    ns_per_work: float
    fit: Fit

    @property
    def per_second(self) -> int:
        """Work in a second, without the start."""
        return max(1, int(NS_PER_SECOND / self.ns_per_work))


def fit_line(name: str, samples: Sequence[Sample], *, may_be_flat: bool = False) -> Line:
    """Start and rate of timings of different work; a start that would be negative is 0.

    Args:
        name: for errors.
        samples: the timings.
        may_be_flat: work may take no time at all; timings that fall with the work say that it takes none.

    Raises:
        ValueError: there are no timings, or they do not grow with the work.
    """
    if len({sample.work for sample in samples}) < 2:
        raise ValueError(f"{name}: timings of one size have no rate")
    # a + b w = t, each equation divided by t: a u + b v = 1.
    u = [1 / sample.ns for sample in samples]
    v = [sample.work / sample.ns for sample in samples]
    uu, uv, vv = _dot(u, u), _dot(u, v), _dot(v, v)
    determinant = uu * vv - uv * uv
    start = (vv * sum(u) - uv * sum(v)) / determinant
    slope = (uu * sum(v) - uv * sum(u)) / determinant
    if start < 0:
        return fit_rate(name, samples)
    if slope <= 0 and may_be_flat:
        start = sum(u) / uu
        return Line(start_ns=start, ns_per_work=0, fit=_errors(name, samples, start, 0))
    if slope <= 0:
        raise ValueError(f"{name}: the timings do not grow with the work")
    return Line(start_ns=start, ns_per_work=slope, fit=_errors(name, samples, start, slope))


def fit_rate(name: str, samples: Sequence[Sample], start_ns: float = 0) -> Line:
    """The rate of timings whose start is known.

    Raises:
        ValueError: there are no timings, or the start leaves nothing of them.
    """
    v = [sample.work / sample.ns for sample in samples]
    rest = [1 - start_ns / sample.ns for sample in samples]
    if not v or _dot(v, rest) <= 0:
        raise ValueError(f"{name}: the timings leave nothing for the work beside a start of {start_ns:.0f} ns")
    slope = _dot(v, rest) / _dot(v, v)
    return Line(start_ns=start_ns, ns_per_work=slope, fit=_errors(name, samples, start_ns, slope))


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _errors(name: str, samples: Sequence[Sample], start: float, slope: float) -> Fit:
    errors = sorted(abs((start + slope * sample.work) / sample.ns - 1) for sample in samples)
    middle = len(errors) // 2
    median = errors[middle] if len(errors) % 2 else (errors[middle - 1] + errors[middle]) / 2
    return Fit(name=name, num_points=len(errors), median_error=round(median, 4), largest_error=round(errors[-1], 4))
