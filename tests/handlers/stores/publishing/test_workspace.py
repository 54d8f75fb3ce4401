from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, final

import anyio
import pytest
from anyio import CancelScope, Event, create_task_group

from penstock.blocking import LoopHandle
from penstock.errors import DestinationExistsError, InUseError, PathError, StorageError
from penstock.handlers import LocalStore
from penstock.handlers.stores.publishing.workspace import Workspace
from penstock.kernel import BuildToken, DataFile, Directories, Hold, ReadableFile, Store, Threads
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

FINAL, TEMPORARY = "/run/7", "/run/7.tmp"


@final
class FakeHold(Hold):
    def __init__(self, held: set[str], path: str) -> None:
        self._held, self._path = held, path
        held.add(path)

    def release(self) -> None:
        self._held.discard(self._path)


@final
class FakeStore(Directories):
    """Directories in a dict: path -> which generation of it; and a record of what was done."""

    def __init__(self, *paths: str) -> None:
        self.there = dict.fromkeys(paths, "old")
        self.done: list[tuple[str, ...]] = []
        self.held: set[str] = set()
        self.before: dict[str, Callable[[], object]] = {}

    def _do(self, operation: str, *paths: str) -> None:
        self.done.append((operation, *paths))
        if operation in self.before:
            self.before[operation]()

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        kinds: dict[str, Literal["file", "directory"]] = {"file": "file"}
        return kinds.get(self.there[path], "directory") if path in self.there else None

    def check_writable(self, path: str) -> None:
        self._do("check_writable", path)

    def make_directory(self, path: str) -> None:
        self._do("make_directory", path)
        self.there.setdefault(path, "new")

    def hold(self, path: str) -> Hold:
        if path in self.held:
            raise InUseError(path)

        return FakeHold(self.held, path)

    def make_held(self, path: str) -> Hold:
        self._do("make_held", path)
        if path in self.there:
            raise InUseError(path)

        self.there[path] = "new"
        return FakeHold(self.held, path)

    def sync_directory(self, path: str) -> None:
        self._do("sync_directory", path)

    def begin_build(self, final: str, beside: str, file: str | None = None) -> BuildToken:
        return BuildToken(final, beside, file)

    def publish(self, token: BuildToken) -> None:
        self._do("publish", token.built, token.final)
        if token.final in self.there:
            raise StorageError("publish", token.final, "exists", errno.EEXIST)

        self.there[token.final] = self.there.pop(token.built)

    def exchange(self, token: BuildToken) -> None:
        first, second = token.built, token.final
        self._do("exchange", first, second)
        there = self.there
        there[first], there[second] = there[second], there[first]

    def discard(self, token: BuildToken) -> None:
        self._do("discard", token.place)
        self._remove(token.place)

    def remove_tree(self, path: str) -> None:
        self._do("remove_tree", path)
        self._remove(path)

    def _remove(self, path: str) -> None:
        for gone in [p for p in self.there if p == path or p.startswith(f"{path}/")]:
            del self.there[gone]

    def size(self, path: str) -> int:
        raise NotImplementedError

    def identity(self, path: str) -> object:
        return self.there[path]

    def list_directory(self, path: str) -> Sequence[str]:
        raise NotImplementedError

    def read_file(self, path: str) -> bytes:
        raise NotImplementedError

    def write_file(self, path: str, data: bytes, *, create: bool = False) -> bool:
        raise NotImplementedError

    def create_data_file(self, path: str) -> DataFile:
        raise NotImplementedError

    def open_data_file(self, path: str) -> ReadableFile:
        raise NotImplementedError

    def rename(self, source: str, destination: str) -> None:
        raise NotImplementedError

    def hold_reading(self, path: str) -> Hold:
        return self.hold(path)


def space(store: Store, *, overwrite: bool = False) -> Workspace:
    return Workspace(store, Threads(), FINAL, TEMPORARY, overwrite=overwrite)


def write(path: str, text: str) -> None:
    Path(path).write_text(text)


