"""The first calls of a process: a fresh one for each way of using penstock, on each event loop.

Each builds the tree, begins a heartbeat, and then saves and restores: by the one-shot functions at first, and
again and again in a Checkpointer. The variants differ in what else lies in memory and in whether `warm_up`
was awaited.
`import penstock` stands at the top, as in any program, and nothing else of penstock was used.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import anyio
from anyio import to_thread
from tests.bench import trees
from tests.bench.loops import run_on
from tests.bench.results import IDLE, Note, Operation, Results, Sample, Size, Stall
from tests.bench.stalls import Heartbeat, beating, noise_floor
from tests.bench.workloads import BY_NAME

import penstock

N_OBJECTS: Final = 400_000
SETTLED_S: Final = 0.02


@dataclass(frozen=True)
class Variant:
    """A way to come to the first call, by its label."""

    label: str

    @property
    def large_heap(self) -> bool:
        return "large heap" in self.label

    @property
    def warmed_up(self) -> bool:
        return "warmed up" in self.label


class Thing:
    """An object of a large program: in cycles, with a dict and a list."""

    def __init__(self, before: Thing | None) -> None:
        self.before = before
        self.after: list[Thing] = []
        self.about = {"number": id(before)}
        if before is not None:
            before.after.append(self)


def large_heap() -> list[Thing]:
    """Some million containers, which a full collection takes a tenth of a second or more to walk."""
    things = [Thing(None)]
    for _ in range(N_OBJECTS):
        things.append(Thing(things[-1]))

    gc.collect()
    return things


@final
class Course:
    """What one process does, and what it cost."""

    def __init__(self, workload: str, variant: Variant, loop: str, heartbeat: Heartbeat) -> None:
        self._workload, self._variant, self._loop, self._heartbeat = workload, variant, loop, heartbeat
        self.results = Results()

    async def run(self, state: trees.State, folder: Path, rounds: int) -> None:
        """The first calls, and then repeated ones."""
        target = trees.into_jax(state).tree
        self._stalled(IDLE, await noise_floor(self._heartbeat))
        if self._variant.warmed_up:
            await self._timed(Operation.WARM_UP, 0, penstock.warm_up)

        first = folder / "first"

        async def first_save() -> None:
            await penstock.save(first, state.tree)  # to look the name up is a part of the call

        async def first_restore() -> Any:
            return await penstock.restore(first, like=target)

        await self._timed(Operation.FIRST_SAVE, 0, first_save)
        await self._timed(Operation.FIRST_RESTORE, 0, first_restore)
        async with penstock.Checkpointer() as checkpointer:

            async def save(path: Path) -> None:
                await (await checkpointer.save(path, state.tree))

            for number in range(rounds):
                path = folder / str(number)
                restore = partial(checkpointer.restore, path, like=target)
                await self._timed(Operation.SAVE, number, partial(save, path))
                await self._timed(Operation.RESTORE_JAX, number, restore)
                await self._timed(Operation.METADATA, number, partial(checkpointer.metadata, path))

    async def _timed(self, operation: Operation, number: int, call: Callable[[], Awaitable[Any]]) -> None:
        self._heartbeat.reset()
        since = time.perf_counter()
        kept = [await call()]
        seconds = time.perf_counter() - since
        await anyio.sleep(SETTLED_S)  # the collector may have something to do afterwards
        self._stalled(operation, self._heartbeat.worst_s())
        sample = Sample(self._workload, self._variant.label, operation, number, seconds)
        self.results.samples.append(sample)
        await to_thread.run_sync(kept.clear)

    def _stalled(self, operation: str, seconds: float) -> None:
        stall = Stall(self._workload, self._variant.label, operation, seconds, self._loop)
        self.results.stalls.append(stall)


async def measured(options: dict[str, Any], variant: Variant, state: trees.State) -> Results:
    """One process of one variant, in the loop that runs."""
    workload = BY_NAME[options["workload"]]
    async with beating() as heartbeat:
        course = Course(workload.name, variant, options["loop"], heartbeat)
        try:
            await course.run(state, Path(options["folder"]).resolve(), options["rounds"])
        except Exception as error:
            course.results.notes.append(Note(workload.name, variant.label, repr(error)[:300], failed=True))

    course.results.sizes.append(Size(workload.name, workload.title, len(state.leaves), state.nbytes))
    return course.results


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    variant = Variant(options["variant"])
    state = trees.build(options["workload"], options["scale"])
    kept = large_heap() if variant.large_heap else []
    results = run_on(options["loop"], measured, options, variant, state)
    assert bool(kept) is variant.large_heap
    Path(options["output"]).write_text(json.dumps(results.as_json()))


if __name__ == "__main__":
    main()
