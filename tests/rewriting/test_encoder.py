"""The process that encodes: what it is asked for, and what becomes of that when it is lost."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from anyio.abc import Process

import penstock
from penstock.config import Config
from penstock.errors import CorruptCheckpointError, DestinationExistsError, PenstockError, StorageError
from penstock.handlers import LocalStore
from penstock.kernel import MemoryRegulator, Store, get_logger
from penstock.rewriting.encoder import Encoded, Encoder
from penstock.stores.store_finder import StoreFinder
from penstock.testing import FaultyStore

pytestmark = [pytest.mark.process, pytest.mark.timeout(240), pytest.mark.anyio]

AssertSame = Callable[[Any, Any], None]
MIB = 2**20
ZSTD = penstock.SaveFormat(codec="zstd:1")


def state() -> dict[str, Any]:
    return {"w": np.arange(MIB, dtype=np.float32), "n": 1}


@asynccontextmanager
async def encoder(
    command: Sequence[str] = (sys.executable,), store: Store | None = None
) -> AsyncGenerator[Encoder]:
    config, memory = Config(), MemoryRegulator(256 * MIB)
    made = Encoder(config, StoreFinder(store, config.store), memory, get_logger(), command)
    try:
        yield made
    finally:
        await made.close()
        assert memory.statistics().leased == 0


async def encode(made: Encoder, source: Path, target: Path, store: Store | None = None) -> Encoded:
    store = store or LocalStore()
    return await made.encode(store, str(source), store, str(target), ZSTD, overwrite=False)


async def test_one_process_encodes_one_checkpoint_after_another(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    await penstock.save(tmp_path / "a", state())
    async with encoder() as made:
        done = [await encode(made, tmp_path / "a", tmp_path / name) for name in ("b", "c")]
        assert made.process is not None

    assert all(each.processor_s is not None and each.processor_s < 60 for each in done)
    assert done[0].processor_s != done[1].processor_s
    for name in ("b", "c"):
        assert_same(await penstock.restore(tmp_path / name), state())


async def test_it_says_what_is_wrong_and_goes_on(tmp_path: Path, assert_same: AssertSame) -> None:
    await penstock.save(tmp_path / "a", state())
    damaged = await penstock.save(tmp_path / "damaged", state())
    file = max(Path(damaged.path).rglob("*"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    async with encoder() as made:
        with pytest.raises(CorruptCheckpointError, match="differ from those written"):
            await encode(made, tmp_path / "damaged", tmp_path / "b")
        with pytest.raises(StorageError):
            await encode(made, tmp_path / "a", Path("/proc/no/such/place"))
        with pytest.raises(PenstockError, match="exists"):
            await encode(made, tmp_path / "a", tmp_path / "damaged")

        await encode(made, tmp_path / "a", tmp_path / "b")

    assert_same(await penstock.restore(tmp_path / "b"), state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "damaged"]


@pytest.mark.parametrize("command", [("/bin/false",), ("/no/such/program",), ("/bin/echo",)])
async def test_where_no_process_can_be_started_this_one_encodes(
    command: tuple[str], tmp_path: Path, assert_same: AssertSame, caplog: pytest.LogCaptureFixture
) -> None:
    await penstock.save(tmp_path / "a", state())
    async with encoder(command) as made:
        done = await encode(made, tmp_path / "a", tmp_path / "b")

    assert done.processor_s is None
    assert_same(await penstock.restore(tmp_path / "b"), state())
    assert "step.encoder_lost" in caplog.text


async def test_what_a_killed_process_leaves_undone_is_done_here_and_the_next_has_a_new_one(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    await penstock.save(tmp_path / "a", state())
    async with encoder() as made:
        await encode(made, tmp_path / "a", tmp_path / "b")
        assert made.process is not None
        made.process.send_signal(signal.SIGKILL)
        await made.process.wait()
        undone = await encode(made, tmp_path / "a", tmp_path / "c")
        again = await encode(made, tmp_path / "a", tmp_path / "d")

    assert undone.processor_s is None
    assert again.processor_s is not None
    assert_same(await penstock.restore(tmp_path / "c"), state())


async def test_a_signal_to_the_whole_group_does_not_end_it(tmp_path: Path) -> None:
    """As Ctrl-C, or what ends a job: the training still brings its steps where they go."""
    await penstock.save(tmp_path / "a", state())
    async with encoder() as made:
        await encode(made, tmp_path / "a", tmp_path / "b")
        assert made.process is not None
        for each in (signal.SIGINT, signal.SIGTERM):
            made.process.send_signal(each)

        done = await encode(made, tmp_path / "a", tmp_path / "c")

    assert done.processor_s is not None


async def test_a_cancelled_encoding_leaves_nothing_and_no_process(tmp_path: Path) -> None:
    await penstock.save(tmp_path / "a", {"w": np.random.default_rng(0).random(16 * MIB)})
    process: Process | None = None
    async with encoder() as made:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(encode, made, tmp_path / "a", tmp_path / "b")
            await until_something_is_next_to_it(tmp_path)
            process = made.process
            tasks.cancel_scope.cancel()

        assert process is not None
        assert process.returncode is not None
        assert made.process is None

    assert [path.name for path in tmp_path.iterdir()] == ["a"]


async def until_something_is_next_to_it(folder: Path) -> None:
    """Return when there is something next to the checkpoint: another one is built."""
    with anyio.fail_after(120):
        while len(list(folder.iterdir())) < 2:
            await anyio.lowlevel.checkpoint()


async def test_what_no_other_process_can_reach_is_encoded_here(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    store = FaultyStore(LocalStore())
    await penstock.save(tmp_path / "a", state())
    async with encoder(store=store) as made:
        done = await encode(made, tmp_path / "a", tmp_path / "b", store)
        assert made.process is None
        with pytest.raises(DestinationExistsError):
            await encode(made, tmp_path / "a", tmp_path / "b", store)

    assert done.processor_s is None
    assert_same(await penstock.restore(tmp_path / "b"), state())
