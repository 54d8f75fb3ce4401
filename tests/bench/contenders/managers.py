"""What opens a directory of steps: penstock's manager, Orbax's, and the system calls alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, final

from anyio import to_thread
from tests.bench.results import Operation

import penstock

METRIC = "loss"


class Answer(NamedTuple):
    """What was said, to be checked, and how long it took."""

    operation: Operation
    seconds: float
    said: object


class StepsContender(Protocol):
    """A way to know the steps of a directory. Closing it is not timed."""

    label: str

    async def look(self, root: Path) -> list[Answer]:
        """Open it, ask for the latest step and for all of them."""
        ...

    async def find_best(self, root: Path) -> list[Answer]:
        """Open it and ask for the best step, all in one: some read the metrics early, and some late."""
        ...


@final
class PenstockManager:
    """The manager with its defaults."""

    label = "penstock"

    async def look(self, root: Path) -> list[Answer]:
        begun = time.perf_counter()
        async with penstock.CheckpointManager(root) as manager:
            opened = Answer(Operation.OPEN, time.perf_counter() - begun, None)
            return [opened, *_asked(manager.latest_step, manager.all_steps)]

    async def find_best(self, root: Path) -> list[Answer]:
        begun = time.perf_counter()
        async with penstock.CheckpointManager(root, metric=METRIC) as manager:
            best = await manager.best_step()
            return [Answer(Operation.BEST, time.perf_counter() - begun, best)]


@final
class OrbaxManager:
    """The manager with its defaults; told of the metric only to find the best step."""

    label = "Orbax"

    async def look(self, root: Path) -> list[Answer]:
        return await to_thread.run_sync(self._look, root)

    async def find_best(self, root: Path) -> list[Answer]:
        return await to_thread.run_sync(self._find_best, root)

    def _look(self, root: Path) -> list[Answer]:
        import orbax.checkpoint as ocp

        begun = time.perf_counter()
        manager = ocp.CheckpointManager(root)
        opened = Answer(Operation.OPEN, time.perf_counter() - begun, None)
        try:
            return [opened, *_asked(manager.latest_step, manager.all_steps)]
        finally:
            manager.close()

    def _find_best(self, root: Path) -> list[Answer]:
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics[METRIC], best_mode="min")
        begun = time.perf_counter()
        manager = ocp.CheckpointManager(root, options=options)
        try:
            best = manager.best_step()
            return [Answer(Operation.BEST, time.perf_counter() - begun, best)]
        finally:
            manager.close()


@final
class Scandir:
    """One `os.scandir`, and for the best step a file of each: the least that can be done."""

    label = "raw scandir"

    async def look(self, root: Path) -> list[Answer]:
        return await to_thread.run_sync(self._look, root)

    async def find_best(self, root: Path) -> list[Answer]:
        return await to_thread.run_sync(self._find_best, root)

    def _look(self, root: Path) -> list[Answer]:
        begun = time.perf_counter()
        steps = self._steps(root)
        opened = Answer(Operation.OPEN, time.perf_counter() - begun, None)
        return [opened, *_asked(lambda: max(steps), lambda: sorted(steps))]

    def _find_best(self, root: Path) -> list[Answer]:
        begun = time.perf_counter()
        found: list[tuple[float, int]] = []
        for step in self._steps(root):
            try:
                with open(f"{root}/{step}/metrics/metrics", "rb") as file:
                    found.append((json.load(file)[METRIC], step))
            except FileNotFoundError:
                continue

        return [Answer(Operation.BEST, time.perf_counter() - begun, min(found)[1])]

    @staticmethod
    def _steps(root: Path) -> list[int]:
        with os.scandir(root) as entries:
            return [int(entry.name) for entry in entries if entry.name.isdigit() and entry.is_dir()]


def _asked(latest: Callable[[], object], all_steps: Callable[[], object]) -> list[Answer]:
    begun = time.perf_counter()
    last = latest()
    between = time.perf_counter()
    steps = all_steps()
    ended = time.perf_counter()
    return [
        Answer(Operation.LATEST, between - begun, last),
        Answer(Operation.ALL_STEPS, ended - between, steps),
    ]


def everybody(*, with_orbax: bool = True) -> list[StepsContender]:
    found: list[StepsContender] = [PenstockManager(), Scandir()]
    return [*found, OrbaxManager()] if with_orbax else found
