"""What the processes of `make crash` do until they are killed, and what must be found afterwards.

Every process says what it does in lines of three words: its name, what happened, and the number of the state.
A line is one write to one pipe, so that the lines of all processes are in the order of what happened.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import anyio
import numpy as np

import penstock
import penstock.orbax as ocp
from penstock.errors import PenstockError
from penstock.orbax import v1
from penstock.steps import KeepLast

N_LEAVES: Final = 20
LEAF: Final = 30_000  # float64 numbers, so a state is some 5 MB
FROZEN: Final = np.arange(float(4 * LEAF))
"""A leaf of every state, so that a save with a base links it."""

KEPT: Final = 2
TRASH: Final = "trash"

Say: TypeAlias = Callable[[str, int], None]
"""Called with what happened, and the number of the state."""
Role: TypeAlias = Callable[[Path, Say, int], Awaitable[None]]
"""What a process does: in a folder, saying so, with numbers from one on."""


def state(number: int) -> dict[str, Any]:
    """A tree in which every number but those of one leaf is `number`."""
    leaves = {f"leaf_{at}": np.full(LEAF, float(number)) for at in range(N_LEAVES)}
    return {**leaves, "frozen": FROZEN, "number": number}


def number_of(tree: Any, where: object) -> int:
    """Check that a restored tree is one state, and return its number."""
    number = tree["number"]
    assert len(tree) == N_LEAVES + 2, f"{where} has {len(tree)} leaves"
    assert np.array_equal(tree["frozen"], FROZEN), f"the frozen leaf of {where} is another one"
    for at in range(N_LEAVES):
        leaf = tree[f"leaf_{at}"]
        assert leaf.shape == (LEAF,), f"leaf {at} of {where} has shape {leaf.shape}"
        assert np.all(leaf == number), f"leaf {at} of {where} is not of state {number}: {set(leaf.tolist())}"

    return int(number)


# What they do


async def save_alone(folder: Path, say: Say, number: int) -> None:
    """Save each state under a new name, then over an old one."""
    async with penstock.Checkpointer() as checkpointer:
        while True:
            number += 1
            save = await checkpointer.save(folder / str(number), state(number))
            say("begun", number)
            await save
            say("durable", number)
            await (await checkpointer.save(folder / "latest", state(number), overwrite=True))
            say("overwritten", number)


async def overwrite(folder: Path, say: Say, number: int) -> None:
    """Save over one path, as others do at the same time."""
    async with penstock.Checkpointer() as checkpointer:
        while True:
            number += 1
            async with _refusable(say, number):
                say("begun", number)
                await (await checkpointer.save(folder / "shared", state(number), overwrite=True))
                say("durable", number)


def overwrite_linked(own: str, other: str) -> Role:
    """Save over a path of one's own, linked to what another one is overwriting."""

    async def role(folder: Path, say: Say, number: int) -> None:
        async with penstock.Checkpointer() as checkpointer:
            while True:
                number += 1
                base = folder / other if (folder / other).exists() else None
                async with _refusable(say, number):
                    say("begun", number)
                    save = await checkpointer.save(
                        folder / own, state(number), overwrite=True, base=base, compare="digest"
                    )
                    await save
                    say("durable", number)

    return role


@asynccontextmanager
async def _refusable(say: Say, number: int) -> AsyncGenerator[None]:
    try:
        yield
    except PenstockError:  # somebody else holds the place, or the base is gone
        say("refused", number)


def keep_steps(root: str, trash: str | None) -> Role:
    """Save steps, each linked to the one before, and delete all but the last ones."""

    async def role(folder: Path, say: Say, _: int) -> None:
        rng = random.Random()
        async with penstock.CheckpointManager(folder / root, keep=KeepLast(KEPT), trash=trash) as manager:
            while True:
                number = (manager.latest_step() or 0) + 1
                save = await manager.save(number, state(number), compare="digest", metrics={"loss": 1.0})
                assert save is not None
                say("begun", number)
                await save
                say("durable", number)
                if rng.random() < 0.2:
                    await manager.delete(manager.all_steps()[0])

    return role


