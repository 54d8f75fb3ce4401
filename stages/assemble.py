"""The last stage of a restore: values to a tree."""

from __future__ import annotations

__all__ = ("Assemble",)

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import final

from penstock.kernel.errors import IncompletePipelineError
from penstock.kernel.messages.restore import RestoredBatch, RestoredTree
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor
from penstock.stages.reuse.value_cache import references_to

REMEMBERED_FROM = 64 * 1024  # bytes of a leaf that it may be worth not to write again


@final
@dataclass(frozen=True, slots=True)
class Assemble:
    """Takes `RestoredBatch`es, yields one `RestoredTree` after the last.

    Raises:
        IncompletePipelineError: If a leaf did not arrive.
    """

    @property
    def concurrency(self) -> int:
        """One: it collects."""
        return 1

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore."""
        yield _Assembler(run)


@final
class _Assembler:
    __slots__ = ("_run", "_values")

    def __init__(self, run: RestoreRun) -> None:
        self._run = run
        self._values: dict[int, object] = {}

    async def __call__(self, batch: RestoredBatch, /) -> None:
        self._values.update(batch.values)

    async def finish(self) -> AsyncIterator[RestoredTree]:
        yield RestoredTree(await self._run.threads.run(self._assemble))

    def _assemble(self) -> object:
        outline = self._run.outline
        assert outline is not None, "a planning stage sets the outline"
        total = len(outline.infos)
        absent = [at for at in range(total) if at not in self._values]
        if absent:
            key_path = outline.infos[absent[0]].key_path
            raise IncompletePipelineError(total, total - len(absent), key_path)

        values = [self._values[at] for at in range(total)]
        if not self._run.changes and self._run.recipe is None:  # else values need not be what is stored
            large = [at for at, value in enumerate(values) if getattr(value, "nbytes", 0) >= REMEMBERED_FROM]
            lookup = self._run.registry.lookup
            self._run.references = references_to(
                [(outline.infos[at].name, values[at], lookup(type(values[at]), "")) for at in large]
            )

        return outline.unflatten(values)
