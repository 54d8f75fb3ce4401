"""Records from a training process to its parent: one JSON object a line.

The parent imports neither jax nor numpy, and this module lets it stay so.
"""

from __future__ import annotations

__all__ = (
    "DurableSave",
    "FinishedStep",
    "FollowedStep",
    "HeldSave",
    "Record",
    "Restored",
    "StagedSave",
    "StartedTraining",
    "decode",
    "emit",
    "encode",
)

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from penstock.kernel import Advice, Span, StageStatistics


@dataclass(frozen=True, slots=True)
class StartedTraining:
    """The process is ready for its first step."""

    n_parameters: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint was found and read."""

    step: int
    path: str
    n_leaves: int
    nbytes: int
    seconds: float
    passed_over: list[str]  #: names beside it that are no finished checkpoints


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """One training step; times by `time.perf_counter` of the training process."""

    step: int  #: from 1
    loss: str  #: `float.hex`, so that no bit is lost
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class StagedSave:
    """From here on training may go on, and donate what is being saved."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class HeldSave:
    """The save that is to be killed is half written, and waits for it."""

    step: int
    nbytes: int  #: that the writing stage has passed on


@dataclass(frozen=True, slots=True)
class DurableSave:
    """A save that is on disk and visible under its own name."""

    step: int
    path: str
    n_leaves: int
    nbytes: int
    staged_s: float
    durable_s: float
    stall_s: float  #: the longest that the event loop did not get round to a task during the save
    called: float  #: `time.perf_counter` when `save` was called
    milestones: dict[str, float]  #: when each was passed, by the same clock
    stages: tuple[StageStatistics, ...]


@dataclass(frozen=True, slots=True)
class FollowedStep:
    """A step that another process saved was restored, and one step was trained from there, to evaluate it."""

    step: int
    loss: str  #: of the step after it, `float.hex`
    restored_s: float
    peak_bytes: int  #: of the memory budget
    limit_bytes: int


Record: TypeAlias = (
    "StartedTraining | Restored | FinishedStep | StagedSave | HeldSave | DurableSave | FollowedStep"
)

_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        StartedTraining,
        Restored,
        FinishedStep,
        StagedSave,
        HeldSave,
        DurableSave,
        FollowedStep,
    )
}


def encode(record: Record) -> str:
    """Return the record as one line, without its end."""
    return json.dumps({"record": type(record).__name__, **asdict(record)})


def emit(record: Record) -> None:
    """Tell the parent."""
    sys.stdout.write(encode(record) + "\n")
    sys.stdout.flush()


def decode(line: str) -> Record:
    """Read what `encode` made.

    Raises:
        ValueError: If it is something else.
    """
    try:
        fields: dict[str, Any] = json.loads(line)
        kind = _TYPES[fields.pop("record")]
        if kind is DurableSave:
            fields["stages"] = tuple(_stage(stage) for stage in fields["stages"])

        record: Record = kind(**fields)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"not a line of a training process: {line[:200]!r}") from error

    return record


def _stage(fields: Mapping[str, Any]) -> StageStatistics:
    spans = tuple(Span(**span) for span in fields["spans"])
    return replace(StageStatistics(**fields), spans=spans, advice=Advice(**fields["advice"]))
