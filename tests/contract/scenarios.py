"""Saves and restores of every kind, small and in several pieces, and all that they may leave behind."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import trio
from anyio.lowlevel import current_token
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.open_files import open_below
from tests.stages.stage_rig import Parcel, ParcelHandler, with_parcels

from penstock import Checkpointer, SaveFormat
from penstock.handlers import Array, Composite, Json, LocalStore, PyTree, SafetensorsLayout, default_handlers
from penstock.kernel import Store
from penstock.pipelines import save_pipeline
from penstock.testing import FaultyStore

BUDGET = 100_000
N_CODED = 10_000  # float32 numbers: more than the 16 KiB from which on a codec is used


def plain(number: int) -> dict[str, Any]:
    """A tree of which every number is `number`."""
    return {
        "big": np.full(30_000, number, np.uint8),
        "jax": jnp.full((40, 50), number, jnp.float32),
        "list": [np.full(7, number, np.int16), None, {}],
        "step": number,
        "text": f"{number}",
    }


def coded(number: int) -> dict[str, Any]:
    """One with leaves that are worth a codec."""
    return {
        "a": np.full(N_CODED, number, np.float32),
        "b": np.full(N_CODED, number, np.int32),
        "step": number,
    }


def arrays(number: int) -> dict[str, Any]:
    """One of arrays only."""
    return {"a": np.full(30_000, number, np.int8), "b": np.full(7, number, np.int16)}


def items(number: int) -> Composite:
    """Several items."""
    return Composite(
        state=PyTree(plain(number)), config=Json({"lr": number}), mean=Array(np.full(9, number, np.float32))
    )


def parcels(number: int) -> dict[str, Any]:
    """One with leaves of a third party."""
    return {"parcel": Parcel(str(number)), **arrays(number)}


def numbers_in(tree: Any) -> set[int]:
    """Every number that the leaves of a tree are made of."""
    found: set[int] = set()
    for leaf in jax.tree.leaves(tree):
        match leaf:
            case Parcel():
                found.add(int(leaf.text))
            case str():
                found.add(int(leaf))
            case _:
                found.update(int(value) for value in np.unique(np.asarray(leaf)))

    return found


@dataclass(frozen=True)
class Saving:
    """A kind of save: what is saved, by what Checkpointer, with which arguments."""

    tree: Callable[[int], Any] = plain
    options: Callable[[], Mapping[str, Any]] = dict[str, Any]
    based: bool = False
    item: str | None = None

    def checkpointer(self, store: Store) -> Checkpointer:
        given = {"save_pipeline": small_files(), **self.options()}
        return Checkpointer(store=store, memory_limit=BUDGET, **given)

    def keywords(self, folder: Path) -> dict[str, Any]:
        return {"base": folder / "old", "compare": "digest"} if self.based else {}


def small_files() -> Any:
    """A save of several files and several pieces."""
    return save_pipeline().configured(
        {"write": {"file_bytes": 15_000}, "limit_bytes": {"in_flight_bytes": 20_000}}
    )


SAVINGS: dict[str, Saving] = {
    "plain": Saving(),
    "codec": Saving(coded, lambda: {"save_format": SaveFormat(codec="zstd")}),
    "auto codec": Saving(coded, lambda: {"save_format": SaveFormat(codec="auto", zarr=3)}),
    "directories": Saving(plain, lambda: {"save_format": SaveFormat(ocdbt=False)}),
    "base": Saving(based=True),
    "composite": Saving(items, item="state"),
    "third party": Saving(
        parcels, lambda: {"registry": with_parcels(default_handlers(entry_points=False), ParcelHandler())}
    ),
    "safetensors": Saving(arrays, lambda: {"save_pipeline": None, "layout": SafetensorsLayout()}),
}


@dataclass
class Place:
    """A folder with a checkpoint `old` in it, and room for another one called `new`."""

    folder: Path
    saving: Saving
    store: FaultyStore = field(default_factory=lambda: FaultyStore(LocalStore()))
    made: list[Checkpointer] = field(default_factory=list[Checkpointer])
    before: dict[str, Found] = field(default_factory=dict[str, "Found"])

    @property
    def new(self) -> Path:
        return self.folder / "new"

    def open(self) -> Checkpointer:
        """Make a Checkpointer; what it holds is looked at by `check_idle`."""
        self.made.append(self.saving.checkpointer(self.store))
        return self.made[-1]

    async def prepare(self) -> None:
        """Save `old`, and a copy of it as `new`, which is to be overwritten."""
        self.folder.mkdir()
        async with self.open() as checkpointer:
            keywords: dict[str, Any] = {"compare": "digest"} if self.saving.based else {}
            await (await checkpointer.save(self.folder / "old", self.saving.tree(1), **keywords))

        copy = shutil.copytree if (self.folder / "old").is_dir() else shutil.copy
        copy(self.folder / "old", self.new)
        self.before = {name: found_at(self.folder / name) for name in ("old", "new")}
        self.made.clear()

    async def save(self, checkpointer: Checkpointer, number: int, **keywords: Any) -> Any:
        """Begin to save over `new`."""
        given = {**self.saving.keywords(self.folder), **keywords}
        return await checkpointer.save(self.new, self.saving.tree(number), overwrite=True, **given)

    async def number(self) -> int:
        """The one number that all of `new` is made of."""
        async with self.open() as checkpointer:
            (number,) = numbers_in(await checkpointer.restore(self.new, item=self.saving.item))
            return number

    async def check(self, number: int, *, files: bool = True) -> bool:
        """Nothing is held or left, `old` is as it was, and so is `new`, or it is all made of `number`.

        Returns:
            Whether `new` is new.
        """
        self.check_idle(files=files)
        assert sorted(os.listdir(self.folder)) == ["new", "old"]
        assert found_at(self.folder / "old") == self.before["old"]
        if found_at(self.new) == self.before["new"]:
            return False

        assert await self.number() == number
        return True

    def found_new(self) -> Found:
        """What `new` consists of."""
        return found_at(self.new)

    async def check_next_save(self, *, read: bool) -> None:
        """The next save works, though another one ended badly; read it if told to."""
        async with self.open() as checkpointer:
            await (await self.save(checkpointer, 9))

        assert not read or await self.number() == 9
        self.check_idle()
        self.before["new"] = self.found_new()
        self.made.clear()

    def check_idle(self, *, files: bool = True) -> None:
        """Nothing that was ever opened here holds anything."""
        for checkpointer in self.made:
            statistics = checkpointer.statistics()
            assert (statistics.leased, statistics.tasks_waiting) == (0, 0)
            threads = checkpointer.operations.life._threads
            assert threads is None or threads.busy == 0

        assert self.store.open_files == 0
        assert not files or open_below(self.folder) == []


Found: TypeAlias = dict[str, tuple[int, int, int]]
"""The files of a checkpoint: inode, size and time of each."""


def found_at(path: Path) -> Found:
    """Return what the file or directory at `path` consists of."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    stats = {str(each): each.stat() for each in files}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


