"""Random saves, cancels, failures and restores against a small model of what must be true. `make soak`.

The model knows, for each path, which state may lie there: one number after a save that ended well, two
while one may have been published or not. Whatever happens, after each step

* every path holds one whole state that the model allows, and nothing else lies in the folder,
* no byte is leased, no file is open and no thread is busy, once nothing is under way,
* a failure is told once, by the exception that was injected, or one that says that it is not durable.

Everything random comes from one seed, which is printed with the steps, so that a failure is repeated by
`make soak SEED=...`. (Threads finish in their own order, so a step is repeated, not its every interleaving.)
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from anyio import create_task_group

import penstock
from penstock import Checkpointer, SaveFormat, SaveFuture
from penstock.errors import NotDurableError, PenstockError, SaveCancelledError, StorageError
from penstock.handlers import LocalStore
from penstock.testing import FaultyStore

PATHS = ("a", "b", "c")
FORMATS = (SaveFormat(), SaveFormat(ocdbt=False), SaveFormat(codec="zstd"), SaveFormat(zarr=3, codec="auto"))
STEP_LIMIT_S = 60.0


def state(number: int, large: bool) -> dict[str, Any]:
    """A tree of which every number is `number`."""
    leaves = {f"leaf_{at}": np.full(50 + at, number, np.int32) for at in range(20)}
    return {**leaves, "large": np.full(60_000 if large else 10, number, np.int64), "step": number}


def number_of(tree: Any) -> int:
    """The one number that a whole tree is made of."""
    numbers = {int(each) for leaf in tree.values() for each in np.unique(np.asarray(leaf))}
    assert len(tree) == 22, f"{len(tree)} leaves"
    assert len(numbers) == 1, f"a mixture of {numbers}"
    return numbers.pop()


@dataclass
class Model:
    """What must be true: path -> the numbers that may lie there; None stands for nothing."""

    allowed: dict[str, set[int | None]] = field(default_factory=lambda: {name: {None} for name in PATHS})

    def saving(self, name: str, number: int) -> None:
        """A save was begun."""
        self.allowed[name] = {*self.allowed[name], number}

    def saved(self, name: str, number: int) -> None:
        """And ended well."""
        self.allowed[name] = {number}

    def seen(self, name: str, number: int | None) -> None:
        """Something was restored: from now on it is that."""
        assert number in self.allowed[name], f"{name} holds {number}, and may hold {self.allowed[name]}"
        self.allowed[name] = {number}


class Soak:
    """A folder, a Checkpointer on a store that fails on demand, and the model.

    Args:
        folder: Empty.
        rng: The only source of chance.
        say: Told of every step.
    """

    def __init__(self, folder: Path, rng: random.Random, say: Callable[[str], object]) -> None:
        self.folder = folder
        self.rng = rng
        self.say = say
        self.model = Model()
        self.done: Counter[str] = Counter()
        self.may_be_left = False  #: whether a failure may have left what was replaced beside its path
        self._number = 0
        self._steps = (
            *(self.save_and_wait, self.save_and_cancel, self.cancel_the_caller, self.fail_a_save),
            *(self.restore, self.cancel_a_restore, self.fail_a_restore, self.several_at_once),
        )

    async def run(self, go_on: Callable[[int], bool]) -> None:
        """Do one random step after another, in one Checkpointer after another, while `go_on(steps)`."""
        n_steps = 0
        while go_on(n_steps):
            n_steps = await self._one_checkpointer(n_steps, go_on)

    async def _one_checkpointer(self, n_steps: int, go_on: Callable[[int], bool]) -> int:
        self.store = FaultyStore(LocalStore())
        form = self.rng.choice(FORMATS)
        limit = self.rng.choice((50_000, 500_000, 50_000_000))
        self.say(f"Checkpointer(memory_limit={limit}, save_format={form})")
        async with Checkpointer(store=self.store, memory_limit=limit, save_format=form) as self.checkpointer:
            for _ in range(self.rng.randrange(5, 20)):
                if not go_on(n_steps):
                    break
                n_steps += 1
                step = self.rng.choice(self._steps)
                with anyio.fail_after(STEP_LIMIT_S):
                    await step()
                    await self.checkpointer.wait()

                self.done[step.__name__.replace("_", " ")] += 1
                await self._check_idle()
                await self._check_paths()

        return n_steps

    async def _check_idle(self) -> None:
        statistics = self.checkpointer.statistics()
        assert (statistics.leased, statistics.tasks_waiting) == (0, 0), statistics
        assert self.store.open_files == 0
        threads = self.checkpointer.operations.life._threads
        assert threads is not None
        with anyio.fail_after(STEP_LIMIT_S):  # after long work the allocator gives memory back, in a thread
            while threads.busy:
                await anyio.lowlevel.checkpoint()

    async def _check_paths(self) -> None:
        self._disarm()
        for name in PATHS:
            path = self.folder / name
            found = number_of(await self.checkpointer.restore(path)) if path.exists() else None
            self.model.seen(name, found)

        others = {path.name for path in self.folder.iterdir()} - set(PATHS)
        # After a failure beyond the exchange, what was replaced stays until the next save to the path.
        assert all("orbax-checkpoint-tmp" in name for name in others), others
        for name in others:
            assert self.may_be_left, f"{name} was left behind"

    # Steps

    async def save_and_wait(self) -> None:
        name, save, number = await self._begin()
        await save
        self.model.saved(name, number)

    async def save_and_cancel(self) -> None:
        name, save, number = await self._begin()
        for _ in range(self.rng.randrange(30)):
            await anyio.lowlevel.checkpoint()

        save.cancel()
        try:
            await save
        except SaveCancelledError:
            return
        self.model.saved(name, number)

    async def cancel_the_caller(self) -> None:
        ticks = self.rng.randrange(40)
        async with create_task_group() as tasks:
            tasks.start_soon(self._begin)
            for _ in range(ticks):
                await anyio.lowlevel.checkpoint()

            tasks.cancel_scope.cancel()

    async def fail_a_save(self) -> None:
        error = self._arm(60)
        try:
            name, save, number = await self._begin()
        except PenstockError as raised:
            assert raised is error, raised
            self.may_be_left = True
            return

        try:
            await save
        except NotDurableError as raised:
            assert raised.__cause__ is error, raised
            self.may_be_left = True
            self.model.saved(name, number)
        except PenstockError as raised:
            assert raised is error, raised
            self.may_be_left = True
        else:
            self.model.saved(name, number)

    async def restore(self) -> None:
        await self._restore(self.rng.choice(PATHS))

    async def cancel_a_restore(self) -> None:
        ticks = self.rng.randrange(60)
        async with create_task_group() as tasks:
            tasks.start_soon(self._restore, self.rng.choice(PATHS))
            for _ in range(ticks):
                await anyio.lowlevel.checkpoint()

            tasks.cancel_scope.cancel()

    async def fail_a_restore(self) -> None:
        error = self._arm(30)
        try:
            await self._restore(self.rng.choice(PATHS))
        except PenstockError as raised:
            assert raised is error, raised

    async def several_at_once(self) -> None:
        names = self.rng.sample(PATHS, 2)
        readers = self.rng.choices(PATHS, k=2)
        begun = [await self._begin(name) for name in names]
        async with create_task_group() as tasks:
            for name in readers:
                tasks.start_soon(self._restore, name)

        for name, save, number in begun:
            await save
            self.model.saved(name, number)

    # Their parts

    async def _begin(self, name: str | None = None) -> tuple[str, SaveFuture, int]:
        name = name or self.rng.choice(PATHS)
        self._number += 1
        number, large = self._number, self.rng.random() < 0.5
        staging: Any = self.rng.choice(("copy", "overlap"))
        self.say(f"  save {number} to {name}, {staging}{', large' if large else ''}")
        self.model.saving(name, number)
        tree = state(number, large)
        save = await self.checkpointer.save(self.folder / name, tree, overwrite=True, staging=staging)
        return name, save, number

    async def _restore(self, name: str) -> None:
        self.say(f"  restore {name}")
        mmap = self.rng.random() < 0.3
        if (self.folder / name).exists():
            number = number_of(await self.checkpointer.restore(self.folder / name, mmap=mmap))
            assert number in self.model.allowed[name]

    def _arm(self, most: int) -> StorageError:
        at = len(self.store.operations) + self.rng.randrange(1, most)
        error = StorageError("any", "path", f"injected at operation {at}", 5)
        self.say(f"  operation {at} will fail")
        self.store.fail_at(at, error)
        return error

    def _disarm(self) -> None:
        self.store.forget_faults()


def soak(folder: Path, seed: int, go_on: Callable[[int], bool], say: Callable[[str], object]) -> Counter[str]:
    """Run on asyncio and on trio, half of the steps each; return how often each step was done."""
    rng = random.Random(seed)
    done: Counter[str] = Counter()
    for backend in ("asyncio", "trio"):
        place = folder / backend
        place.mkdir()
        run = Soak(place, rng, say)
        anyio.run(run.run, go_on, backend=backend)
        done += run.done

    return done


class Steps:
    """Keeps the last steps, and writes them out if the run fails."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)


def main() -> None:
    """Parse the command line and soak."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--steps", type=int, help="stop after so many steps on each event loop instead")
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}, penstock {penstock.__version__}\n")
    steps = Steps()
    since = [time.monotonic()]
    seconds: float = options.seconds
    most_steps: int | None = options.steps

    def go_on(n_steps: int) -> bool:
        if n_steps == 0:
            since[0] = time.monotonic()
        if most_steps is not None:
            return n_steps < most_steps
        return time.monotonic() - since[0] < seconds / 2

    folder = Path(tempfile.mkdtemp(prefix="penstock-soak-"))
    try:
        done = soak(folder, options.seed, go_on, steps)
    except BaseException:
        sys.stdout.write("\n".join([*steps, f"failed; again: make soak SEED={options.seed}", ""]))
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)

    for what, times in sorted(done.items()):
        sys.stdout.write(f"{times:7} {what}\n")


if __name__ == "__main__":
    main()
