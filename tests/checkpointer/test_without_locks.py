"""Savers and deletions on a file system without locks: files with claims take the place of the locks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from penstock import Checkpointer
from penstock.errors import InUseError
from penstock.handlers.stores.publishing import delete_checkpoint
from penstock.testing import FaultyStore, lockless_store

pytestmark = pytest.mark.anyio

KILLED = """
import os, sys, threading
import anyio, numpy as np, penstock
from penstock.handlers.stores.publishing.deletion import delete_checkpoint
from penstock.testing import FaultyStore, lockless_store

what, operation, path = sys.argv[1:]
store = FaultyStore(lockless_store())
hang = store.hang_on(operation)

def die():
    hang.wait_reached_blocking()
    os.kill(os.getpid(), 9)

async def save():
    async with penstock.Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(path, {"a": np.full(3, 9)}, overwrite=True))

threading.Thread(target=die, daemon=True).start()
if what == "save":
    anyio.run(save)
else:
    delete_checkpoint(store, path, path + ".gone")
"""


def killed(what: str, operation: str, path: Path) -> None:
    """Have another process begin something and be killed in the midst of it."""
    command = [sys.executable, "-c", KILLED, what, operation, str(path)]
    assert subprocess.run(command, check=False, timeout=100).returncode == -9


@pytest.fixture
def path(folder: Path) -> Path:
    folder.mkdir()
    return folder / "latest"


def tree(number: int) -> dict[str, Any]:
    return {"a": np.full(3, number)}


async def save(checkpointer: Checkpointer, path: Path, number: int) -> None:
    await (await checkpointer.save(path, tree(number), overwrite=True))


async def restored(path: Path) -> int:
    async with Checkpointer(store=lockless_store()) as checkpointer:
        found = await checkpointer.restore(path)

    return int(found["a"][0])


async def test_the_second_of_two_savers_at_one_path_is_refused_with_the_holder_of_the_claim(
    path: Path,
) -> None:
    store = FaultyStore(lockless_store())
    async with Checkpointer(store=store) as one, Checkpointer(store=lockless_store()) as other:
        await save(one, path, 1)
        for operation in ("exchange", "discard"):  # before and after the new one is visible
            count = [done.name for done in store.operations].count(operation)
            hang = store.hang_on(operation, count + 1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(save, one, path, 2)
                await hang.wait_reached()
                with pytest.raises(InUseError) as caught:
                    await save(other, path, 3)
                hang.release()
                claim = path.parent / ".latest.orbax-checkpoint-tmp.penstock-claim"
                assert f"process {os.getpid()} of " in caught.value.more
                assert f"remove {claim}" in caught.value.more

            assert await restored(path) == 2

        await save(other, path, 3)

    assert await restored(path) == 3
    assert os.listdir(path.parent) == ["latest"]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("operation", ["create_data_file", "exchange", "discard"])
def test_what_a_killed_saver_claimed_and_left_is_taken_over_by_the_next(path: Path, operation: str) -> None:
    async def begin() -> None:
        async with Checkpointer(store=lockless_store()) as checkpointer:
            await save(checkpointer, path, 1)

    async def go_on() -> None:
        assert await restored(path) == (9 if operation == "discard" else 1)
        async with Checkpointer(store=lockless_store()) as checkpointer:
            await save(checkpointer, path, 2)

        assert await restored(path) == 2

    anyio.run(begin)
    killed("save", operation, path)
    assert len(os.listdir(path.parent)) == 3  # the checkpoint, the place of the other one, and its claim
    anyio.run(go_on)
    assert os.listdir(path.parent) == ["latest"]


def test_what_a_killed_deletion_claimed_can_be_read_and_overwritten(path: Path) -> None:
    async def begin() -> None:
        async with Checkpointer(store=lockless_store()) as checkpointer:
            await save(checkpointer, path, 1)

    async def go_on() -> None:
        assert await restored(path) == 1
        async with Checkpointer(store=lockless_store()) as checkpointer:
            await save(checkpointer, path, 2)

        assert await restored(path) == 2

    anyio.run(begin)
    killed("delete", "rename", path)
    assert sorted(os.listdir(path.parent)) == [".latest.penstock-claim", "latest"]
    anyio.run(go_on)
    assert os.listdir(path.parent) == ["latest"]


async def test_a_claim_from_another_machine_refuses_until_it_is_removed(path: Path) -> None:
    async with Checkpointer(store=lockless_store()) as checkpointer:
        await save(checkpointer, path, 1)
        held = lockless_store().hold(str(path))
        claim = path.parent / ".latest.penstock-claim"
        text = claim.read_text()
        held.release()
        for name, there in (("host", "far-"), ("boot", "other-"), ("process", "other-")):
            text = text.replace(f'"{name}": "', f'"{name}": "{there}')

        claim.write_text(text)
        with pytest.raises(InUseError, match=r"of far-.*if that has ended, remove .*latest\.penstock-claim"):
            delete_checkpoint(lockless_store(), str(path), f"{path}.gone")
        with pytest.raises(InUseError, match="of far-"):
            await save(checkpointer, path, 2)

        assert await restored(path) == 1
        claim.unlink()
        await save(checkpointer, path, 2)

    assert os.listdir(path.parent) == ["latest"]
