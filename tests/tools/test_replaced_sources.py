"""A source that is overwritten while a tool reads it: what the tool makes of it is of one state."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import numpy as np
import pytest
from tests.unsealed import unseal

import penstock
from penstock.cli import cat_command, diff_command
from penstock.cli.chosen_items import Chosen
from penstock.cli.cp_command import copy_checkpoint
from penstock.errors import ReplacedError
from penstock.handlers import LocalStore
from penstock.inspection.stored_leaves import read_items
from penstock.kernel import Threads
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

N_LEAVES = 12
FILES = penstock.SaveFormat(ocdbt=False)  # a directory for each leaf

Tool: TypeAlias = Callable[[FaultyStore, Path], Awaitable[object]]


def tree(number: float) -> dict[str, Any]:
    return {f"leaf{at}": np.full(2000, number) for at in range(N_LEAVES)}


async def save(path: Path, number: float) -> None:
    async with penstock.Checkpointer(save_format=FILES) as checkpointer:
        await (await checkpointer.save(path, tree(number)))


class Source:
    """A checkpoint at `c`, and others that take its place, one after another."""

    def __init__(self, folder: Path) -> None:
        self.path, self.folder, self.turn = folder / "c", folder, 0

    @classmethod
    async def make(cls, folder: Path, turns: int, *, sealed: bool = True) -> Source:
        for turn in range(turns + 1):
            await save(folder / f"state{turn}", float(turn))
            if not sealed:
                unseal(folder / f"state{turn}")

        (folder / "state0").rename(folder / "c")
        return cls(folder)

    def replace(self) -> None:
        self.turn += 1
        self.path.rename(self.folder / f"before{self.turn}")
        (self.folder / f"state{self.turn}").rename(self.path)


def number_of(values: dict[str, Any]) -> float:
    """Return the number that all leaves hold."""
    assert len(values) == N_LEAVES
    numbers = {float(one) for value in values.values() for one in np.unique(value)}
    assert len(numbers) == 1, f"a mixture of {sorted(numbers)}"
    return numbers.pop()


async def convert(name: str, store: FaultyStore, folder: Path) -> None:
    await penstock.convert(folder / "c", folder / name, store=store)


async def repair(store: FaultyStore, folder: Path) -> None:
    await penstock.repair(folder / "c", folder / "d", store=store)


async def seal(store: FaultyStore, folder: Path) -> None:
    await penstock.seal(folder / "c", store=store)


async def verify(store: FaultyStore, folder: Path) -> None:
    async with penstock.Checkpointer(store=store) as checkpointer:
        assert (await checkpointer.verify(folder / "c")).status == "intact"


WRITERS: dict[str, Tool] = {
    "d": partial(convert, "d"),
    "d.safetensors": partial(convert, "d.safetensors"),
    "d.npz": partial(convert, "d.npz"),
    "repair": repair,
}


async def replaced_at(share: float, tool: Tool, folder: Path, *, sealed: bool = True) -> Source:
    """Run a tool, and replace its source when it has done this share of its operations."""
    source = await Source.make(folder, 1, sealed=sealed)
    counting = FaultyStore(LocalStore())
    trial = folder / "trial"
    trial.mkdir()
    await Source.make(trial, 0, sealed=sealed)
    await tool(counting, trial)
    store = FaultyStore(LocalStore())
    hang = store.hang_at(int(len(counting.operations) * share))

    async def replace() -> None:
        await hang.wait_reached()
        source.replace()
        hang.release()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replace)
        await tool(store, folder)

    assert store.open_files == 0
    return source


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6])
@pytest.mark.parametrize("name", WRITERS)
async def test_what_is_written_is_of_one_state(name: str, share: float, tmp_path: Path) -> None:
    source = await replaced_at(share, WRITERS[name], tmp_path)

    written = tmp_path / ("d" if name == "repair" else name)
    if written.suffix == ".npz":
        assert number_of(dict(np.load(written))) == 1
    else:
        assert number_of(await penstock.restore(written)) == 1

    assert source.turn == 1
    assert not list(tmp_path.glob("*tmp*"))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
async def test_what_is_compared_is_of_one_state(share: float, tmp_path: Path) -> None:
    await replaced_at(share, verify, tmp_path)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.7])
async def test_what_is_sealed_gets_its_own_digests(share: float, tmp_path: Path) -> None:
    await replaced_at(share, seal, tmp_path, sealed=False)
    assert (await penstock.verify(tmp_path / "c")).status == "intact"


async def test_nobody_overwrites_what_is_being_sealed(tmp_path: Path) -> None:
    await Source.make(tmp_path, 0, sealed=False)
    store = FaultyStore(LocalStore())
    hang = store.hang_on("write_file")

    async def overwrite() -> None:
        await hang.wait_reached()
        with pytest.raises(penstock.errors.InUseError):
            await penstock.save(tmp_path / "c", tree(5.0), overwrite=True)

        hang.release()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(overwrite)
        await seal(store, tmp_path)

    assert (await penstock.verify(tmp_path / "c")).status == "intact"
    assert number_of(await penstock.restore(tmp_path / "c")) == 0


@pytest.mark.parametrize("at", [1, N_LEAVES // 2, N_LEAVES])
async def test_what_is_copied_is_of_one_state(at: int, tmp_path: Path) -> None:
    source = await Source.make(tmp_path, 1)
    calls: list[int] = []

    def show(done: int) -> None:
        calls.append(done)
        if len(calls) == at:
            source.replace()

    nbytes = await copy_checkpoint(str(source.path), str(tmp_path / "d"), show)
    assert number_of(await penstock.restore(tmp_path / "d")) == 1
    assert (await penstock.verify(tmp_path / "d")).status == "intact"
    assert nbytes == sum(file.stat().st_size for file in (tmp_path / "d").rglob("*") if file.is_file())
    assert not list(tmp_path.glob("*tmp*"))


async def test_a_source_that_is_always_replaced_is_given_up_and_nothing_is_left(tmp_path: Path) -> None:
    source = await Source.make(tmp_path, 10)
    before = [0]

    def show(done: int) -> None:
        if done <= before[0] or not source.turn:  # the first block of another attempt
            source.replace()

        before[0] = done

    with pytest.raises(ReplacedError, match="10 times"):
        await copy_checkpoint(str(source.path), str(tmp_path / "d"), show)

    assert not (tmp_path / "d").exists()
    assert not list(tmp_path.glob("*tmp*"))


class ReplacingBar:
    """An output whose progress bar has a source replaced when it is first shown."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def bar(self, *_: object) -> Any:
        return nullcontext(self)

    def show(self, *_: object) -> None:
        if not self.source.turn:
            self.source.replace()