def refuse() -> None:
    raise StorageError("test", FINAL, "refused")


async def test_nothing_is_made_before_open_and_then_nothing_is_discarded() -> None:
    store = FakeStore(TEMPORARY)
    workspace = space(store)

    workspace.check()
    assert workspace.path("d/f") == f"{TEMPORARY}/d/f"
    await workspace.discard()

    assert store.done == [("check_writable", FINAL)]
    assert store.there == {TEMPORARY: "old"}


async def test_open_removes_what_is_stale_and_makes_each_directory_once() -> None:
    store = FakeStore(TEMPORARY, f"{TEMPORARY}/left-over")
    workspace = space(store)

    for directory in ("", "", "d", "d", ""):
        await workspace.open(directory)

    assert store.there == {TEMPORARY: "new", f"{TEMPORARY}/d": "new"}
    assert store.done == [
        ("check_writable", FINAL),
        ("sync_directory", "/run"),
        ("remove_tree", TEMPORARY),
        ("make_held", TEMPORARY),
        ("make_directory", f"{TEMPORARY}/d"),
    ]


async def test_the_root_is_made_first_also_for_a_directory_in_it() -> None:
    store = FakeStore(TEMPORARY)
    await space(store).open("d")

    made = ["sync_directory", "remove_tree", "make_held", "make_directory"]
    assert [operation for operation, *_ in store.done] == ["check_writable", *made]


async def test_open_checks_what_nobody_has_checked() -> None:
    store = FakeStore(FINAL)
    workspace = space(store)
    with pytest.raises(DestinationExistsError, match=FINAL):
        await workspace.open()

    await workspace.discard()
    assert store.there == {FINAL: "old"}
    assert store.done == []


async def test_open_does_not_check_again() -> None:
    store = FakeStore()
    workspace = space(store)
    workspace.check()
    store.before["check_writable"] = refuse
    await workspace.open()

    assert store.there == {TEMPORARY: "new"}


async def test_many_may_open_at_once() -> None:
    store, go_on = FakeStore(), threading.Event()
    loop, begun = LoopHandle(), Event()

    def hold() -> None:
        loop.post(begun.set)
        go_on.wait(60)

    store.before["make_held"] = hold
    workspace = space(store)
    async with create_task_group() as tasks:
        for directory in ("", "d", "d", "", "e"):
            tasks.start_soon(workspace.open, directory)
        await begun.wait()
        go_on.set()

    assert sorted(store.done) == [
        ("check_writable", FINAL),
        ("make_directory", f"{TEMPORARY}/d"),
        ("make_directory", f"{TEMPORARY}/e"),
        ("make_held", TEMPORARY),
    ]


async def test_publish_publishes_and_syncs_the_parent() -> None:
    store = FakeStore()
    workspace = space(store)
    await workspace.open()
    store.done.clear()
    assert not workspace.published

    await workspace.publish()
    await workspace.discard()  # does nothing any more

    assert workspace.published
    assert store.there == {FINAL: "new"}
    assert store.done == [("publish", TEMPORARY, FINAL), ("sync_directory", "/run")]


async def test_publish_over_an_old_checkpoint_exchanges_and_then_removes_it() -> None:
    store = FakeStore(FINAL)
    workspace = space(store, overwrite=True)
    workspace.check()
    await workspace.open()
    store.done.clear()

    await workspace.publish()

    assert store.there == {FINAL: "new"}
    assert store.done == [
        ("exchange", TEMPORARY, FINAL),
        ("sync_directory", "/run"),
        ("discard", TEMPORARY),
    ]


async def test_overwrite_where_nothing_is_publishes() -> None:
    store = FakeStore()
    workspace = space(store, overwrite=True)
    await workspace.open()
    await workspace.publish()

    assert store.there == {FINAL: "new"}
    assert ("publish", TEMPORARY, FINAL) in store.done


