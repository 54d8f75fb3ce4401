"""The place that several processes build in: under a name of its own, which later saves do not have."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import InUseError, StorageError
from penstock.handlers import LocalStore
from penstock.handlers.stores.publishing.workspace import Workspace
from penstock.kernel import StoreWrapper, Threads

pytestmark = pytest.mark.anyio


class WakingStore(StoreWrapper):
    """A local store that calls something before its first rename."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(LocalStore())
        self._wake: Callable[[], None] | None = wake

    def rename(self, source: str, destination: str) -> None:
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

        super().rename(source, destination)


async def opened(root: Path, name: str, *, overwrite: bool = False) -> Workspace:
    final = str(root / "step_1")
    workspace = Workspace(LocalStore(), Threads(), final, f"{final}.tmp", overwrite=overwrite)
    workspace.build_below(name)
    await workspace.open()
    return workspace


async def joined(primary: Workspace) -> Workspace:
    found = Workspace(LocalStore(), Threads(), primary.final, "", overwrite=False, joins=True)
    await found.enter(primary.path(""))
    return found


def write(workspace: Workspace, name: str, data: bytes) -> None:
    file = LocalStore().create_data_file(workspace.path(name))
    file.write_at(0, [memoryview(data)])
    file.close()


async def test_what_all_have_built_is_published_and_nothing_else_is_left(tmp_path: Path) -> None:
    for content in (b"old", b"new"):
        primary = await opened(tmp_path, content.decode(), overwrite=True)
        other = await joined(primary)
        await other.open("ocdbt.process_1/d")
        write(other, "ocdbt.process_1/d/x", content)
        await primary.publish()
        await other.publish()
        assert other.identity == primary.identity
        primary.release()

    assert os.listdir(tmp_path) == ["step_1"]
    assert (tmp_path / "step_1/ocdbt.process_1/d/x").read_bytes() == b"new"


async def test_one_file_of_what_all_have_built_becomes_the_checkpoint(tmp_path: Path) -> None:
    final = tmp_path / "x.safetensors"
    for content in (b"old", b"new"):
        primary = Workspace(
            LocalStore(), Threads(), str(final), f"{final}.tmp", overwrite=True, file="model.safetensors"
        )
        primary.build_below(content.decode())
        await primary.open()
        write(await joined(primary), "model.safetensors", content)
        await primary.publish()
        primary.release()
        assert primary.left_behind is None

    assert os.listdir(tmp_path) == ["x.safetensors"]
    assert final.read_bytes() == b"new"


async def test_what_was_built_is_discarded_with_its_name(tmp_path: Path) -> None:
    primary = await opened(tmp_path, "a")
    write(primary, "x", b"1")
    await primary.discard()
    primary.release()

    assert os.listdir(tmp_path) == []


async def test_what_a_killed_process_left_is_removed_by_a_save_of_any_kind(tmp_path: Path) -> None:
    killed = await opened(tmp_path, "a")
    write(killed, "x", b"1")
    killed.release()  # as the system does
    final = str(tmp_path / "step_1")
    alone = Workspace(LocalStore(), Threads(), final, f"{final}.tmp", overwrite=False)
    await alone.open()
    await alone.publish()
    alone.release()

    assert os.listdir(tmp_path) == ["step_1"]
    assert os.listdir(final) == []


async def test_who_wakes_writes_nothing_into_what_is_built_or_published_since(tmp_path: Path) -> None:
    primary = await opened(tmp_path, "a")
    asleep = await joined(primary)
    await asleep.open("ocdbt.process_1")
    await primary.discard()
    primary.release()

    again = await opened(tmp_path, "b")
    await (await joined(again)).open("ocdbt.process_1")
    for _ in range(2):
        with pytest.raises(StorageError, match="No such file"):
            write(asleep, "ocdbt.process_1/x", b"late")
        with pytest.raises(StorageError, match="the save was ended"):
            await asleep.open("ocdbt.process_1/d")
        if not again.published:
            await again.publish()
            again.release()

    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "step_1",
        "step_1/ocdbt.process_1",
    ]


async def alone(root: Path) -> Workspace:
    """Begin a save of one process to the same path, which builds in the place itself."""
    final = str(root / "step_1")
    workspace = Workspace(LocalStore(), Threads(), final, f"{final}.tmp", overwrite=False)
    await workspace.open()
    return workspace


async def test_a_place_is_taken_back_once_and_all_hear_of_it(tmp_path: Path) -> None:
    stopped = await opened(tmp_path, "a")
    write(stopped, "x", b"1")
    others = [await joined(stopped), await joined(stopped)]
    with pytest.raises(InUseError):
        await alone(tmp_path)

    assert [await other.take_back() for other in others] == [True, True]
    again = await alone(tmp_path)
    await again.publish()
    again.release()

    assert os.listdir(tmp_path) == ["step_1"]
    assert os.listdir(tmp_path / "step_1") == []
    stopped.release()


async def test_a_primary_whose_place_was_taken_changes_nothing_when_it_wakes(tmp_path: Path) -> None:
    stopped = await opened(tmp_path, "a")
    await (await joined(stopped)).take_back()
    again = await alone(tmp_path)
    write(again, "new", b"2")

    for directory in ("ocdbt.process_0/d", "d"):
        with pytest.raises(StorageError, match="the save was ended"):
            await stopped.open(directory)
    with pytest.raises(StorageError, match="No such file"):
        write(stopped, "x", b"late")
    with pytest.raises(StorageError, match="the other processes gave this save up"):
        await stopped.publish()
    await stopped.discard()
    stopped.release()

    await again.publish()
    again.release()
    assert os.listdir(tmp_path) == ["step_1"]
    assert os.listdir(tmp_path / "step_1") == ["new"]


async def test_what_the_primary_published_is_not_taken_back(tmp_path: Path) -> None:
    primary = await opened(tmp_path, "a")
    other = await joined(primary)
    write(primary, "x", b"1")
    await primary.publish()
    primary.release()
    assert not await other.take_back()

    later = await opened(tmp_path, "b", overwrite=True)  # in the place of the same name
    assert not await other.take_back()
    await later.publish()
    later.release()
    assert os.listdir(tmp_path) == ["step_1"]


async def test_what_somebody_else_has_built_since_is_put_back(tmp_path: Path) -> None:
    """The primary wakes between the look and the rename."""
    primary = await opened(tmp_path, "a")
    later: list[Workspace] = []

    def wake() -> None:
        primary.discard_now()
        primary.release()
        final = str(tmp_path / "step_1")
        later.append(Workspace(LocalStore(), Threads(), final, f"{final}.tmp", overwrite=False))
        later[0].open_now()

    other = Workspace(WakingStore(wake), Threads(), primary.final, "", overwrite=False, joins=True)
    await other.enter(primary.path(""))

    assert not await other.take_back()
    write(later[0], "new", b"2")
    await later[0].publish()
    later[0].release()
    assert os.listdir(tmp_path) == ["step_1"]
