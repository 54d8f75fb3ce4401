"""One workload, timed: rounds, and in each round every operation of every contender in turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, final

import anyio
from anyio import to_thread
from tests.bench.checking import WrongBytesError, check
from tests.bench.contenders.penstock import Penstock
from tests.bench.contenders.protocol import Blocking, Contender, InLoop, InThread, Saved
from tests.bench.loops import ASYNCIO
from tests.bench.profiles import restore_profile
from tests.bench.results import IDLE, Note, Operation, Profile, Results, Sample, Size, Stall
from tests.bench.setting import Setting, bytes_not_shared, io_bytes
from tests.bench.stalls import beating, noise_floor
from tests.bench.trees import State
from tests.bench.workloads import Workload

STEADY_ROUNDS = 10
STALL_ROUNDS = 3
DROPPED_AFTER_S = 0.05
ALL = (Operation.SAVE, Operation.RESTORE_JAX, Operation.RESTORE_NUMPY, Operation.METADATA)
WATCHED = {"penstock": ALL, "Orbax": ALL, "Orbax async": ALL, "safetensors": ALL}
WATCHED_IF_SLOW = {"Orbax": (Operation.RESTORE_JAX,), "Orbax async": (Operation.SAVE,)}
PROFILED = (Operation.RESTORE_JAX, Operation.RESTORE_NUMPY, Operation.COLD_NUMPY)
Act: TypeAlias = Callable[[Contender, Operation], Awaitable[None]]


async def measure(
    workload: Workload,
    state: State,
    rounds: int,
    folder: Path,
    ours: list[Penstock],
    others: list[Blocking],
) -> Results:
    """Measure everything of one workload but memory; leave the checkpoints in `folder`."""
    contenders: list[Contender] = [*ours, *(InThread(blocking) for blocking in others)]
    bench = _Bench(workload, Setting(state, folder), rounds)
    async with AsyncExitStack() as stack:
        for contender in contenders:
            await stack.enter_async_context(contender.running())

        await bench.warm_up(contenders)
        for number in range(rounds):
            await bench.round(number, contenders)

        if workload.stalls:
            await bench.watch([InLoop(blocking) for blocking in others])

        await bench.steady(ours[0])
        await bench.profile(ours[0])

    return bench.results


async def measure_stalls(workload: Workload, state: State, rounds: int, folder: Path, loop: str) -> Results:
    """Measure how long the event loop that this runs in, called `loop`, stands still beside penstock."""
    contender = Penstock(ready_in_loop=False)
    bench = _Bench(workload, Setting(state, folder), rounds)
    async with contender.running():
        await bench.warm_up([contender])
        await bench.watch([contender], loop)

    return bench.results


@final
class _Bench:
    def __init__(self, workload: Workload, setting: Setting, rounds: int) -> None:
        self._workload, self._setting, self._rounds = workload, setting, rounds
        self._void: set[str] = set()
        self.results = Results()
        state = setting.state
        self.results.sizes.append(Size(workload.name, workload.title, len(state.leaves), state.nbytes))
        for label, reason in workload.skipped.items():
            self._note(label, reason)

    async def warm_up(self, contenders: Sequence[Contender]) -> None:
        """Have everybody save once, untimed."""

        async def act(contender: Contender, operation: Operation) -> None:
            await self._setting.warm_up(contender)

        for contender in contenders:
            if self._takes_part(contender, Operation.SAVE, 0):
                await self._guarded(contender, Operation.SAVE, act)

    async def round(self, number: int, contenders: Sequence[Contender]) -> None:
        """Every operation, and for each operation every contender, each round beginning with another one."""
        first = number % len(contenders)
        for operation in self._workload.operations:
            if operation is Operation.STEADY:
                continue

            for contender in (*contenders[first:], *contenders[:first]):
                if self._takes_part(contender, operation, number):
                    self._say(f"round {number + 1}: {contender.label}: {operation}")
                    await self._guarded(contender, operation, partial(self._measure, number))

    async def watch(self, contenders: Sequence[Contender], loop: str = ASYNCIO) -> None:
        """The same once more with a heartbeat in the loop; apart, since watching costs a little, too."""
        async with beating() as heartbeat:

            async def act(contender: Contender, operation: Operation) -> None:
                await to_thread.run_sync(self._setting.prepare, contender, operation)
                heartbeat.reset()
                kept = await self._setting.perform(contender, operation)
                self._stalled(contender, operation, heartbeat.worst_s(), loop)
                await anyio.sleep(DROPPED_AFTER_S)
                del kept  # what it costs to drop a tree is its owner's affair
                await to_thread.run_sync(self._setting.finish, contender, operation)

            for contender in contenders:
                operations = self._watched(contender)
                slow = contender.label in self._workload.fewer
                for _ in range((1 if slow else min(self._rounds, STALL_ROUNDS)) if operations else 0):
                    self._stalled(contender, IDLE, await noise_floor(heartbeat), loop)
                    for operation in operations:
                        self._say(f"stalls: {contender.label} on {loop}: {operation}")
                        await self._guarded(contender, operation, act)

    async def steady(self, contender: Contender) -> None:
        """Save again and again."""
        if Operation.STEADY in self._workload.operations:
            for number in range(STEADY_ROUNDS):
                self._say(f"{Operation.STEADY}: {number + 1}")
                await self._guarded(contender, Operation.STEADY, partial(self._measure, number))

    async def profile(self, contender: Contender) -> None:
        """Take one restore of each kind apart by stages."""

        async def act(contender: Contender, operation: Operation) -> None:
            await to_thread.run_sync(self._setting.prepare, contender, operation)
            target = self._setting.target(operation)
            taken = await restore_profile(self._setting.place(contender, operation), target.tree)
            self.results.profiles.append(Profile(self._workload.name, operation, *taken))

        for operation in PROFILED:
            if operation in self._workload.operations:
                await self._guarded(contender, operation, act)

    def _stalled(self, contender: Contender, operation: str, seconds: float, loop: str) -> None:
        stall = Stall(self._workload.name, contender.label, operation, seconds, loop)
        self.results.stalls.append(stall)

    def _watched(self, contender: Contender) -> list[Operation]:
        """What is worth its time: whoever blocks the loop for seconds does so in every operation."""
        slow = contender.label in self._workload.fewer
        return [
            operation
            for operation in self._workload.operations
            if operation in WATCHED.get(contender.label, ())
            and (not slow or operation in WATCHED_IF_SLOW[contender.label])
            and self._takes_part(contender, operation, 0)
        ]

    def _takes_part(self, contender: Contender, operation: Operation, number: int) -> bool:
        return (
            operation in contender.operations
            and contender.label not in self._workload.skipped
            and contender.label not in self._void
            and number < self._workload.fewer.get(contender.label, number + 1)
        )

    async def _guarded(self, contender: Contender, operation: Operation, act: Act) -> None:
        """Carry it out; whoever fails once is out, and that is told."""
        try:
            await act(contender, operation)
        except Exception as error:
            self._void.add(contender.label)
            if isinstance(error, WrongBytesError):  # then nothing that was measured of it counts
                self.results.samples = [s for s in self.results.samples if s.contender != contender.label]

            text = f"{operation}: {type(error).__name__}: {' '.join(str(error).split())}"
            self._note(contender.label, text[:300], failed=True)

    async def _measure(self, number: int, contender: Contender, operation: Operation) -> None:
        if not await to_thread.run_sync(self._setting.prepare, contender, operation):
            self._note(contender.label, f"{operation}: the page cache cannot be dropped here")
            return

        written = io_bytes()
        since, cpu_since = time.perf_counter(), time.process_time()
        value = await self._setting.perform(contender, operation)
        seconds, cpu_s = time.perf_counter() - since, time.process_time() - cpu_since
        sample = Sample(self._workload.name, contender.label, operation, number, seconds, cpu_s=cpu_s)
        if isinstance(value, Saved):
            sample = self._saved(sample, contender, operation, value, written)
        elif operation is not Operation.METADATA:
            self._check(contender, operation, value)

        del value
        self.results.samples.append(sample)
        await to_thread.run_sync(self._setting.finish, contender, operation)

    def _saved(
        self, sample: Sample, contender: Contender, operation: Operation, saved: Saved, before: int | None
    ) -> Sample:
        after = io_bytes()
        path = self._setting.place(contender, operation)
        first = self._setting.place(contender, Operation.SAVE)
        if saved.stages and contender.label == "penstock":
            profile = Profile(sample.workload, operation, sample.seconds, saved.stages)
            others = [p for p in self.results.profiles if p.operation != operation]
            self.results.profiles = [*others, profile]  # the last one stands for all

        return replace(
            sample,
            staged_s=saved.staged_s,
            nbytes_written=bytes_not_shared(path, first if path != first else None),
            io_bytes=after - before if after is not None and before is not None else None,
        )

    def _check(self, contender: Contender, operation: Operation, restored: object) -> None:
        """Once of each contender and operation, beyond the timing."""
        key = (self._workload.name, contender.label, str(operation))
        if key not in self.results.checked:
            state = self._setting.state
            check(contender.leaves(restored, state), state, self._setting.target(operation), contender.label)
            self.results.checked.append(key)

    def _note(self, label: str, text: str, *, failed: bool = False) -> None:
        """Keep it with the results, once, and tell it now."""
        note = Note(self._workload.name, label, text, failed)
        if note not in self.results.notes:
            self.results.notes.append(note)
            self._say(f"{label}: {text}")

    def _say(self, text: str) -> None:
        sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {self._workload.name}: {text}\n")
        sys.stderr.flush()
