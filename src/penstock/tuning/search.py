"""Which options are faster than the defaults: tried one after the other, each beside what is best so far."""

from __future__ import annotations

__all__ = ("Comparison", "Flow", "Measure", "Options", "Timing", "Tuned", "search")

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal, TypeAlias, final

Options: TypeAlias = Mapping[str, object]
"""Dotted keys to values."""

Flow: TypeAlias = Literal["save", "restore"]

PAIRS: Final = 3
GAIN: Final = 0.92
"""A candidate must take at most this part of the time, and be faster in every pair: less is noise."""


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one save and of one restore."""

    save_s: float
    restore_s: float


Measure: TypeAlias = Callable[[Options], Awaitable[Timing]]


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """A candidate beside what was best before it: the timings of each pair."""

    flow: Flow
    options: Options
    before: tuple[Timing, ...]
    after: tuple[Timing, ...]

    def seconds(self, timings: Sequence[Timing], flow: Flow) -> list[float]:
        return [timing.save_s if flow == "save" else timing.restore_s for timing in timings]

    def ratio(self, flow: Flow) -> float:
        """The median time as a part of that before."""
        return median(self.seconds(self.after, flow)) / max(median(self.seconds(self.before, flow)), 1e-9)

    @property
    def is_faster(self) -> bool:
        """Whether it is, beyond noise, and does not slow the other flow down."""
        pairs = zip(self.seconds(self.after, self.flow), self.seconds(self.before, self.flow), strict=True)
        other: Flow = "restore" if self.flow == "save" else "save"
        return all(a < b for a, b in pairs) and self.ratio(self.flow) <= GAIN and self.ratio(other) < 1 / GAIN


@final
@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found."""

    options: Options  #: that differ from the defaults; empty if nothing is faster
    tried: tuple[Comparison, ...]
    final: Comparison | None  #: the options beside the defaults, measured once more
    complete: bool  #: whether time sufficed for every candidate


async def search(
    measure: Measure,
    candidates: Sequence[tuple[Flow, Options]],
    *,
    has_time: Callable[[], bool],
    tell: Callable[[int, str], object] = lambda done, text: None,
) -> Tuned:
    """Return the options that are faster than the defaults.

    Each candidate is measured in pairs with the best so far, so that a disk that is slow for a while is slow
    for both. In the end all that was chosen is compared with the defaults, and what is slower is dropped.

    Args:
        measure: Saves and restores with these options.
        candidates: In the order tried; of the same key, the fastest is kept.
        has_time: Asked before each candidate.
        tell: Told how many are done, and what is tried now.
    """
    best: dict[str, object] = {}
    tried: list[Comparison] = []
    for done, (flow, options) in enumerate(candidates):
        if not has_time():
            break

        tell(done, ", ".join(f"{key} = {value}" for key, value in options.items()))
        found = await _compared(measure, flow, best, {**best, **options}, options)
        tried.append(found)
        if found.is_faster:
            best.update(options)

    complete = len(tried) == len(candidates)
    if not best:
        return Tuned({}, tuple(tried), None, complete)

    tell(len(candidates), "all that was chosen, beside the defaults")
    last = await _compared(measure, "save", {}, best, best)
    kept = {key: value for key, value in best.items() if _holds(last, key)}
    return Tuned(kept, tuple(tried), last, complete)


def _holds(last: Comparison, key: str) -> bool:
    """Whether an option is to be kept: what concerns both saves and restores may slow neither down."""
    if key.startswith(("save.", "restore.")):
        return last.ratio(_flow_of(key)) <= 1.0

    return last.ratio("save") <= 1.0 and last.ratio("restore") < 1 / GAIN


async def _compared(
    measure: Measure, flow: Flow, before: Options, after: Options, options: Options
) -> Comparison:
    pairs = [(await measure(before), await measure(after)) for _ in range(PAIRS)]
    return Comparison(
        flow, dict(options), tuple(first for first, _ in pairs), tuple(second for _, second in pairs)
    )


def _flow_of(key: str) -> Flow:
    return "restore" if key.startswith("restore.") else "save"
