"""One training process: steps in a worker thread, saves in the background, an event loop that lives."""

from __future__ import annotations

__all__ = ("LoopWatch", "TrainingOptions", "train", "unfinished")

import gc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from anyio import create_task_group, sleep, sleep_forever, to_thread
from anyio.abc import TaskGroup

import penstock
from penstock import SaveFuture
from penstock.demo.corpus import Corpus
from penstock.demo.model import SIZES, State, count_parameters, init_state, train_step
from penstock.demo.records import (
    DurableSave,
    FinishedStep,
    HeldSave,
    Record,
    Restored,
    StagedSave,
    StartedTraining,
)
from penstock.demo.report import is_of_a_step
from penstock.kernel import Milestone, Pipeline, SaveRun, WrittenBatch
from penstock.pipelines import save_pipeline
from penstock.steps import EverySteps, KeepBest, KeepLast

TICK_S = 0.002
LEAST_SAVES = 3  # one to resume from, one to be killed in, one after it
KEPT_LAST = 2
KEPT_BEST = 1


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """The task of one training process. Equal options and text give equal losses, bit for bit."""

    directory: str  #: of steps
    text: str  #: a file
    size: str  #: a key of `model.SIZES`
    steps: int  #: to end after
    every: int  #: steps from one save to the next
    seed: int = 0
    hold_at: int | None = None  #: the step whose save stops half-way, and stays so
    seconds: float | None = None  #: that three such processes may take; a slow one ends early
    began: float = 0.0  #: `time.monotonic` when this one was started


@final
class LoopWatch:
    """Measures how long the event loop leaves a task waiting that only wants to run again."""

    __slots__ = ("_delays",)

    def __init__(self) -> None:
        self._delays: deque[tuple[float, float]] = deque(maxlen=100_000)

    async def __call__(self) -> None:
        """Watch until cancelled."""
        while True:
            due = time.perf_counter() + TICK_S
            await sleep(TICK_S)
            now = time.perf_counter()
            self._delays.append((now, now - due))

    def longest(self, since: float, until: float) -> float:
        """Return the longest delay, in seconds, that ended between two times of `time.perf_counter`."""
        return max((delay for at, delay in self._delays if since <= at <= until), default=0.0)


async def train(options: TrainingOptions, emit: Callable[[Record], object]) -> None:
    """Train from the last good checkpoint in the directory, or from the beginning, to the end.

    Args:
        options: What to do.
        emit: Called in the event loop with everything worth telling.

    Raises:
        PenstockError: If a save or the restore fails.
    """
    in_bucket = options.directory.startswith("s3://")
    others = [] if in_bucket else unfinished(Path(options.directory))  # before the manager removes them
    manager = penstock.CheckpointManager(
        options.directory,
        save_when=EverySteps(options.every),
        keep=KeepLast(KEPT_LAST) | KeepBest(KEPT_BEST, "loss"),
    )
    async with manager, create_task_group() as tasks:
        watch = LoopWatch()
        tasks.start_soon(watch)
        async with create_task_group() as saves:
            run = _Training(options, emit, manager, watch, saves)
            await run.prepare(others)
            await run.steps()

        tasks.cancel_scope.cancel()


def unfinished(directory: Path) -> list[str]:
    """Return the names of what is no checkpoint: a step gets its own name by the last act of its save."""
    names = (path.name for path in directory.iterdir())
    return sorted(name for name in names if is_of_a_step(name) and not name.isdecimal())


@final
class _Training:
    def __init__(
        self,
        options: TrainingOptions,
        emit: Callable[[Record], object],
        manager: penstock.CheckpointManager,
        watch: LoopWatch,
        saves: TaskGroup,
    ) -> None:
        self._options = options
        self._emit = emit
        self._manager = manager
        self._watch = watch
        self._saves = saves
        self._size = SIZES[options.size]
        self._corpus = Corpus(Path(options.text).read_text("utf-8"))
        self._state: State = init_state(self._size, self._corpus.vocabulary, options.seed)

    async def prepare(self, others: list[str]) -> None:
        """Restore the last good checkpoint, if there is one; `others` is what lay beside it."""
        latest = self._manager.latest_step()
        if latest is not None:
            since = time.perf_counter()
            self._state = await self._manager.restore(like=self._state)
            seconds = time.perf_counter() - since
            found = await self._manager.metadata()
            (tree,) = found.items.values()
            self._emit(Restored(latest, found.path, len(tree.leaves), tree.nbytes, seconds, others))

        self._emit(StartedTraining(count_parameters(self._state), self._corpus.vocabulary))

    async def steps(self) -> None:
        """Train to the end; the saves go on meanwhile."""
        options = self._options
        began = 0.0
        for step in range(int(self._state["step"]) + 1, options.steps + 1):
            batch = self._corpus.batch(options.seed, step, self._size)
            start = time.perf_counter()
            self._state, loss = await to_thread.run_sync(train_step, self._state, batch, self._size)
            end = time.perf_counter()
            self._emit(FinishedStep(step, loss.hex(), start, end))
            if not began:
                # What compiling left behind stays; looking at it again would cost the collector, and
                # so the event loop, some 100 ms each time.
                gc.freeze()
                began = time.monotonic()

            await self._save(step, loss)
            if step % options.every == options.every // 2 and self._is_late(step, began):
                return  # between two saves, so that training goes on during the last one, too

    def _is_late(self, step: int, warm_at: float) -> bool:
        """Return whether this process has had its share: all three start, and train for 2.2 times as long."""
        options = self._options
        if options.seconds is None or step < LEAST_SAVES * options.every:
            return False

        share = (options.seconds - 3 * (warm_at - options.began)) / 2.2
        return time.monotonic() - warm_at > share

    async def _save(self, step: int, loss: float) -> None:
        """Save the step, if the policy wants it."""
        doomed = step == self._options.hold_at
        if doomed:
            await self._manager.wait()  # so that there is a last good checkpoint on any machine

        called = time.perf_counter()
        save = await self._manager.save(
            step,
            self._state,
            metrics={"loss": loss},
            pipeline=self._held_pipeline(step) if doomed else None,
        )
        if save is None:
            return

        self._emit(StagedSave(step, time.perf_counter() - called))
        self._saves.start_soon(self._follow, step, save, called)

    async def _follow(self, step: int, save: SaveFuture, called: float) -> None:
        passed: dict[str, float] = {}
        for milestone in (Milestone.STAGED, Milestone.WRITTEN, Milestone.COMMITTED, Milestone.FINALIZED):
            note = partial(_note_time, passed, milestone.name.lower())
            save.add_done_callback(note, milestone=milestone)

        report = await save
        self._emit(
            DurableSave(
                step,
                report.path,
                report.n_leaves,
                report.nbytes,
                report.staged_s,
                report.durable_s,
                self._watch.longest(called, time.perf_counter()),
                called,
                passed,
                report.stages,
            )
        )

    def _held_pipeline(self, step: int) -> Pipeline[SaveRun]:
        """The usual stages and one more, which waits for ever once half of the bytes are written."""
        half = count_parameters(self._state) * 12 // 2  # float32, three of each: itself, mu and nu
        written = 0

        async def hold(batch: WrittenBatch) -> WrittenBatch:
            nonlocal written
            written += batch.nbytes
            if written >= half:
                self._emit(HeldSave(step, written))
                await sleep_forever()

            return batch

        return save_pipeline().insert_before("commit", hold)


def _note_time(passed: dict[str, float], name: str, _: SaveFuture) -> None:
    passed[name] = time.perf_counter()
