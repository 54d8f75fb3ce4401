"""The bars of penstock's speed, as ratios of medians within one run. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.bench.results import Operation, Results, median, spread

Measure = Callable[[Results], float | None]
OURS = "penstock"


@dataclass(frozen=True)
class Bar:
    """Something that must hold."""

    text: str
    side: Literal["at least", "at most"]
    limit: float
    measure: Measure
    workload: str
    operation: str  #: whose profile explains a figure that falls short


@dataclass(frozen=True)
class Verdict:
    """A bar and what was measured."""

    text: str
    wanted: str
    measured: float | None
    verdict: Literal["pass", "short", "not measured"]
    workload: str
    operation: str


def judge(results: Results) -> list[Verdict]:
    """Hold the run against every bar."""
    return [_judged(bar, bar.measure(results)) for bar in BARS]


def _judged(bar: Bar, measured: float | None) -> Verdict:
    verdict: Literal["pass", "short", "not measured"] = "not measured"
    if measured is not None:
        good = measured >= bar.limit if bar.side == "at least" else measured <= bar.limit
        verdict = "pass" if good else "short"

    wanted = f"{bar.side} {bar.limit:g}"
    return Verdict(bar.text, wanted, measured, verdict, bar.workload, bar.operation)


def times_as_fast(workload: str, operation: str, *others: str, ours: str = OURS) -> Measure:
    """How many times as fast as the fastest of `others`."""

    def measure(results: Results) -> float | None:
        medians = [median(results.seconds(workload, other, operation)) for other in others]
        best = min((found for found in medians if found is not None), default=None)
        return _ratio(best, median(results.seconds(workload, ours, operation)))

    return measure


def times_its_time(workload: str, operation: str, other: str) -> Measure:
    """How many times the time of `other`."""

    def measure(results: Results) -> float | None:
        ours = median(results.seconds(workload, OURS, operation))
        return _ratio(ours, median(results.seconds(workload, other, operation)))

    return measure


def staged_share(workload: str) -> Measure:
    """Time until staged, as a part of what Orbax's asynchronous save blocks for."""

    def measure(results: Results) -> float | None:
        theirs = median(results.staged(workload, "Orbax async"))
        return _ratio(median(results.staged(workload, OURS)), theirs)

    return measure


def slowest_to_median(workload: str, operation: str) -> Measure:
    """How far the slowest is from the median."""

    def measure(results: Results) -> float | None:
        found = spread(results.seconds(workload, OURS, operation))
        return _ratio(found.high, found.median) if found else None

    return measure


def per_leaf_growth(many: str, few: str, operation: str) -> Measure:
    """Time per leaf with many leaves, over that with few."""

    def measure(results: Results) -> float | None:
        sizes = results.size(many), results.size(few)
        medians = (
            median(results.seconds(many, OURS, operation)),
            median(results.seconds(few, OURS, operation)),
        )
        if sizes[0] is None or sizes[1] is None or medians[0] is None or medians[1] is None:
            return None

        return _ratio(medians[0] / sizes[0].n_leaves, medians[1] / sizes[1].n_leaves)

    return measure


def memory_share(workload: str, operation: str) -> Measure:
    """Peak extra memory, as a part of the tree's bytes."""

    def measure(results: Results) -> float | None:
        size, memory = results.size(workload), results.extra_memory(workload, OURS, operation)
        return _ratio(memory.extra_bytes, size.nbytes) if size and memory else None

    return measure


def written_share(workload: str) -> Measure:
    """Bytes written by a second save, as a part of those of the first."""

    def measure(results: Results) -> float | None:
        first = median(results.written(workload, OURS, Operation.SAVE))
        return _ratio(median(results.written(workload, OURS, Operation.SECOND_SAVE)), first)

    return measure


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


SAVE, INTO_JAX, INTO_NUMPY = Operation.SAVE, Operation.RESTORE_JAX, Operation.RESTORE_NUMPY
COLD, METADATA, SECOND = Operation.COLD_NUMPY, Operation.METADATA, Operation.SECOND_SAVE
RAW = ("raw buffered", "raw O_DIRECT")
FIRST = "penstock, first save"
PLAIN = "Orbax uncompressed"
BOTH = ("Orbax", "Orbax async")


