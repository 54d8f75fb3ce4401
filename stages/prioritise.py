"""Moves prioritised leaves to the front. Serves both pipelines."""

from __future__ import annotations

__all__ = ("Prioritise",)

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar, final

from penstock.kernel.messages.restore import PlannedBatch
from penstock.kernel.messages.save import LeafBatch
from penstock.kernel.pipeline.run_context import Run
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.kernel.protocols.leaf import KeyPath, ParamInfo
from penstock.stages.messages.batching import infos_of, part_of
from penstock.stages.planning.key_patterns import pattern_fits

Batch = TypeVar("Batch", LeafBatch, PlannedBatch)


@final
@dataclass(frozen=True, slots=True)
class Prioritise:
    """Reorders leaves: the prioritised ones first. Within both groups the order is kept.

    With nothing to prioritise it passes batches on as they come, and the driver leaves it out. Otherwise it
    holds back every leaf until it has seen the last one; a held leaf costs no host bytes.

    Attributes:
        first: Says whether the leaf at a key path, such as `("opt", "0", "mu")`, goes first; or
            shell patterns over the dotted name (`["params.*"]`), which a config file can hold.
    """

    messages: ClassVar[Messages] = {
        LeafBatch: LeafBatch,
        PlannedBatch: PlannedBatch,
    }
    advice: ClassVar[Advice] = Advice(
        "It looks at every leaf: leave `prioritise` empty if the order does not matter.",
    )

    first: Callable[[KeyPath], bool] | tuple[str, ...] = ()

    @property
    def passes_on(self) -> bool:
        """True if nothing is to be prioritised."""
        return not self.first

    @asynccontextmanager
    async def open(self, run: Run, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one run."""
        yield _Prioritiser(self._is_first, run) if self.first else _pass_on

    def _is_first(self, info: ParamInfo) -> bool:
        if callable(self.first):
            return bool(self.first(info.keys))

        return any(pattern_fits(pattern, info.name, info.keys, below=False) for pattern in self.first)


async def _pass_on(batch: Batch, /) -> Batch:
    return batch


@final
class _Prioritiser(Generic[Batch]):
    __slots__ = ("_batches", "_is_first", "_run")

    def __init__(self, is_first: Callable[[ParamInfo], bool], run: Run) -> None:
        self._is_first = is_first
        self._run = run
        self._batches: list[Batch] = []

    async def __call__(self, batch: Batch, /) -> None:
        self._batches.append(batch)

    async def finish(self) -> AsyncIterator[Batch]:
        batches, self._batches = self._batches, []
        if batches and not any(len(batch.leaves) for batch in batches):
            yield batches[0]  # it brings the plan
            return

        divided = await self._run.threads.run(self._divided, batches)
        divided.reverse()
        while divided:
            yield divided.pop()  # and hold it no longer: the leaves belong to the next stage

    def _divided(self, batches: list[Batch]) -> list[Batch]:
        """Divide batches into those that go first and all others. Empties the list that it is given."""
        first: list[Batch] = []
        rest: list[Batch] = []
        batches.reverse()
        while batches:
            batch = batches.pop()
            is_first = list(map(self._is_first, infos_of(batch.leaves)))
            if batch.handler is not None and any(is_first):
                is_first = [True] * len(is_first)  # one call of the handler
            for chosen, prioritised in ((first, True), (rest, False)):
                numbers = [at for at, one in enumerate(is_first) if one is prioritised]
                if numbers:
                    leaves = part_of(batch.leaves, numbers)
                    chosen.append(replace(batch, leaves=leaves, prioritised=prioritised))

        return first + rest
