"""Saves, links, overwrites and deletions, recorded, with what must be found after a power loss in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from tests.stages.stage_rig import Parcel, ParcelHandler, with_parcels
from tests.unsealed import unseal

from penstock import Checkpointer, SaveFormat, seal
from penstock.config import Config
from penstock.handlers import Array, Composite, Json, LocalStore, PyTree, SafetensorsLayout, default_handlers
from penstock.handlers.formats.orbax.file_names import TEMPORARY_SUFFIX
from penstock.kernel import Store
from penstock.pipelines import save_pipeline
from penstock.steps import CheckpointManager, KeepLast
from penstock.testing import CrashStore, PowerLoss

FROZEN: Final = np.arange(5000, dtype=np.float32)  # more than the 16 KiB from which on a codec is used
FROZEN_SMALL: Final = np.arange(3500, dtype=np.int32)  # less, so that it has none, and can be linked
N_CHANGING: Final = 5000

Numbers: TypeAlias = "frozenset[int | None]"
"""The states that may lie at a place, by number; None stands for nothing."""


QUIET = Config.load(environ={}, arguments={"telemetry": {"keep_reports": 0}})
"""A course is stopped at each of its changes, among which reports are written at any time."""

# What is saved


def arrays(number: int) -> dict[str, Any]:
    """A tree of which two leaves never change, so that they are linked. All others are made of `number`."""
    return {
        "frozen": FROZEN,
        "frozen_small": FROZEN_SMALL,
        "changing": np.full(N_CHANGING, number, np.float32),
        "small": np.full(7, number, np.int16),
    }


def plain(number: int) -> dict[str, Any]:
    """The same with leaves of other kinds."""
    return {**arrays(number), "list": [None, {}], "step": number, "text": f"number {number}"}


def parcels(number: int) -> dict[str, Any]:
    """The same with a leaf of a third party."""
    return {**arrays(number), "parcel": Parcel(str(number))}


def items(number: int) -> Composite:
    """The same as one of several items."""
    mean = np.full(9, number, np.float32)
    return Composite(state=PyTree(plain(number)), config=Json({"lr": number}), mean=Array(mean))


def items_found(number: int) -> dict[str, Any]:
    """What is restored of them."""
    return {"state": plain(number), "config": {"lr": number}, "mean": np.full(9, number, np.float32)}


def same(found: Any, expected: Any) -> bool:
    """Whether two trees are equal to the last bit."""
    leaves, others = jax.tree.leaves(found), jax.tree.leaves(expected)
    structures: list[Any] = [jax.tree.structure(tree) for tree in (found, expected)]
    return structures[0] == structures[1] and all(map(_same_leaf, leaves, others))


def _same_leaf(leaf: Any, other: Any) -> bool:
    if isinstance(other, Parcel):
        return isinstance(leaf, Parcel) and leaf.text == other.text
    if not isinstance(other, np.ndarray):
        return type(leaf) is type(other) and bool(leaf == other)

    array = np.asarray(leaf)
    return (array.dtype, array.shape, array.tobytes()) == (other.dtype, other.shape, other.tobytes())


@dataclass(frozen=True)
class Storing:
    """How a tree is stored: the arguments of a Checkpointer, and the tree that they can store."""

    tree: Callable[[int], Any] = plain
    options: Callable[[], Mapping[str, Any]] = dict[str, Any]
    expected: Callable[[int], Any] | None = None  #: what is restored, if not the tree
    is_one_file: bool = False  #: which can neither be linked nor be a step

    def arguments(self) -> dict[str, Any]:
        """Arguments for a Checkpointer or a manager: several files for each save."""
        small = {"write": {"file_bytes": 15_000}, "limit_bytes": {"in_flight_bytes": 20_000}}
        pipeline = {} if self.is_one_file else {"save_pipeline": save_pipeline().configured(small)}
        return {"memory_limit": 200_000, **pipeline, **self.options()}

    def number_of(self, found: Any) -> int | None:
        """Which state it is, to the last bit; None if it is none, or a mixture."""
        expected = self.expected or self.tree
        return next((number for number in range(10) if same(found, expected(number))), None)


LAYOUTS: dict[str, Storing] = {
    "ocdbt": Storing(),
    "zstd": Storing(options=lambda: {"save_format": SaveFormat(codec="zstd")}),
    "directories": Storing(options=lambda: {"save_format": SaveFormat(ocdbt=False)}),
    "zarr3": Storing(options=lambda: {"save_format": SaveFormat(codec="auto", zarr=3)}),
    "items": Storing(items, expected=items_found),
    "third party": Storing(
        parcels, lambda: {"registry": with_parcels(default_handlers(entry_points=False), ParcelHandler())}
    ),
    "safetensors": Storing(arrays, lambda: {"layout": SafetensorsLayout()}, is_one_file=True),
}


# What is done with it


@dataclass
class Recording:
    """A folder in which a course is recorded, and what may be found there, from which effect on."""

    folder: Path
    storing: Storing
    allowed: dict[str, Numbers] = field(default_factory=dict[str, Numbers])
    since: list[tuple[int, dict[str, Numbers]]] = field(default_factory=list[tuple[int, dict[str, Numbers]]])
    store: CrashStore | None = None
    replaced_by: dict[str, str] = field(default_factory=dict[str, str])
    """A step that may be gone only if another one is there."""

    def may_be(self, **places: int | Sequence[int | None] | None) -> None:
        """Say what may lie at places from now on: a number, or several. A step is called `step_3`."""
        for name, numbers in places.items():
            several = numbers if isinstance(numbers, Sequence) else [numbers]
            self.allowed[name.removeprefix("step_")] = frozenset(several)

        self.since.append((0 if self.store is None else self.store.n_effects, dict(self.allowed)))

    def at(self, n_effects: int) -> dict[str, Numbers]:
        """What may be found after so many effects."""
        return [allowed for since, allowed in self.since if since <= n_effects][-1]

    def begin(self, unsynced: Sequence[Path] = ()) -> Store:
        """Begin to record. All that is there is durable, but the bytes of some files."""
        self.store = CrashStore(LocalStore(), self.folder, unsynced=unsynced)
        return self.store

    @property
    def n_effects(self) -> int:
        """Effects that were recorded."""
        assert self.store is not None
        return self.store.n_effects

    def power_losses(self, limit: int) -> Iterator[PowerLoss]:
        """Yield what a power loss in the course may leave; see `CrashStore.power_losses`."""
        assert self.store is not None
        return self.store.power_losses(limit=limit)

    def checkpointer(self, store: Store | None = None) -> Checkpointer:
        """Make a Checkpointer of this layout."""
        return Checkpointer(store=store or LocalStore(), **self.storing.arguments())

    def manager(self, store: Store | None = None, **options: Any) -> CheckpointManager:
        """Make a manager of this layout, for the root `run`."""
        given: dict[str, Any] = {"config": QUIET, **self.storing.arguments(), **options}
        return CheckpointManager(self.folder / "run", store=store or LocalStore(), **given)

    async def save(self, checkpointer: Checkpointer, name: str, number: int, **options: Any) -> None:
        """Save a state and wait until it is durable. Digests are kept, so that another one can link to it."""
        tree, metadata = self.storing.tree(number), {"number": number}
        path = self.folder / name
        await (await checkpointer.save(path, tree, custom_metadata=metadata, compare="digest", **options))

    async def save_step(
        self, manager: CheckpointManager, step: int, number: int | None = None, **options: Any
    ) -> None:
        """Save a state as a step, by default that of the same number, and wait until it is durable."""
        number = step if number is None else number
        saving = await manager.save(
            step,
            self.storing.tree(number),
            metrics={"loss": float(number)},
            custom_metadata={"number": number},
            compare="digest",
            **options,
        )
        assert saving is not None
        await saving

    async def number_at(self, checkpointer: Checkpointer, path: Path) -> int | None:
        """Restore a checkpoint, or a step with its metrics: which state it is; None if it is a mixture.

        Raises:
            PenstockError: If it cannot be restored.
        """
        found: Any
        is_step = path.name.isdigit()
        if self.storing.expected is not None:
            found = await checkpointer.restore_items(path)
            metrics = found.pop("metrics", None)
        else:
            found = await checkpointer.restore(path, item="default" if is_step else None)
            metrics = await checkpointer.restore(path, item="metrics") if is_step else None

        number = self.storing.number_of(found)
        metadata = await checkpointer.metadata(path)
        others = [metadata.custom_metadata, *([metrics] if is_step else [])]
        expected = [{"number": number}, *([{"loss": float(number or 0)}] if is_step else [])]
        return number if others == expected else None


async def one_saved(recording: Recording, *, copied: bool) -> None:
    """`old`, and `new`, a copy of it."""
    async with recording.checkpointer() as checkpointer:
        await recording.save(checkpointer, "old", 1)

    if copied:
        _copy(recording.folder / "old", recording.folder / "new")
    recording.may_be(old=1, new=1 if copied else None)


async def steps_saved(recording: Recording, **options: Any) -> None:
    """The steps 1 and 2, of which the second is linked to the first."""
    async with recording.manager(**options) as manager:
        for step in (1, 2):
            await recording.save_step(manager, step)

    recording.may_be(step_1=1, step_2=2, step_3=None)


async def new(recording: Recording) -> None:
    """A first save."""
    await one_saved(recording, copied=False)
    recording.may_be(new=[None, 2])
    async with recording.checkpointer(recording.begin()) as checkpointer:
        await recording.save(checkpointer, "new", 2)
        recording.may_be(new=2)


async def overwrite(recording: Recording) -> None:
    """A save over another one."""
    await one_saved(recording, copied=True)
    recording.may_be(new=[1, 2])
    async with recording.checkpointer(recording.begin()) as checkpointer:
        await recording.save(checkpointer, "new", 2, overwrite=True)
        recording.may_be(new=2)


async def overwrite_twice(recording: Recording) -> None:
    """Two saves over one path by one Checkpointer."""
    await one_saved(recording, copied=True)
    recording.may_be(new=[1, 2])
    async with recording.checkpointer(recording.begin()) as checkpointer:
        await recording.save(checkpointer, "new", 2, overwrite=True)
        recording.may_be(new=[2, 3])
        await recording.save(checkpointer, "new", 3, overwrite=True)
        recording.may_be(new=3)


async def overwrite_after_a_crash(recording: Recording) -> None:
    """A save over another one, where a save that was killed left another state under the temporary name."""
    await one_saved(recording, copied=True)
    async with recording.checkpointer() as checkpointer:
        await recording.save(checkpointer, "left", 4)

    left = recording.folder / f"new{TEMPORARY_SUFFIX}"
    left.mkdir() if recording.storing.is_one_file else None
    shutil.move(recording.folder / "left", left)
    recording.may_be(new=[1, 2])
    async with recording.checkpointer(recording.begin()) as checkpointer:
        await recording.save(checkpointer, "new", 2, overwrite=True)
        recording.may_be(new=2)


async def link(recording: Recording) -> None:
    """A save that links what did not change."""
    await one_saved(recording, copied=False)
    recording.may_be(new=[None, 2])
    await _save_linked(recording, recording.begin())
    recording.may_be(new=2)


async def link_to_a_copy(recording: Recording) -> None:
    """A save that links to a copy made by `cp -r` a moment ago: the bytes of the base are not durable."""
    await one_saved(recording, copied=False)
    shutil.move(recording.folder / "old", recording.folder / "original")
    _copy(recording.folder / "original", recording.folder / "old")
    del recording.allowed["old"]  # a power loss may damage it
    recording.may_be(original=1, new=[None, 2])
    await _save_linked(recording, recording.begin(_files(recording.folder / "old")))
    recording.may_be(new=2)


async def overwrite_the_base(recording: Recording) -> None:
    """A save that links to the checkpoint that it replaces."""
    await one_saved(recording, copied=True)
    recording.may_be(new=[1, 2])
    base = recording.folder / "new"
    await _save_linked(recording, recording.begin(), base=base, overwrite=True)
    recording.may_be(new=2)


async def _save_linked(recording: Recording, store: Store, **options: Any) -> None:
    async with recording.checkpointer(store) as checkpointer:
        given = {"base": recording.folder / "old", **options}
        await recording.save(checkpointer, "new", 2, **given)


async def seal_a_record(recording: Recording) -> None:
    """Digests are added to a checkpoint that penstock wrote when it recorded none of documents."""
    await _seal(recording, unseal)


async def seal_without_a_record(recording: Recording) -> None:
    """Digests are added to a checkpoint without any, as Orbax writes it."""

    def forget(path: Path) -> None:
        unseal(path)
        for record in path.rglob("_PENSTOCK_INTEGRITY"):
            record.unlink()

    await _seal(recording, forget)


async def _seal(recording: Recording, before: Callable[[Path], None]) -> None:
    await one_saved(recording, copied=True)
    before(recording.folder / "new")
    recording.may_be(new=1)
    await seal(recording.folder / "new", store=recording.begin())


async def first_step(recording: Recording) -> None:
    """A manager makes its root and saves into it."""
    recording.may_be(step_1=[None, 1])
    async with recording.manager(recording.begin(), metadata={"run": "a"}) as manager:
        await recording.save_step(manager, 1)
        recording.may_be(step_1=1)


async def step(recording: Recording) -> None:
    """A manager saves a step, linked to the one before, and deletes the first one."""
    await steps_saved(recording)
    await _third_step(recording)


async def step_to_trash(recording: Recording) -> None:
    """A manager saves a step, and moves the first one to a trash folder."""
    await steps_saved(recording)
    await _third_step(recording, trash="old")


async def _third_step(recording: Recording, trash: str | None = None) -> None:
    recording.may_be(step_3=[None, 3])
    async with recording.manager(recording.begin(), keep=KeepLast(2), trash=trash) as manager:
        await manager.restore(2)  # so that it is linked to
        recording.may_be(step_1=[None, 1])
        recording.replaced_by["1"] = "3"
        await recording.save_step(manager, 3)
        recording.may_be(step_3=3)

    recording.may_be(step_1=None)


async def step_after_a_crash(recording: Recording) -> None:
    """A manager opens a root in which a save and a deletion were killed, and saves the same step."""
    await steps_saved(recording)
    for name in (f"3{TEMPORARY_SUFFIX}", f"deleted_1{TEMPORARY_SUFFIX}"):
        shutil.copytree(recording.folder / "run" / "1", recording.folder / "run" / name)

    await _third_step(recording)


async def step_again(recording: Recording) -> None:
    """A manager replaces its last step."""
    await steps_saved(recording)
    recording.may_be(step_2=[2, 3])
    async with recording.manager(recording.begin()) as manager:
        await recording.save_step(manager, 2, 3, overwrite=True)
        recording.may_be(step_2=3)


async def delete_step(recording: Recording) -> None:
    """A manager deletes both of its steps, the one that others are linked to first."""
    await steps_saved(recording)
    recording.may_be(step_1=[None, 1])
    async with recording.manager(recording.begin()) as manager:
        await manager.delete(1)
        recording.may_be(step_1=None, step_2=[None, 2])
        await manager.delete(2)
        recording.may_be(step_2=None)


COURSES: dict[str, Callable[[Recording], Awaitable[None]]] = {
    "new": new,
    "overwrite": overwrite,
    "overwrite twice": overwrite_twice,
    "overwrite left": overwrite_after_a_crash,
    "link": link,
    "link to a copy": link_to_a_copy,
    "overwrite the base": overwrite_the_base,
    "seal a record": seal_a_record,
    "seal the first time": seal_without_a_record,
    "first step": first_step,
    "step": step,
    "step to trash": step_to_trash,
    "step left": step_after_a_crash,
    "step again": step_again,
    "delete step": delete_step,
}

OF_ONE_FILE = ("new", "overwrite", "overwrite twice", "overwrite left")
"""The courses that a layout of one file can take."""


def pairs(kinds: Iterable[str] = COURSES, layouts: Iterable[str] = LAYOUTS) -> list[tuple[str, str]]:
    """Return every course with every layout that it fits."""
    return [
        (kind, layout)
        for kind in kinds
        for layout in layouts
        if kind in OF_ONE_FILE or not LAYOUTS[layout].is_one_file
    ]


def _copy(source: Path, destination: Path) -> None:
    shutil.copytree(source, destination) if source.is_dir() else shutil.copy(source, destination)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]

    return [Path(above, name) for above, _, names in os.walk(path) for name in names]