def _fast(text: str, limit: float, workload: str, operation: str, *others: str, ours: str = OURS) -> Bar:
    measure = times_as_fast(workload, operation, *others, ours=ours)
    return Bar(text, "at least", limit, measure, workload, operation)


def _most(text: str, limit: float, measure: Measure, workload: str, operation: str) -> Bar:
    return Bar(text, "at most", limit, measure, workload, operation)


def _near(text: str, limit: float, workload: str, operation: str) -> Bar:
    measure = times_its_time(workload, operation, "safetensors")
    return _most(text, limit, measure, workload, operation)


def _growth(text: str, operation: str) -> Bar:
    return _most(text, 1.3, per_leaf_growth("many", "small", operation), "many", operation)


BARS = (
    _fast("1 GiB saved: speed of the faster raw way", 0.85, "large", SAVE, *RAW),
    _fast("1 GiB saved: times Orbax's default", 2.5, "large", SAVE, *BOTH),
    _fast("1 GiB saved: times Orbax uncompressed", 2.0, "large", SAVE, PLAIN),
    _most(
        "1 GiB saved ten times: slowest / median",
        2.0,
        slowest_to_median("large", Operation.STEADY),
        "large",
        Operation.STEADY,
    ),
    _fast("1 GiB restored, warm, into numpy: speed of raw preadv", 1.0, "large", INTO_NUMPY, "raw buffered"),
    _fast("1 GiB restored, warm, into jax: times Orbax's default", 10, "large", INTO_JAX, "Orbax"),
    _fast("1 GiB restored, warm, into jax: times Orbax uncompressed", 4, "large", INTO_JAX, PLAIN),
    _fast("1 GiB restored, cold: speed of raw O_DIRECT, 8 in flight", 0.85, "large", COLD, "raw O_DIRECT"),
    _fast("10,000 leaves saved: times Orbax", 60, "small", SAVE, *BOTH),
    _fast("10,000 leaves saved for the first time: times Orbax", 60, "small", SAVE, *BOTH, ours=FIRST),
    _fast("10,000 leaves restored into numpy: times Orbax", 60, "small", INTO_NUMPY, "Orbax"),
    _fast("10,000 leaves restored into jax: times Orbax", 25, "small", INTO_JAX, "Orbax"),
    _growth("100,000 leaves saved: time a leaf / with 10,000", SAVE),
    _growth("100,000 leaves restored into jax: time a leaf / with 10,000", INTO_JAX),
    _growth("100,000 leaves restored into numpy: time a leaf / with 10,000", INTO_NUMPY),
    _fast("1 GiB saved: times safetensors", 1.3, "large", SAVE, "safetensors"),
    _fast("1 GiB restored, warm, into numpy: times safetensors", 2.0, "large", INTO_NUMPY, "safetensors"),
    _near("10,000 leaves saved: time / safetensors'", 2.0, "small", SAVE),
    _near("10,000 leaves restored into numpy: time / safetensors'", 2.0, "small", INTO_NUMPY),
    _near("10,000 leaves restored into jax: time / safetensors'", 2.0, "small", INTO_JAX),
    _most("1 GiB staged: time / Orbax's async save blocks", 1 / 5, staged_share("large"), "large", SAVE),
    _most(
        "10,000 leaves staged: time / Orbax's async save blocks", 1 / 10, staged_share("small"), "small", SAVE
    ),
    _most("1 GiB saved: extra memory / tree", 0.05, memory_share("large", SAVE), "large", SAVE),
    _most("1 GiB restored: extra memory / tree", 1.05, memory_share("large", INTO_JAX), "large", INTO_JAX),
    _most(
        "transformer saved: extra memory / tree", 0.05, memory_share("transformer", SAVE), "transformer", SAVE
    ),
    _most(
        "transformer restored: extra memory / tree",
        1.05,
        memory_share("transformer", INTO_JAX),
        "transformer",
        INTO_JAX,
    ),
    _most(
        "metadata of 10,000 leaves: time / Orbax's",
        1 / 20,
        times_its_time("small", METADATA, "Orbax"),
        "small",
        METADATA,
    ),
    _most("second save, 5 % changed: bytes / first", 0.06, written_share("changed"), "changed", SECOND),
)
