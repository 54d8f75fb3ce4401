"""Computes the leaves of a result that the caller's functions make from stored values."""

from __future__ import annotations

__all__ = ("Derive",)

from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, final

from penstock.kernel.errors import IncompletePipelineError, StructureMismatchError, TreeDifference
from penstock.kernel.messages.restore import ComputedLeaf, RestoredBatch, RestorePlan
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.stages.messages.batching import require_plan


@final
@dataclass(frozen=True, slots=True)
class Derive:
    """Takes `RestoredBatch`es, yields them with the values that functions made in place of their inputs.

    A function is called in a worker thread as soon as its last input has arrived. An input is released once
    the last function that needs it has been called. Values kept from the target are added at the end.

    Raises:
        HandlerFailedError: If a function raises.
        StructureMismatchError: If a value that a function made does not fit the target; it lists them all.
        IncompletePipelineError: If an input did not arrive.
        PipelineError: If no batch brought the plan.
    """

    messages: ClassVar[Messages] = {RestoredBatch: RestoredBatch}
    advice: ClassVar[Advice] = Advice(
        "Your own `transforms` take that long.",
    )

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore."""
        yield _Deriver(run)


@final
class _Deriver:
    def __init__(self, run: RestoreRun) -> None:
        self._run = run
        self._plan: RestorePlan | None = None
        self._inputs: dict[int, Any] = {}
        self._users: Counter[int] = Counter()  #: functions that still need an input
        self._waiting: defaultdict[int, list[ComputedLeaf]] = defaultdict(list)  #: by each absent input
        self._absent: dict[int, int] = {}  #: by the made leaf: how many inputs are still missing
        self._differences: list[TreeDifference] = []

    async def __call__(self, batch: RestoredBatch, /) -> RestoredBatch | None:
        self._begin(batch.plan)
        values = [pair for pair in batch.values if pair[0] not in self._users]
        ready = self._arrived([pair for pair in batch.values if pair[0] in self._users])
        if ready:
            values += await self._run.threads.run(self._make, ready)

        return RestoredBatch(values, self._plan) if values else None

    async def finish(self) -> AsyncIterator[RestoredBatch]:
        plan = require_plan(self._plan)
        values = list(plan.kept)
        alone = [leaf for leaf in plan.computed if not leaf.inputs]
        if alone:
            values += await self._run.threads.run(self._make, alone)
        if self._absent:
            raise self._incomplete(plan)
        if self._differences:
            raise StructureMismatchError(self._run.path, self._differences)

        yield RestoredBatch(values, plan)

    def _begin(self, plan: RestorePlan | None) -> None:
        """Note, once the plan has arrived, which inputs each function needs."""
        if self._plan is not None:
            return

        self._plan = require_plan(plan)
        for leaf in self._plan.computed:
            inputs = set(leaf.inputs)
            self._users.update(inputs)
            if inputs:
                self._absent[leaf.index] = len(inputs)
            for at in inputs:
                self._waiting[at].append(leaf)

    def _arrived(self, values: Sequence[tuple[int, object]]) -> list[ComputedLeaf]:
        """Keep inputs, and return the leaves that can be made now."""
        ready: list[ComputedLeaf] = []
        for at, value in values:
            self._inputs[at] = value
            for leaf in self._waiting.pop(at, ()):
                self._absent[leaf.index] -= 1
                if not self._absent[leaf.index]:
                    del self._absent[leaf.index]
                    ready.append(leaf)

        return ready

    def _make(self, leaves: Sequence[ComputedLeaf]) -> list[tuple[int, object]]:
        made: list[tuple[int, object]] = []
        for leaf in leaves:
            value = leaf.make([self._inputs[at] for at in leaf.inputs])
            for at in set(leaf.inputs):
                self._users[at] -= 1
                if not self._users[at]:
                    del self._inputs[at]

            if isinstance(value, TreeDifference):
                self._differences.append(value)
            else:
                made.append((leaf.index, value))

        return made

    def _incomplete(self, plan: RestorePlan) -> IncompletePipelineError:
        total, first = len(plan.computed), next(iter(self._absent))
        return IncompletePipelineError(total, total - len(self._absent), plan.infos[first].key_path)
