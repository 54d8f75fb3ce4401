"""penstock through its public API."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, final

import jax
from tests.bench.contenders.protocol import Saved
from tests.bench.results import Operation, StageTime
from tests.bench.trees import State, ready

import penstock
from penstock import HandlerRegistry
from penstock.handlers import ArrayHandler, default_handlers
from penstock.kernel import StageStatistics
from penstock.pipelines import restore_pipeline, save_pipeline

ALL = frozenset(Operation)
WARM = frozenset({Operation.RESTORE_JAX, Operation.RESTORE_NUMPY})


@final
class Penstock:
    """Saves with one Checkpointer again and again, unless it is to be a fresh one each time."""

    checkpoint = "penstock"

    def __init__(
        self,
        label: str = "penstock",
        operations: frozenset[Operation] = ALL,
        *,
        fresh: bool = False,
        one_shot: bool = False,
        verify: bool = True,
        copied: bool = False,
        ready_in_loop: bool = True,
    ) -> None:
        self.label = label
        self.operations = operations
        self._fresh = fresh
        self._one_shot = one_shot
        self._ready_in_loop = ready_in_loop
        self._options: dict[str, Any] = {}
        if not verify:
            self._options["pipeline"] = restore_pipeline().configure("read", verify=False)
        if fresh or copied:
            self.checkpoint = label

        self._registry = _copying() if copied else None

        self._checkpointer: penstock.Checkpointer | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        async with penstock.Checkpointer(registry=self._registry) as self._checkpointer:
            yield

    async def save(self, path: Path, state: State, base: Path | None = None) -> Saved:
        if self._fresh:
            async with penstock.Checkpointer() as checkpointer:
                return await self._save(checkpointer, path, state, base)

        assert self._checkpointer is not None
        return await self._save(self._checkpointer, path, state, base)

    async def restore(self, path: Path, target: State) -> Any:
        assert self._checkpointer is not None
        restore: Any = penstock.restore if self._one_shot else self._checkpointer.restore
        restored = await restore(path, like=target.tree, **self._options)
        # Beside a heartbeat the wait for 10,000 jax.Arrays would be its caller's stall, and not penstock's.
        return ready(restored) if self._ready_in_loop else restored

    async def metadata(self, path: Path) -> object:
        assert self._checkpointer is not None
        return await self._checkpointer.metadata(path)

    def leaves(self, restored: Any, state: State) -> Iterator[Any]:
        return iter(jax.tree.leaves(restored))

    async def _save(
        self, checkpointer: penstock.Checkpointer, path: Path, state: State, base: Path | None
    ) -> Saved:
        since = time.perf_counter()
        saving = await checkpointer.save(path, state.tree, base=base)
        staged_s = time.perf_counter() - since
        report = await saving
        return Saved(staged_s, stage_times(report.stages))


def stage_times(stages: tuple[StageStatistics, ...]) -> tuple[StageTime, ...]:
    return tuple(StageTime(s.name, s.busy_s, s.starved_s, s.blocked_s, s.memory_wait_s) for s in stages)


def n_threads(pipeline: str = "save") -> int:
    """Threads with which penstock writes or reads, by default; 2 if its stage does not say."""
    stage: Any = save_pipeline()["write"] if pipeline == "save" else restore_pipeline()["read"]
    return int(getattr(stage, "concurrency", 2))


def variants(*, all_ways: bool = False) -> list[Penstock]:
    """It, its first save of a structure, and its restores by one-shot calls and without verification.

    Args:
        all_ways: Whether there is one, too, for which memory of CPU devices is that of an accelerator.
    """
    copied = Penstock("penstock, copied", frozenset({Operation.SAVE, Operation.RESTORE_JAX}), copied=True)
    return [
        Penstock(),
        Penstock("penstock, first save", frozenset({Operation.SAVE}), fresh=True),
        Penstock("penstock, one-shot", WARM, one_shot=True),
        Penstock("penstock, unverified", WARM, verify=False),
        *([copied] if all_ways else []),
    ]


def _copying() -> HandlerRegistry:
    """Handlers that copy from and to CPU devices, as they do with any other."""
    registry = default_handlers()
    for type_ in (jax.Array, jax.ShapeDtypeStruct):
        registry.register(type_, ArrayHandler(alias_host=False), override=True)

    return registry