def keep_steps_by_the_face(root: str) -> Role:
    """The same with the manager of `penstock.orbax`."""

    async def role(folder: Path, say: Say, _: int) -> None:
        def work() -> None:
            options = ocp.CheckpointManagerOptions(max_to_keep=KEPT)
            with ocp.CheckpointManager(folder / root, options=options) as manager:
                while True:
                    number = (manager.latest_step() or 0) + 1
                    say("begun", number)
                    manager.save(number, args=ocp.args.StandardSave(state(number)))
                    manager.wait_until_finished()
                    say("durable", number)

        await anyio.to_thread.run_sync(work)

    return role


async def overwrite_by_the_face(folder: Path, say: Say, number: int) -> None:
    """Save over one path with the functions of `penstock.orbax.v1`."""

    def work(number: int) -> None:
        while True:
            number += 1
            say("begun", number)
            v1.save(folder / "latest", state(number), overwrite=True)
            say("durable", number)

    await anyio.to_thread.run_sync(work, number)


def follow_steps(root: str) -> Role:
    """Restore each new step."""

    async def role(folder: Path, say: Say, _: int) -> None:
        async with penstock.Checkpointer() as checkpointer:
            async for step in penstock.watch(folder / root, interval_s=0.02, latest_only=True):
                where = folder / root / str(step)
                assert number_of(await checkpointer.restore(where, item="default"), where) == step
                say("followed", step)

    return role


def follow(*names: str) -> Role:
    """Restore what others overwrite, again and again."""

    async def role(folder: Path, say: Say, _: int) -> None:
        async with penstock.Checkpointer() as checkpointer:
            while True:
                for name in names:
                    if (folder / name).exists():
                        say("followed", number_of(await checkpointer.restore(folder / name), name))

                await anyio.sleep(0.005)

    return role


# What must be found


@dataclass
class Line:
    """What a process said."""

    who: str
    what: str
    number: int


@dataclass
class Memory:
    """What is known of a folder from one kill to the next: the number at each path that is overwritten."""

    at: dict[str, int] = field(default_factory=dict[str, int])
    durable: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


def _numbers(lines: Sequence[Line], what: str, who: str | None = None) -> list[int]:
    return [line.number for line in lines if line.what == what and who in (None, line.who)]


def is_stale(number: int | None, lines: Sequence[Line]) -> bool:
    """Whether a state cannot be there, because another one was begun after it was durable, and was durable.

    None stands for what was there before the lines begin.
    """
    said = [(line.what, line.number) for line in lines]
    over = len(said)
    if number is None:
        over = -1
    elif ("durable", number) in said:
        over = said.index(("durable", number))

    return any(
        what == "durable" and said.index(("begun", other)) > over for what, other in said if other != number
    )


async def find_overwritten(
    folder: Path, name: str, lines: Sequence[Line], memory: Memory, found: Counter[str]
) -> None:
    """Check what lies at a path that one or several were overwriting."""
    path = folder / name
    before = memory.at.get(name)
    if not path.exists():
        assert before is None, f"{name} is gone"
        assert not _numbers(lines, "durable"), f"{name} is not there"
        return

    number = number_of(await penstock.restore(path), name)
    begun = _numbers(lines, "begun")
    assert number == before or number in begun, f"{name} holds {number}, which nobody saved there"
    assert not is_stale(None if number == before else number, lines), f"{name} holds {number}, which is stale"
    found["overwritten checkpoints restored"] += 1
    found["overwritten ones newer than reported"] += number in begun and number not in _numbers(
        lines, "durable"
    )
    memory.at[name] = number


async def find_alone(folder: Path, lines: Sequence[Line], memory: Memory, found: Counter[str]) -> None:
    """Check what one saver left."""
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        if name.isdigit():
            where = folder / name
            assert number_of(await penstock.restore(where), where) == int(name)
            found["checkpoints restored"] += 1

    gone = {*map(str, _numbers(lines, "durable"))} - {*names}
    assert not gone, f"steps {gone} were durable, and are gone: {names}"
    of_latest = [
        Line(line.who, {"durable": "begun", "overwritten": "durable"}[line.what], line.number)
        for line in lines
        if line.what in {"durable", "overwritten"}
    ]
    await find_overwritten(folder, "latest", of_latest, memory, found)

    # By the parent: a removal that is killed half-way leaves half a checkpoint under its name.
    for name in sorted(filter(str.isdigit, names), key=int)[:-3]:
        shutil.rmtree(folder / name)


