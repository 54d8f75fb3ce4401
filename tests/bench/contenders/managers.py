"""What opens a directory of steps: penstock's manager, Orbax's, and the system calls alone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

from anyio import to_thread
from tests.bench.results import Operation

import penstock

METRIC = "loss"
AFTER_OPENING = frozenset({Operation.LATEST, Operation.ALL_STEPS})


class Answered(NamedTuple):
    """How long it took, and what was said, to be checked."""

    seconds: float
    answer: object


class StepsContender(Protocol):
    """A way to know the steps of a directory. Each operation opens it anew, and closes it untimed."""

    label: str

    async def measure(self, root: Path, operation: Operation) -> Answered: ...


@final
class PenstockManager:
    """The manager with its defaults."""

    label = "penstock"

    async def measure(self, root: Path, operation: Operation) -> Answered:
        since = time.perf_counter()
        async with penstock.CheckpointManager(root, metric=METRIC) as manager:
            opened = time.perf_counter()
            answer: object = None
            if operation is Operation.LATEST:
                answer = manager.latest_step()
            elif operation is Operation.ALL_STEPS:
                answer = manager.all_steps()
            elif operation is Operation.BEST:
                answer = await manager.best_step()

            return _answered(since, opened, operation, answer)


@final
class OrbaxManager:
    """The manager with its defaults; told of the metric only to find the best step."""

    label = "Orbax"

    async def measure(self, root: Path, operation: Operation) -> Answered:
        return await to_thread.run_sync(self._measure, root, operation)

    def _measure(self, root: Path, operation: Operation) -> Answered:
        import orbax.checkpoint as ocp

        given: dict[str, Any] = {}
        if operation is Operation.BEST:
            given["best_fn"], given["best_mode"] = (lambda metrics: metrics[METRIC]), "min"

        since = time.perf_counter()
        manager = ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**given))
        try:
            opened = time.perf_counter()
            answer: object = None
            if operation is Operation.LATEST:
                answer = manager.latest_step()
            elif operation is Operation.ALL_STEPS:
                answer = manager.all_steps()
            elif operation is Operation.BEST:
                answer = manager.best_step()

            return _answered(since, opened, operation, answer)
        finally:
            manager.close()


@final
class Scandir:
    """One `os.scandir`, and for the best step a file of each: the least that can be done."""

    label = "raw scandir"

    async def measure(self, root: Path, operation: Operation) -> Answered:
        return await to_thread.run_sync(self._measure, root, operation)

    def _measure(self, root: Path, operation: Operation) -> Answered:
        since = time.perf_counter()
        with os.scandir(root) as entries:
            steps = [int(entry.name) for entry in entries if entry.name.isdigit() and entry.is_dir()]

        opened = time.perf_counter()
        answer: object = None
        if operation is Operation.LATEST:
            answer = max(steps)
        elif operation is Operation.ALL_STEPS:
            answer = sorted(steps)
        elif operation is Operation.BEST:
            answer = self._best(root, steps)

        return _answered(since, opened, operation, answer)

    @staticmethod
    def _best(root: Path, steps: list[int]) -> int:
        found: list[tuple[float, int]] = []
        for step in steps:
            try:
                with open(f"{root}/{step}/metrics/metrics", "rb") as file:
                    found.append((json.load(file)[METRIC], step))
            except FileNotFoundError:
                continue

        return min(found)[1]


def _answered(since: float, opened: float, operation: Operation, answer: object) -> Answered:
    """To be called at once: until then it took."""
    ended = opened if operation is Operation.OPEN else time.perf_counter()
    return Answered(ended - (opened if operation in AFTER_OPENING else since), answer)


def everybody(*, with_orbax: bool = True) -> list[StepsContender]:
    found: list[StepsContender] = [PenstockManager(), Scandir()]
    return [*found, OrbaxManager()] if with_orbax else found
