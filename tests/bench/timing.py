"""One workload, timed: rounds, and in each round every operation of every contender in turn."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

from anyio import to_thread
from tests.bench import caches, trees
from tests.bench.checking import WrongBytesError, check
from tests.bench.contenders.penstock import HAS_BASE, Penstock
from tests.bench.contenders.protocol import Blocking, Contender, InLoop, InThread, Saved
from tests.bench.profiles import restore_profile
from tests.bench.results import Note, Operation, Profile, Results, Sample, Size, Stall
from tests.bench.stalls import beating, noise_floor
from tests.bench.trees import State
from tests.bench.workloads import Workload

STEADY_ROUNDS = 10
STALL_ROUNDS = 2
WATCHED = (Operation.SAVE, Operation.RESTORE_JAX, Operation.RESTORE_NUMPY, Operation.METADATA)
NOT_AVAILABLE = "save(base=...) is not available in this version: everything is written again"
WATCHED_LABELS = ("penstock", "Orbax", "Orbax async", "Orbax uncompressed", "safetensors")
HEARTBEAT = "nothing (noise floor)"


async def measure(
    workload: Workload, scale: float, rounds: int, folder: Path, ours: list[Penstock], others: list[Blocking]
) -> Results:
    """Measure everything of one workload but memory; leave the checkpoints in `folder`."""
    state = trees.build(workload.name, scale)
    threaded = [InThread(blocking) for blocking in others]
    contenders: list[Contender] = [*ours, *threaded]
    bench = _Bench(workload, state, folder, rounds)
    async with AsyncExitStack() as stack:
        for contender in contenders:
            await stack.enter_async_context(contender.running())

        await bench.warm_up(contenders)
        for number in range(rounds):
            await bench.round(number, contenders)

        if workload.stalls:
            await bench.watch([*ours, *(InLoop(blocking) for blocking in others)])

        await bench.steady(ours[0])
        await bench.profile(ours[0])

    return bench.results


@final
class _Bench:
    def __init__(self, workload: Workload, state: State, folder: Path, rounds: int) -> None:
        self._workload, self._state, self._folder, self._rounds = workload, state, folder, rounds
        self._void: set[str] = set()
        self._checked: set[tuple[str, Operation]] = set()
        self._targets: dict[Operation, State] = {}
        self._changed: State | None = None
        self.results = Results()
        size = Size(workload.name, workload.title, len(state.leaves), state.nbytes)
        self.results.sizes.append(size)
        for label, reason in workload.skipped.items():
            self._note(label, reason)

        if not HAS_BASE and Operation.SECOND_SAVE in workload.operations:
            self._note("penstock", NOT_AVAILABLE)

    async def warm_up(self, contenders: Sequence[Contender]) -> None:
        """Have everybody work once, untimed: two leaves, and for penstock the tree that it is to know."""
        path = self._folder / "warm-up"
        few = State(dict(zip("ab", self._state.leaves[:2], strict=False)))
        for contender in contenders:
            if contender.label not in self._workload.skipped:
                await self._guarded(contender, Operation.SAVE, partial(self._warm_up, path, few))
                shutil.rmtree(path, ignore_errors=True)

    async def _warm_up(self, path: Path, few: State, contender: Contender, operation: Operation) -> None:
        if operation in contender.operations:
            await contender.save(path, self._state if contender.label == "penstock" else few)

    async def round(self, number: int, contenders: Sequence[Contender]) -> None:
        """Every operation, and for each operation every contender, each round beginning with another one."""
        first = number % len(contenders)
        for operation in self._workload.operations:
            if operation is Operation.STEADY:
                continue

            for contender in (*contenders[first:], *contenders[:first]):
                if self._takes_part(contender, operation, number):
                    say(f"{self._workload.name} round {number + 1}: {contender.label}: {operation}")
                    await self._guarded(contender, operation, partial(self._measure, number))

    async def watch(self, contenders: Sequence[Contender]) -> None:
        """The same once more with a heartbeat in the loop; apart, since watching costs a little, too."""
        async with beating() as heartbeat:
            floor = await noise_floor(heartbeat)
            self.results.stalls.append(Stall(self._workload.name, HEARTBEAT, "", floor))

            async def watched(contender: Contender, operation: Operation) -> None:
                await to_thread.run_sync(self._prepare, contender, operation)
                heartbeat.reset()
                await self._perform(contender, operation)
                stall = Stall(self._workload.name, contender.label, operation, heartbeat.worst_s())
                self.results.stalls.append(stall)

            for contender in contenders:
                if contender.label not in WATCHED_LABELS:
                    continue

                for operation in (op for op in WATCHED if op in self._workload.operations):
                    limit = min(self._rounds, STALL_ROUNDS, self._workload.fewer.get(contender.label, 99))
                    for _ in range(limit if self._takes_part(contender, operation, 0) else 0):
                        say(f"{self._workload.name} stalls: {contender.label}: {operation}")
                        await self._guarded(contender, operation, watched)

    async def steady(self, contender: Contender) -> None:
        """Save again and again."""
        if Operation.STEADY in self._workload.operations:
            for number in range(STEADY_ROUNDS):
                say(f"{self._workload.name}: {Operation.STEADY}: {number + 1}")
                await self._guarded(contender, Operation.STEADY, partial(self._measure, number))

    async def profile(self, contender: Contender) -> None:
        """Take one warm restore of each kind apart by stages."""
        for operation in (Operation.RESTORE_JAX, Operation.RESTORE_NUMPY, Operation.COLD_NUMPY):
            if operation in self._workload.operations:
                await to_thread.run_sync(self._prepare, contender, operation)
                target = self._target(operation)
                found = await restore_profile(self._place(contender, operation), target.tree)
                if found is not None:
                    seconds, stages = found
                    self.results.profiles.append(Profile(self._workload.name, operation, seconds, stages))

    def _takes_part(self, contender: Contender, operation: Operation, number: int) -> bool:
        return (
            operation in contender.operations
            and contender.label not in self._workload.skipped
            and contender.label not in self._void
            and number < self._workload.fewer.get(contender.label, number + 1)
        )

    async def _guarded(self, contender: Contender, operation: Operation, act: Any) -> None:
        """Carry it out; whoever fails once is out, and said so."""
        try:
            await act(contender, operation)
        except Exception as error:
            self._void.add(contender.label)
            if isinstance(error, WrongBytesError):  # then nothing that was measured of it counts
                self.results.samples = [s for s in self.results.samples if s.contender != contender.label]

            self._note(contender.label, f"{operation}: {_one_line(error)}", failed=True)

    async def _measure(self, number: int, contender: Contender, operation: Operation) -> None:
        if not await to_thread.run_sync(self._prepare, contender, operation):
            self._note_once(contender.label, f"{operation}: the page cache cannot be dropped here")
            return

        written = io_bytes()
        since = time.perf_counter()
        value = await self._perform(contender, operation)
        seconds = time.perf_counter() - since
        sample = Sample(self._workload.name, contender.label, operation, number, seconds)
        if isinstance(value, Saved):
            sample = self._saved(sample, contender, operation, value, written)
        elif operation is not Operation.METADATA:
            self._check(contender, operation, value)

        self.results.samples.append(sample)

    def _saved(
        self, sample: Sample, contender: Contender, operation: Operation, saved: Saved, before: int | None
    ) -> Sample:
        path = self._place(contender, operation)
        others = self._place(contender, Operation.SAVE) if operation is Operation.SECOND_SAVE else None
        after = io_bytes()
        if saved.stages and contender.label == contender.checkpoint == "penstock":
            kept = [
                p for p in self.results.profiles if (p.workload, p.operation) != (sample.workload, operation)
            ]
            profile = Profile(sample.workload, operation, sample.seconds, saved.stages)
            self.results.profiles = [*kept, profile]

        return replace(
            sample,
            staged_s=saved.staged_s,
            nbytes_written=bytes_not_shared(path, others),
            io_bytes=after - before if after is not None and before is not None else None,
        )

    def _prepare(self, contender: Contender, operation: Operation) -> bool:
        """Bring disk and caches to the state in which the operation begins; say whether that worked."""
        path = self._place(contender, operation)
        cold = True
        if not operation.reads:
            shutil.rmtree(path, ignore_errors=True)
        elif operation.cold:
            caches.settle()
            cold = caches.drop(path)
        else:
            caches.warm(path)

        self._target(operation)
        caches.settle()
        return cold

    async def _perform(self, contender: Contender, operation: Operation) -> Any:
        path = self._place(contender, operation)
        if operation is Operation.METADATA:
            return await contender.metadata(path)
        if operation is Operation.SECOND_SAVE:
            base = self._place(contender, Operation.SAVE)
            return await contender.save(path, self._target(operation), base)
        if not operation.reads:
            return await contender.save(path, self._state)

        return await contender.restore(path, self._target(operation))

    def _target(self, operation: Operation) -> State:
        """What it saves or restores into; made once."""
        if operation not in self._targets:
            numpy = operation in {Operation.RESTORE_NUMPY, Operation.COLD_NUMPY}
            if numpy:
                made = trees.into_numpy(self._state)
            elif operation is Operation.RESHARD:
                made = trees.onto_four(self._state)
            elif operation is Operation.SECOND_SAVE:
                made = trees.changed(self._state)
            else:
                made = trees.into_jax(self._state) if operation.reads else self._state

            self._targets[operation] = made

        return self._targets[operation]

    def _check(self, contender: Contender, operation: Operation, restored: Any) -> None:
        if (contender.label, operation) not in self._checked:
            check(
                contender.leaves(restored, self._state), self._state, self._target(operation), contender.label
            )
            self._checked.add((contender.label, operation))
            self.results.checked.append((self._workload.name, contender.label, operation))

    def _place(self, contender: Contender, operation: Operation) -> Path:
        label = contender.checkpoint.replace(", ", "-").replace(" ", "-")
        second = "-second" if operation is Operation.SECOND_SAVE else ""
        return self._folder / f"{label}{second}"

    def _note(self, label: str, text: str, *, failed: bool = False) -> None:
        self.results.notes.append(Note(self._workload.name, label, text, failed))
        say(f"{self._workload.name}: {label}: {text}")

    def _note_once(self, label: str, text: str) -> None:
        if not any(note.contender == label and note.text == text for note in self.results.notes):
            self._note(label, text)


def bytes_not_shared(path: Path, earlier: Path | None) -> int:
    """Bytes in the files of a checkpoint, but for those that are files of an earlier one, too."""
    shared = {(s.st_dev, s.st_ino) for s in map(Path.stat, caches.files_of(earlier))} if earlier else set()
    found = [name.stat() for name in caches.files_of(path)]
    return sum(status.st_size for status in found if (status.st_dev, status.st_ino) not in shared)


def io_bytes() -> int | None:
    """Bytes that this process has caused to be written to storage; None where that is not counted."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None

    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes")), None)


def say(text: str) -> None:
    """Tell how far it is, apart from the results."""
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    sys.stderr.flush()


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