async def find_shared(folder: Path, lines: Sequence[Line], memory: Memory, found: Counter[str]) -> None:
    """Check what several savers left at one path."""
    await find_overwritten(folder, "shared", lines, memory, found)


async def find_linked(folder: Path, lines: Sequence[Line], memory: Memory, found: Counter[str]) -> None:
    """Check what savers left that link to each other's checkpoints."""
    for name in ("a", "b"):
        own = [line for line in lines if line.who == name]
        await find_overwritten(folder, name, own, memory, found)


async def find_by_the_face(folder: Path, lines: Sequence[Line], memory: Memory, found: Counter[str]) -> None:
    """Check what a manager and a saver with Orbax's names left."""
    await find_steps(folder, lines, memory, found)
    own = [line for line in lines if line.who == "saver"]
    await find_overwritten(folder, "latest", own, memory, found)


async def find_steps(folder: Path, lines: Sequence[Line], memory: Memory, found: Counter[str]) -> None:
    """Check what managers left."""
    for root in ("a", "b"):
        if not (folder / root).exists():
            continue

        durable = memory.durable.setdefault(root, [])
        durable += _numbers(lines, "durable", root)
        async with penstock.CheckpointManager(folder / root, read_only=True) as manager:
            steps = manager.all_steps()
            assert not durable or manager.latest_step() in (durable[-1], durable[-1] + 1), (
                f"the latest step of {root} is {manager.latest_step()}, and {durable[-1]} was durable"
            )
            for step in steps:
                where = folder / root / str(step)
                assert number_of(await manager.restore(step), where) == step
                found["steps restored"] += 1

        del durable[:-3]
        trash = folder / root / TRASH
        for path in trash.iterdir() if trash.exists() else ():
            if not path.name.isdigit():  # what a step replaced there, and was being removed
                continue
            tree = await penstock.restore(path, item="default")
            assert number_of(tree, path) == int(path.name)
            found["steps in the trash restored"] += 1
            shutil.rmtree(path)


Check: TypeAlias = Callable[[Path, Sequence[Line], Memory, Counter[str]], Awaitable[None]]


@dataclass(frozen=True)
class Scene:
    """Processes that run together, and what is checked when they were killed."""

    roles: Callable[[random.Random], dict[str, Role]]  #: by name
    check: Check


def _overwriters(rng: random.Random) -> dict[str, Role]:
    names = [f"saver_{at}" for at in range(rng.choice([2, 2, 3, 4]))]
    return {**dict.fromkeys(names, overwrite), "follower": follow("shared")}


SCENES: Final[dict[str, Scene]] = {
    "one saver": Scene(lambda _: {"saver": save_alone}, find_alone),
    "several at one path": Scene(_overwriters, find_shared),
    "linked to each other": Scene(
        lambda _: {
            "a": overwrite_linked("a", "b"),
            "b": overwrite_linked("b", "a"),
            "follower": follow("a", "b"),
        },
        find_linked,
    ),
    "managers": Scene(
        lambda _: {
            "a": keep_steps("a", None),
            "b": keep_steps("b", TRASH),
            "follower_a": follow_steps("a"),
            "follower_b": follow_steps("b"),
        },
        find_steps,
    ),
    "Orbax's names": Scene(
        lambda _: {
            "a": keep_steps_by_the_face("a"),
            "saver": overwrite_by_the_face,
            "follower_a": follow_steps("a"),
            "follower": follow("latest"),
        },
        find_by_the_face,
    ),
}


def left_temporary(folder: Path) -> bool:
    """Whether a temporary directory lies below a folder."""
    return any("-tmp" in name for _, names, _ in os.walk(folder) for name in names)