async def test_an_old_checkpoint_is_refused_before_and_at_the_end() -> None:
    store = FakeStore(FINAL)
    with pytest.raises(DestinationExistsError, match=FINAL):
        space(store).check()
    assert store.done == []

    store = FakeStore()
    workspace = space(store)
    await workspace.open()
    store.there[FINAL] = "old"  # it came in the meantime
    with pytest.raises(DestinationExistsError, match=FINAL):
        await workspace.publish()

    assert not workspace.published
    await workspace.discard()
    assert store.there == {FINAL: "old"}


async def test_a_file_is_no_checkpoint_to_be_overwritten() -> None:
    store = FakeStore()
    store.there[FINAL] = "file"

    with pytest.raises(PathError, match="is a file"):
        space(store, overwrite=True).check()
    with pytest.raises(DestinationExistsError):
        space(store).check()


async def test_what_cannot_be_created_is_refused_by_check() -> None:
    store = FakeStore()
    store.before["check_writable"] = refuse

    with pytest.raises(StorageError, match="refused"):
        space(store).check()


@pytest.mark.parametrize(
    ("at", "left"),
    [("remove_tree", {TEMPORARY: "old"}), ("make_held", dict[str, str]()), ("make_directory", {})],
)
async def test_after_an_open_that_failed_it_may_be_tried_again_or_discarded(
    at: str, left: dict[str, str]
) -> None:
    store = FakeStore(TEMPORARY)
    workspace = space(store)
    store.before[at] = refuse
    with pytest.raises(StorageError):
        await workspace.open("d")

    del store.before[at]
    await workspace.discard()
    assert store.there == left, "what it does not hold is left to the next save"
    workspace.release()
    workspace = space(store)
    await workspace.open("d")
    assert store.there == {TEMPORARY: "new", f"{TEMPORARY}/d": "new"}


@pytest.mark.parametrize(("at", "left"), [("publish", {}), ("exchange", {FINAL: "old"})])
async def test_after_a_publish_that_failed_the_old_checkpoint_stands(at: str, left: dict[str, str]) -> None:
    store = FakeStore(*left)
    workspace = space(store, overwrite=True)
    await workspace.open()
    store.before[at] = refuse
    with pytest.raises(StorageError):
        await workspace.publish()

    assert not workspace.published
    await workspace.discard()
    assert store.there == left


async def test_what_a_cancelled_open_made_is_discarded() -> None:
    store, go_on = FakeStore(), threading.Event()
    loop, begun = LoopHandle(), Event()

    def hold() -> None:
        loop.post(begun.set)
        go_on.wait(60)

    store.before["make_held"] = hold
    workspace = space(store)
    scope = CancelScope()

    async def open_it() -> None:
        with scope:
            await workspace.open("d")

    async with create_task_group() as tasks:
        tasks.start_soon(open_it)
        await begun.wait()
        scope.cancel()
        go_on.set()

    await workspace.discard()
    assert store.there == {}


def test_what_a_natively_cancelled_open_made_is_discarded() -> None:
    async def main() -> None:
        store, go_on = FakeStore(), threading.Event()
        loop, begun = LoopHandle(), Event()

        def hold() -> None:
            loop.post(begun.set)
            go_on.wait(60)

        store.before["make_held"] = hold
        workspace = space(store)
        task = asyncio.ensure_future(workspace.open())
        await begun.wait()
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert store.there == {TEMPORARY: "new"}
        await workspace.discard()
        assert store.there == {}

    anyio.run(main, backend="asyncio")


async def test_a_workspace_on_a_disk(tmp_path: Path) -> None:
    final, temporary = tmp_path / "runs" / "7", tmp_path / "runs" / "7.tmp"
    for generation in ("first", "second"):
        workspace = Workspace(LocalStore(), Threads(), str(final), str(temporary), overwrite=True)
        workspace.check()
        await workspace.open("d")
        write(workspace.path("d/generation"), generation)
        await workspace.publish()
        assert (final / "d" / "generation").read_text() == generation
        assert not temporary.exists()

    workspace = Workspace(LocalStore(), Threads(), str(final), str(temporary), overwrite=True)
    await workspace.open("d")
    await workspace.discard()
    assert (final / "d" / "generation").read_text() == "second"
    assert not temporary.exists()


