"""Which stage, or which budget, a save or a restore waited for, and what to change."""

from __future__ import annotations

__all__ = ("Finding", "explained", "find_bottleneck", "wall_s")

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, final

from penstock.kernel.reports.statistics import Advice, StageStatistics

_BUSY: Final = 0.5
"""A stage that works for this part of the time is the bottleneck, whoever waits for memory."""

_SHORT: Final = 0.25
"""If no stage is that busy, one that waits for memory for this part of the time says what is."""

_TINY_S: Final = 0.005

_FEW_LEAVES: Final = 1000
_FEW_BYTES: Final = 2**20


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """What held a run up: the stage, why, and for how many of how many seconds."""

    stage: StageStatistics
    why: Literal["work", "memory"]
    seconds: float
    of_s: float


def wall_s(stages: Sequence[StageStatistics]) -> float:
    """Seconds from the first to the last work of any stage."""
    spans = [span for stage in stages for span in stage.spans]
    if not spans:
        return max([stage.longest_s for stage in stages], default=0.0)

    return max(span.end for span in spans) - min(span.start for span in spans)


def find_bottleneck(stages: Sequence[StageStatistics]) -> Finding | None:
    """Return what held the run up; None if no stage ran.

    A stage all of whose workers are busy most of the time is it, and then it is also why others wait for
    memory: it gives back too slowly. If none is that busy, and one waits for memory, the budget is it.
    """
    ran = [stage for stage in stages if stage.n_in]
    if not ran:
        return None

    whole = max(wall_s(stages), 1e-9)
    busiest = max(ran, key=lambda stage: stage.longest_s)
    waiting = max(ran, key=_waited_s)
    if busiest.longest_s < _BUSY * whole and _waited_s(waiting) >= _SHORT * whole:
        return Finding(waiting, "memory", _waited_s(waiting), whole)

    return Finding(busiest, "work", busiest.longest_s, whole)


def explained(stages: Sequence[StageStatistics], kind: str, n_leaves: int, nbytes: int) -> str:
    """Say in one or two sentences what held a save or a restore up, and which option to change.

    Args:
        stages: What was measured.
        kind: `save` or `restore`.
        n_leaves: All leaves: what a stage advises where there are many is wrong for four.
        nbytes: Array bytes.
    """
    found = find_bottleneck(stages)
    if found is None:
        return f"No stage of this {kind} had anything to do."

    stage, took = found.stage, f"{found.seconds:.2f} of {found.of_s:.2f} s"
    if found.of_s < _TINY_S:
        took = f"{1000 * found.seconds:.1f} of {1000 * found.of_s:.1f} ms"
    if found.why == "memory":
        return (
            f"Memory is the bottleneck: the stage {stage.name!r} waited {took} for it. {stage.advice.memory}"
        )

    workers = f", with {stage.workers} workers" if stage.workers > 1 else ""
    words = _advised(stage.advice, n_leaves, nbytes)
    return f"The stage {stage.name!r} is the bottleneck: it worked {took}{workers}. {words}"


def _advised(advice: Advice, n_leaves: int, nbytes: int) -> str:
    if advice.few_leaves and n_leaves < _FEW_LEAVES:
        return advice.few_leaves
    if advice.few_bytes and nbytes < _FEW_BYTES:
        return advice.few_bytes

    return advice.work


def _waited_s(stage: StageStatistics) -> float:
    return stage.memory_wait_s / stage.workers
