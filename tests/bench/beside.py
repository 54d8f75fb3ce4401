"""Steps of training beside saves: by how much the saves slow them down on the same processors."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Protocol, final

import jax
import jax.numpy as jnp
from anyio import to_thread
from tests.bench import caches
from tests.bench.contenders.protocol import InBackground
from tests.bench.measures import UNDISTURBED, interval, slow_downs
from tests.bench.results import Note, Operation, Results, Sample, Size, median
from tests.bench.trees import State, ready
from tests.bench.workloads import Workload

import penstock
from penstock import SaveFuture

INTERVALS: Final = {Operation.BESIDE_1: (1.0, 3), Operation.BESIDE_10: (10.0, 1)}
"""Seconds between two saves, and how many saves there are in what is timed."""

WIDTH: Final = 1024
LAYERS: Final = 8
LOOK_S: Final = 1.0


class Saver(Protocol):
    """Begins a save that goes on in the background, and waits for it."""

    label: str

    async def begin(self, path: Path, state: State) -> None: ...
    async def finish(self) -> None: ...


@final
class OwnSaver:
    """penstock, in the event loop."""

    label = "penstock"

    def __init__(self, checkpointer: penstock.Checkpointer) -> None:
        self._checkpointer = checkpointer
        self._saving: SaveFuture | None = None

    async def begin(self, path: Path, state: State) -> None:
        self._saving = await self._checkpointer.save(path, state.tree)

    async def finish(self) -> None:
        if self._saving is not None:
            await self._saving


@final
class BlockingSaver:
    """A contender whose calls block, in a thread."""

    def __init__(self, label: str, inner: InBackground) -> None:
        self.label = label
        self._inner = inner

    async def begin(self, path: Path, state: State) -> None:
        await to_thread.run_sync(self._inner.begin, path, state)

    async def finish(self) -> None:
        await to_thread.run_sync(self._inner.finish)


async def measure_beside(
    workload: Workload, state: State, rounds: int, folder: Path, others: Sequence[Any]
) -> Results:
    """Train the same number of steps without saves and beside everybody's, in turn, again and again."""
    results = Results(sizes=[Size(workload.name, workload.title, len(state.leaves), state.nbytes)])
    async with AsyncExitStack() as stack:
        own = OwnSaver(await stack.enter_async_context(penstock.Checkpointer()))
        savers: list[Saver | None] = [None, own]
        savers += [BlockingSaver(each.label, each) for each in others if isinstance(each, InBackground)]
        training = Training(state, folder)
        await training.warm_up([saver for saver in savers if saver is not None])
        for operation in workload.operations:
            every_s, n_saves = INTERVALS[operation]
            n_steps = await training.n_steps(every_s * n_saves)
            for number in range(rounds):
                first = number % len(savers)
                for saver in (*savers[first:], *savers[:first]):
                    label = UNDISTURBED if saver is None else saver.label
                    _say(workload, f"round {number + 1}: {label}: {operation}")
                    seconds, cpu_s = await training.train(n_steps, saver, every_s)
                    results.samples.append(
                        Sample(workload.name, label, operation, number, seconds, cpu_s=cpu_s)
                    )

    for operation in workload.operations:
        for saver in savers[1:]:
            if saver is not None:
                results.notes.append(_note(results, workload, operation, saver.label))

    return results


@final
class Training:
    """A program that keeps every processor busy, as a step of training does."""

    def __init__(self, state: State, folder: Path) -> None:
        self._state, self._folder = state, folder
        self._step: Callable[[jax.Array], jax.Array] = jax.jit(_step)
        self._at = jnp.full((WIDTH, WIDTH), 1 / WIDTH)
        self._n_saved = 0

    async def warm_up(self, savers: Sequence[Saver]) -> None:
        await self._advance()
        for saver in savers:
            await saver.begin(self._next_path(), self._state)
            await saver.finish()

        self._clear()

    async def n_steps(self, seconds: float) -> int:
        """How many steps take so long when nothing else is done."""
        since, n_steps = time.perf_counter(), 0
        while time.perf_counter() - since < LOOK_S:
            await self._advance()
            n_steps += 1

        return max(1, round(n_steps * seconds / (time.perf_counter() - since)))

    async def train(self, n_steps: int, saver: Saver | None, every_s: float) -> tuple[float, float]:
        """Return the seconds, and the processor seconds, of the steps and of the saves among them."""
        await to_thread.run_sync(caches.settle)
        since, cpu_since, due_s = time.perf_counter(), time.process_time(), every_s / 2
        for _ in range(n_steps):
            await self._advance()
            if saver is not None and time.perf_counter() - since >= due_s:
                await saver.finish()
                await saver.begin(self._next_path(), self._state)
                due_s += every_s

        taken = time.perf_counter() - since, time.process_time() - cpu_since
        if saver is not None:
            await saver.finish()

        self._clear()
        return taken

    async def _advance(self) -> None:
        self._at = await to_thread.run_sync(lambda: ready(self._step(self._at)))

    def _next_path(self) -> Path:
        self._n_saved += 1
        return self._folder / f"step_{self._n_saved}"

    def _clear(self) -> None:
        for path in self._folder.glob("step_*"):
            shutil.rmtree(path)


def _step(at: jax.Array) -> jax.Array:
    for _ in range(LAYERS):
        at = jnp.tanh(at @ at)

    return at


def _note(results: Results, workload: Workload, operation: Operation, label: str) -> Note:
    found = slow_downs(results, workload.name, operation, label)
    bounds, middle = interval(found), median(found)
    within = "" if bounds is None else f", within {bounds[0]:+.1%} to {bounds[1]:+.1%} (95 %)"
    text = f"{operation}: {middle or 0:+.1%}, the median of {len(found)} pairs{within}"
    return Note(workload.name, label, text)


def _say(workload: Workload, text: str) -> None:
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {workload.name}: {text}\n")
    sys.stderr.flush()
