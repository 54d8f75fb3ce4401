"""Checkpoints of many files, one for each chunk: they are written and read several at a time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tests.object_server import BUCKET, CREDENTIALS, InMemory, Stored, object_server

import penstock
from penstock import Checkpointer, SaveFormat
from penstock.config import Config
from penstock.handlers import LocalStore
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

AssertSame = Callable[[Any, Any], None]
COUNT = 100
PLAIN = SaveFormat(ocdbt=False)


def tree() -> dict[str, Any]:
    return {f"w{number:03}": np.full(3, number, np.float32) for number in range(COUNT)}


async def test_the_mark_is_written_when_all_else_is_there(tmp_path: Path, assert_same: AssertSame) -> None:
    store = FaultyStore(LocalStore())
    async with Checkpointer(store=store, save_format=PLAIN) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", tree()))
        assert_same(await checkpointer.restore(tmp_path / "a"), tree())

    written = [done.path.rsplit("/", 1)[1] for done in store.operations if done.name == "write_file"]
    assert len(written) > 2 * COUNT
    assert written.index("commit_success.txt") == len(written) - 1
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        assert_same(orbax.restore(tmp_path / "a"), tree())


@pytest.mark.parametrize("number", [1, COUNT // 2, COUNT, COUNT + 1, COUNT + 70, 2 * COUNT])
async def test_a_failure_among_many_files_leaves_nothing(tmp_path: Path, number: int) -> None:
    store = FaultyStore(LocalStore())
    store.fail_on("write_file", number)
    async with Checkpointer(store=store, save_format=PLAIN) as checkpointer:
        save = await checkpointer.save(tmp_path / "a", tree())
        with pytest.raises(penstock.errors.StorageError):
            await save

        assert checkpointer.statistics().leased == 0

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [1, COUNT // 2, COUNT])
async def test_damage_in_one_of_many_files_names_its_leaf(tmp_path: Path, number: int) -> None:
    async with Checkpointer(save_format=PLAIN) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", tree()))
        chunk = tmp_path / "a" / f"w{number - 1:03}" / "0"
        content = bytearray(chunk.read_bytes())
        content[5] ^= 1
        chunk.write_bytes(content)
        with pytest.raises(penstock.errors.ChecksumError) as caught:
            await checkpointer.restore(tmp_path / "a")

    assert caught.value.key_path == f"['w{number - 1:03}']"


class Meeting(InMemory):
    """Objects that are answered once two of a kind have been asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self.met = {name: threading.Event() for name in ("0", ".zarray")}

    def get(self, key: str, span: str | None = None) -> Stored | None:
        name = key.rsplit("/", 1)[-1]
        if name in self.met:
            with self.lock:
                self.asked[name] += 1
                if self.asked[name] == 2:
                    self.met[name].set()

            self.met[name].wait(20)

        return super().get(key, span)


async def test_many_objects_of_a_bucket_are_read_several_at_a_time(
    monkeypatch: pytest.MonkeyPatch, assert_same: AssertSame
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)

    objects = Meeting()
    with object_server(objects) as server:
        config = Config.load(arguments={"store": {"s3": {"endpoint": server.endpoint}}})
        async with Checkpointer(config=config, save_format=PLAIN) as checkpointer:
            await (await checkpointer.save(f"s3://{BUCKET}/a", tree()))
            with anyio.fail_after(15):
                assert_same(await checkpointer.restore(f"s3://{BUCKET}/a"), tree())

    assert all(met.is_set() for met in objects.met.values())
