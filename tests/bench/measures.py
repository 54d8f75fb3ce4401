"""What the bars look at: each a function from the results of a run to one figure. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tests.bench.results import IDLE, Operation, Results, median, spread

Measure: TypeAlias = Callable[[Results], float | None]
OURS = "penstock"
UNDISTURBED = "nothing saved"
"""The steps of training alone."""


def times_as_fast(workload: str, operation: str, *others: str, ours: str = OURS) -> Measure:
    """How many times as fast as the fastest of `others`."""

    def measure(results: Results) -> float | None:
        medians = [median(results.seconds(workload, other, operation)) for other in others]
        best = min((found for found in medians if found is not None), default=None)
        return _ratio(best, median(results.seconds(workload, ours, operation)))

    return measure


def speed_of_raw(workload: str, ours: str = OURS) -> Measure:
    """How fast a warm restore into jax is, of what the raw way takes to read the same into numpy."""

    def measure(results: Results) -> float | None:
        raw = median(results.seconds(workload, "raw buffered", Operation.RESTORE_NUMPY))
        return _ratio(raw, median(results.seconds(workload, ours, Operation.RESTORE_JAX)))

    return measure


def times_its_time(workload: str, operation: str, other: str) -> Measure:
    """How many times the time of `other`."""

    def measure(results: Results) -> float | None:
        ours = median(results.seconds(workload, OURS, operation))
        return _ratio(ours, median(results.seconds(workload, other, operation)))

    return measure


def time_of(workload: str, operation: str) -> Measure:
    """Seconds, as they are."""
    return lambda results: median(results.seconds(workload, OURS, operation))


def microseconds_per_leaf(workload: str, operation: str, ours: str = OURS) -> Measure:
    """Microseconds for each leaf."""

    def measure(results: Results) -> float | None:
        size, took = results.size(workload), median(results.seconds(workload, ours, operation))
        return None if size is None or took is None else took / size.n_leaves * 1e6

    return measure


def staged_ms(workload: str, ours: str = OURS) -> Measure:
    """Milliseconds until a save gives its caller control."""

    def measure(results: Results) -> float | None:
        took = median(results.staged(workload, ours))
        return None if took is None else took * 1e3

    return measure


def pairs_as_fast(workload: str, operation: str, other: str) -> Measure:
    """How many times as fast as `other`: the median over the rounds, each of which has both."""

    def measure(results: Results) -> float | None:
        theirs = results.seconds(workload, other, operation)
        ours = results.seconds(workload, OURS, operation)
        return median([b / a for a, b in zip(ours, theirs, strict=False)])

    return measure


def beside_its_own(workload: str, operation: str, ours: str) -> Measure:
    """How many times the time of penstock's own call."""

    def measure(results: Results) -> float | None:
        own = median(results.seconds(workload, OURS, operation))
        return _ratio(median(results.seconds(workload, ours, operation)), own)

    return measure


def staged_share(workload: str, ours: str = OURS, theirs: str = "Orbax async") -> Measure:
    """Time until staged, as a part of what a save of Orbax's blocks for."""

    def measure(results: Results) -> float | None:
        blocked = median(results.staged(workload, theirs))
        return _ratio(median(results.staged(workload, ours)), blocked)

    return measure


def cpu_share(workload: str, operation: str, other: str) -> Measure:
    """Processor seconds, as a part of those of `other`."""

    def measure(results: Results) -> float | None:
        theirs = median(results.cpu(workload, other, operation))
        return _ratio(median(results.cpu(workload, OURS, operation)), theirs)

    return measure


def slow_down_percent(workload: str, operation: str, contender: str = OURS) -> Measure:
    """By how much steps of training take longer beside saves: the median of the pairs, in percent."""

    def measure(results: Results) -> float | None:
        found = median(slow_downs(results, workload, operation, contender))
        return None if found is None else found * 100

    return measure


def slow_downs(results: Results, workload: str, operation: str, contender: str) -> list[float]:
    """Of each pair, what the steps took longer beside saves than the same without, as a part of it."""
    pairs = zip(
        results.seconds(workload, contender, operation),
        results.seconds(workload, UNDISTURBED, operation),
        strict=False,
    )
    return [beside / alone - 1 for beside, alone in pairs]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return what the median lies within by order alone, with at least 95 %; None of less than six."""
    ordered = sorted(values)
    n, below = len(ordered), 0.0
    for rank in range(n // 2):
        below += math.comb(n, rank) / 2**n
        if below > 0.025:
            return (ordered[rank - 1], ordered[n - rank]) if rank else None

    return None


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


def beside_jax(workload: str, operation: str, n_devices: int, ours: str = OURS) -> Measure:
    """Microseconds for each shard, beside those of jax's own calls."""

    def measure(results: Results) -> float | None:
        size = results.size(workload)
        took = median(results.seconds(workload, ours, operation))
        alone = median(results.seconds(workload, "jax alone", operation))
        if size is None or took is None or alone is None:
            return None

        return (took - alone) / (size.n_leaves * n_devices) * 1e6

    return measure


def memory_share(workload: str, operation: str) -> Measure:
    """Peak extra memory, as a part of the tree's bytes."""

    def measure(results: Results) -> float | None:
        size, memory = results.size(workload), results.extra_memory(workload, OURS, operation)
        return _ratio(memory.extra_bytes, size.nbytes) if size and memory else None

    return measure


def memory_per_leaf(workload: str, operation: str) -> Measure:
    """Bytes of peak extra memory for each leaf."""

    def measure(results: Results) -> float | None:
        size, memory = results.size(workload), results.extra_memory(workload, OURS, operation)
        return _ratio(memory.extra_bytes, size.n_leaves) if size and memory else None

    return measure


def written_share(workload: str) -> Measure:
    """Bytes written by a second save, as a part of those of the first."""

    def measure(results: Results) -> float | None:
        first = median(results.written(workload, OURS, Operation.SAVE))
        return _ratio(median(results.written(workload, OURS, Operation.SECOND_SAVE)), first)

    return measure


def stored_share(workload: str, ours: str, theirs: str) -> Measure:
    """Bytes that a save of `ours` left, as a part of those that one of `theirs` did."""

    def measure(results: Results) -> float | None:
        other = median(results.written(workload, theirs, Operation.SAVE))
        return _ratio(median(results.written(workload, ours, Operation.SAVE)), other)

    return measure


def longest_stall_ms(workload: str, loop: str) -> Measure:
    """Of all operations in all rounds, milliseconds."""

    def measure(results: Results) -> float | None:
        found = [
            stall.seconds
            for stall in results.stalls
            if (stall.workload, stall.contender, stall.loop) == (workload, OURS, loop)
            and stall.operation != IDLE
        ]
        return max(found) * 1e3 if found else None

    return measure


def noise_floor_ms(workload: str, loop: str) -> Measure:
    """What the same heartbeat missed in idle seconds between the rounds, milliseconds."""

    def measure(results: Results) -> float | None:
        found = results.stalled(workload, OURS, IDLE, loop)
        return max(found) * 1e3 if found else None

    return measure


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None