async def test_two_never_build_in_one_place() -> None:
    store = FakeStore()
    first, second = space(store, overwrite=True), space(store, overwrite=True)
    await first.open()
    store.there[f"{TEMPORARY}/data"] = "of the first"

    with pytest.raises(InUseError, match=r"7\.tmp") as caught:
        await second.open()
    await second.discard()
    second.release()

    assert caught.value.errno == errno.EBUSY
    assert f"{TEMPORARY}/data" in store.there, "what the first has built is not the second's to remove"
    first.release()
    await second.open()
    assert store.there == {TEMPORARY: "new"}


async def test_who_is_overtaken_while_making_the_place_removes_nothing() -> None:
    store = FakeStore()
    store.before["make_held"] = lambda: store.there.update({TEMPORARY: "new"})
    workspace = space(store)

    with pytest.raises(InUseError):
        await workspace.open()
    await workspace.discard()

    assert store.there == {TEMPORARY: "new"}


async def test_what_is_briefly_held_is_replaced_a_moment_later() -> None:
    store = FakeStore(FINAL)
    workspace = space(store, overwrite=True)
    await workspace.open()

    def refuse_once() -> None:
        del store.before["exchange"]
        raise InUseError(FINAL)

    store.before["exchange"] = refuse_once
    await workspace.publish()

    assert store.there == {FINAL: "new"}
    assert store.held == set(), "what is published is held no more"


async def test_what_is_deleted_while_it_is_replaced_is_published_anew() -> None:
    store = FakeStore(FINAL)
    workspace = space(store, overwrite=True)
    await workspace.open()

    def delete() -> None:
        del store.before["exchange"], store.there[FINAL]
        raise StorageError("exchange", FINAL, "is not there", errno.ENOENT)

    store.before["exchange"] = delete
    await workspace.publish()

    assert store.there == {FINAL: "new"}


async def test_what_stays_held_is_not_replaced() -> None:
    store = FakeStore(FINAL)
    workspace = space(store, overwrite=True)
    await workspace.open()

    def refuse_always() -> None:
        raise InUseError(FINAL)

    store.before["exchange"] = refuse_always
    with pytest.raises(InUseError):
        await workspace.publish()
    await workspace.discard()

    assert store.there == {FINAL: "old"}


async def test_a_save_that_replaced_another_never_touches_what_a_third_builds(tmp_path: Path) -> None:
    """Between any two operations of the first save's publication, a second one tries to build there."""
    final, temporary = str(tmp_path / "7"), str(tmp_path / "7.tmp")
    at = 0
    while True:
        at += 1
        os.makedirs(f"{final}/of the old")
        store = FaultyStore(LocalStore())
        first = Workspace(store, Threads(), final, temporary, overwrite=True)
        await first.open("of the first")
        second = Workspace(LocalStore(), Threads(), final, temporary, overwrite=True)
        begun = len(store.operations)
        hang = store.hang_at(begun + at)
        is_second = False
        async with create_task_group() as tasks:
            if at > N_PUBLISHING:
                await first.publish()
            else:
                tasks.start_soon(first.publish)
                await hang.wait_reached()

            with suppress(InUseError):
                await second.open("of the second")
                is_second = True

            hang.release()

        if is_second:
            assert os.listdir(temporary) == ["of the second"], f"after operation {at}"
            await second.publish()

        assert os.listdir(final) == ["of the second" if is_second else "of the first"]
        assert os.listdir(tmp_path) == ["7"]
        shutil.rmtree(final)
        if at > N_PUBLISHING:
            break

    assert len(store.operations) - begun == N_PUBLISHING
    assert is_second


N_PUBLISHING = 6  # identity, kind, hold_reading, exchange, sync_directory, discard
