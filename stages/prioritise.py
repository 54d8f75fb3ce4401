"""Moves prioritised leaves to the front. Serves both pipelines."""

from __future__ import annotations

__all__ = ("Prioritise",)

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from penstock.kernel.messages.packs import ReadLeaf, ReadPack
from penstock.kernel.messages.save import Leaf, LeafBatch
from penstock.kernel.pipeline.run_context import Run
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.kernel.protocols.leaf import KeyPath, ParamInfo
from penstock.stages.messages.batching import batched
from penstock.stages.planning.key_patterns import pattern_fits


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
        LeafBatch[Leaf]: LeafBatch[Leaf],
        LeafBatch[ReadLeaf]: LeafBatch[ReadLeaf],
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


async def _pass_on(batch: LeafBatch[Any], /) -> LeafBatch[Any]:
    return batch


@final
class _Prioritiser:
    __slots__ = ("_is_first", "_leaves", "_owned", "_packs", "_plan", "_run")

    def __init__(self, is_first: Callable[[ParamInfo], bool], run: Run) -> None:
        self._is_first = is_first
        self._run = run
        self._leaves: list[Any] = []
        self._packs: list[ReadPack] = []
        self._owned: list[LeafBatch[Any]] = []
        self._plan: Any = None

    async def __call__(self, batch: LeafBatch[Any], /) -> None:
        self._plan = batch.plan
        if batch.handler is not None:  # one call of the handler: all of it goes first if one leaf does
            first = any(self._is_first(leaf.info) for leaf in batch.leaves)
            self._owned.append(replace(batch, prioritised=first))
        elif isinstance(batch.leaves, ReadPack):
            self._packs.append(batch.leaves)
        else:
            self._leaves.extend(batch.leaves)

    async def finish(self) -> AsyncIterator[LeafBatch[Any]]:
        leaves, self._leaves = self._leaves, []
        packs, self._packs = self._packs, []
        plan = self._plan
        if not leaves and not packs and not self._owned and plan is not None:
            yield LeafBatch((), plan=plan)

        first_packs, other_packs = await self._run.threads.run(_partition_packs, packs, self._is_first)
        first, rest = await self._run.threads.run(_partition, leaves, self._is_first)
        del leaves
        for batch in self._take_owned(prioritised=True):
            yield batch
            del batch  # the leaves belong to whoever comes next

        for pack in first_packs:
            yield LeafBatch(pack, prioritised=True, plan=plan)

        for batch in batched(first, self._run.limits, prioritised=True, plan=plan):
            yield batch
            del batch  # the leaves belong to whoever comes next

        for batch in self._take_owned(prioritised=False):
            yield batch
            del batch

        for pack in other_packs:
            yield LeafBatch(pack, plan=plan)

        for batch in batched(rest, self._run.limits, plan=plan):
            yield batch
            del batch

    def _take_owned(self, *, prioritised: bool) -> Iterator[LeafBatch[Any]]:
        chosen = [batch for batch in self._owned if batch.prioritised is prioritised]
        self._owned = [batch for batch in self._owned if batch.prioritised is not prioritised]
        chosen.reverse()
        while chosen:
            yield chosen.pop()


def _partition(leaves: list[Any], is_first: Callable[[ParamInfo], bool]) -> tuple[list[Any], list[Any]]:
    first: list[Any] = []
    rest: list[Any] = []
    for leaf in leaves:
        (first if is_first(leaf.info) else rest).append(leaf)

    return first, rest


def _partition_packs(
    packs: list[ReadPack], is_first: Callable[[ParamInfo], bool]
) -> tuple[list[ReadPack], list[ReadPack]]:
    first: list[ReadPack] = []
    rest: list[ReadPack] = []
    for pack in packs:
        chosen = [is_first(pack.info(index)) for index in pack.indices]
        parts = [
            pack.part([number for number, is_chosen in enumerate(chosen) if is_chosen is wanted])
            for wanted in (True, False)
        ]
        first.append(parts[0])
        rest.append(parts[1])

    return [pack for pack in first if len(pack)], [pack for pack in rest if len(pack)]
