"""The place that several processes build in: under a name of its own, which later saves do not have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.handlers.stores.local import LocalStore
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import StorageError
from penstock.kernel.storage.joined_workspace import JoinedWorkspace
from penstock.kernel.storage.workspace import Workspace

pytestmark = pytest.mark.anyio


async def opened(root: Path, name: str, *, overwrite: bool = False) -> Workspace:
    final = str(root / "step_1")
    workspace = Workspace(LocalStore(), Threads(), final, f"{final}.tmp", overwrite=overwrite)
    workspace.build_below(name)
    await workspace.open()
    return workspace


def joined(primary: Workspace) -> JoinedWorkspace:
    found = JoinedWorkspace(LocalStore(), Threads(), primary.final)
    found.enter(primary.path(""))
    return found


def write(workspace: Workspace | JoinedWorkspace, name: str, data: bytes) -> None:
    file = LocalStore().create_data_file(workspace.path(name))
    file.write_at(0, [memoryview(data)])
    file.close()


async def test_what_all_have_built_is_published_and_nothing_else_is_left(tmp_path: Path) -> None:
    for content in (b"old", b"new"):
        primary = await opened(tmp_path, content.decode(), overwrite=True)
        other = joined(primary)
        await other.open("ocdbt.process_1/d")
        write(other, "ocdbt.process_1/d/x", content)
        await primary.publish()
        await other.publish()
        assert other.identity == primary.identity
        primary.release()

    assert os.listdir(tmp_path) == ["step_1"]
    assert (tmp_path / "step_1/ocdbt.process_1/d/x").read_bytes() == b"new"


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
    asleep = joined(primary)
    await asleep.open("ocdbt.process_1")
    await primary.discard()
    primary.release()

    again = await opened(tmp_path, "b")
    await joined(again).open("ocdbt.process_1")
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