async def test_the_facts_about_items_are_of_one_state(tmp_path: Path) -> None:
    source = await Source.make(tmp_path, 1)
    store = FaultyStore(LocalStore())
    hang = store.hang_on("read_files")

    async def replace() -> None:
        await hang.wait_reached()
        source.replace()
        hang.release()

    found: list[Any] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replace)
        found += await read_items(store, Threads(), str(source.path))

    (item,) = found
    assert len(item.leaves) == N_LEAVES
    assert item.committed_at_ns == (await penstock.metadata(source.path)).committed_at_ns


async def test_the_values_that_are_printed_are_of_one_state(tmp_path: Path) -> None:
    source = await Source.make(tmp_path, 1)
    place = Chosen.at(str(source.path), None, None)
    bar: Any = ReplacingBar(source)
    options = Namespace(leaf=[], values=False)

    found = await place.read(partial(cat_command.read_leaves, place, options, bar))

    assert number_of({leaf.name: about.least for leaf, about in found}) == 1


async def test_the_values_that_are_compared_are_of_one_state(tmp_path: Path) -> None:
    source = await Source.make(tmp_path, 1)
    await save(tmp_path / "other", 1.0)
    first, second = (Chosen.at(str(tmp_path / name), None, None) for name in ("c", "other"))
    bar: Any = ReplacingBar(source)
    options = Namespace(only=None, structure=False)

    compare = partial(diff_command.compare, first, second, options, bar)
    _, values = await first.read(partial(second.read, compare))

    assert values == []
