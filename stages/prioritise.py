"""What must be staged or restored first goes first. Serves both pipelines."""

from __future__ import annotations

__all__ = ("Prioritise",)

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, final

from penstock.kernel.messages import KeyPath, LeafBatch
from penstock.kernel.run import Run
from penstock.kernel.stage import Actor
from penstock.stages.batching import batched


@final
@dataclass(frozen=True, slots=True)
class Prioritise:
    """Reorders leaves: the prioritised, in their order, then the others, in theirs.

    With nothing to prioritise it passes batches on as they come. Otherwise it holds back every leaf
    until it has seen the last one; a held leaf costs no host bytes.

    Attributes:
        first: Says whether the leaf at a key path, such as `("opt", "0", "mu")`, goes first; or
            shell patterns over the dotted name (`["params.*"]`), which a config file can hold.
    """

    first: Callable[[KeyPath], bool] | tuple[str, ...] = ()

    @property
    def concurrency(self) -> int:
        """One: order is its whole purpose."""
        return 1

    @asynccontextmanager
    async def open(self, run: Run, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one run."""
        yield _Prioritiser(self._is_first, run) if self.first else _pass_on

    def _is_first(self, leaf: Any) -> bool:
        if callable(self.first):
            return bool(self.first(leaf.info.keys))

        name = leaf.info.name
        return any(fnmatchcase(name, pattern) for pattern in self.first)


async def _pass_on(batch: LeafBatch[Any], /) -> LeafBatch[Any]:
    return batch


@final
class _Prioritiser:
    __slots__ = ("_is_first", "_leaves", "_run")

    def __init__(self, is_first: Callable[[Any], bool], run: Run) -> None:
        self._is_first = is_first
        self._run = run
        self._leaves: list[Any] = []

    async def __call__(self, batch: LeafBatch[Any], /) -> None:
        self._leaves.extend(batch.leaves)

    async def finish(self) -> AsyncIterator[LeafBatch[Any]]:
        leaves, self._leaves = self._leaves, []
        first, rest = await self._run.threads.run(_partition, leaves, self._is_first)
        del leaves
        for batch in batched(first, self._run.limits, prioritised=True):
            yield batch
            del batch  # the leaves belong to whoever comes next

        for batch in batched(rest, self._run.limits):
            yield batch
            del batch


def _partition(leaves: list[Any], is_first: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    first: list[Any] = []
    rest: list[Any] = []
    for leaf in leaves:
        (first if is_first(leaf) else rest).append(leaf)

    return first, rest