@contextmanager
def no_task_is_left() -> Generator[None]:
    """Fail if there are more tasks at the end than at the beginning."""
    before = _tasks()
    yield
    assert _tasks() <= before


def _tasks() -> int:
    if current_token().backend_class.__module__.endswith("trio"):
        return trio.lowlevel.current_statistics().tasks_living

    return len(asyncio.all_tasks())


# Restores


@dataclass(frozen=True)
class Restoring:
    """A kind of restore of a plain tree."""

    keywords: Callable[[], Mapping[str, Any]] = dict[str, Any]
    saving: Saving = field(default_factory=Saving)


def resharded() -> Mapping[str, Any]:
    """A target whose large leaf lies on two devices, spread along its rows."""
    like = plain(0)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))  # type: ignore[no-untyped-call]  # jax has no types here
    like["jax"] = jax.ShapeDtypeStruct((40, 50), jnp.float32, sharding=sharding)  # type: ignore[no-untyped-call]
    return {"like": like}


RESTORINGS: dict[str, Restoring] = {
    "plain": Restoring(),
    "like": Restoring(lambda: {"like": plain(0)}),
    # Of NumPy arrays: jax keeps what a jax.Array lay in until something else is done with jax.
    "mmap": Restoring(lambda: {"mmap": True}, Saving(arrays)),
    "resharded": Restoring(resharded),
    "codec": Restoring(saving=SAVINGS["codec"]),
    "third party": Restoring(saving=SAVINGS["third party"]),
}
