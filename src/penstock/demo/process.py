"""The parent's side of a training process: starts it, listens to it, and kills it on request."""

from __future__ import annotations

__all__ = ("TrainingLog", "run_training")

import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE
from tempfile import TemporaryFile
from typing import Any, Literal, final

from anyio import ClosedResourceError, EndOfStream, IncompleteRead, open_process
from anyio.abc import ByteReceiveStream
from anyio.streams.buffered import BufferedByteReceiveStream

from penstock.demo.records import (
    DurableSave,
    FinishedStep,
    FollowedStep,
    HeldSave,
    Record,
    Restored,
    StagedSave,
    StartedTraining,
    decode,
)

LONGEST_LINE = 2**24  # bytes; a save's line holds every span of every stage


@final
@dataclass(slots=True)
class TrainingLog:
    """The records of a training process so far, and how it ended."""

    started: StartedTraining | None = None
    restored: Restored | None = None
    steps: list[FinishedStep] = field(default_factory=list[FinishedStep])
    staged: list[StagedSave] = field(default_factory=list[StagedSave])
    held: HeldSave | None = None
    saves: list[DurableSave] = field(default_factory=list[DurableSave])
    followed: list[FollowedStep] = field(default_factory=list[FollowedStep])
    returncode: int | None = None  #: negative: the number of the signal that ended it
    errors: str = ""  #: what it wrote to stderr

    def add(self, record: Record) -> None:
        match record:
            case StartedTraining():
                self.started = record
            case Restored():
                self.restored = record
            case FinishedStep():
                self.steps.append(record)
            case StagedSave():
                self.staged.append(record)
            case HeldSave():
                self.held = record
            case DurableSave():
                self.saves.append(record)
            case FollowedStep():
                self.followed.append(record)

    def steps_during(self, save: DurableSave) -> int:
        """Count the training steps that ended between a save's call and its end."""
        return sum(save.called <= step.end <= save.called + save.durable_s for step in self.steps)


async def run_training(
    options: Mapping[str, Any],
    watch: Callable[[TrainingLog, Record], bool],
    compiled: Path,
    program: Literal["worker", "follower"] = "worker",
) -> TrainingLog:
    """Run a process of the demo to its end.

    Args:
        options: The fields of `TrainingOptions`, or of `FollowingOptions`.
        watch: Called with each record; to return True is to have the process killed (SIGKILL).
        compiled: A directory for what jax compiles, which the processes share.
        program: Which of the two programs it is.

    Cancellation:
        Kills the process and waits until it is gone.
    """
    log = TrainingLog()
    command = [sys.executable, "-m", f"penstock.demo.{program}", json.dumps(options)]
    # Its own session, so that Ctrl-C reaches the parent alone, which then ends the child.
    with TemporaryFile() as errors:
        process = await open_process(
            command,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=errors,
            env=_environment(compiled),
            start_new_session=True,
        )
        async with process:
            assert process.stdout is not None
            async for line in _lines(process.stdout):
                record = decode(line)
                log.add(record)
                if watch(log, record):
                    process.kill()
                    break

            log.returncode = await process.wait()

        errors.seek(0)
        log.errors = errors.read().decode(errors="replace")

    return log


def _environment(compiled: Path) -> dict[str, str]:
    # Who asks for another platform sees to it that its kernels are deterministic. Compiling a step takes a
    # processor 5 s, and four processes need it.
    return {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(compiled), **os.environ}


async def _lines(stream: ByteReceiveStream) -> AsyncIterator[str]:
    """Yield whole lines; what a killed process left of one is dropped."""
    buffered = BufferedByteReceiveStream(stream)
    while True:
        try:
            line = await buffered.receive_until(b"\n", LONGEST_LINE)
        except (IncompleteRead, EndOfStream, ClosedResourceError):
            return

        yield line.decode()
