"""Checkpoints in a keeper's memory, by their URL: all that reads and writes checkpoints works there."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from anyio import to_thread
from tests.keeper.conftest import Start, pages_in_use
from tests.own_files import REPORTS

import penstock
from penstock import Checkpointer, CheckpointManager
from penstock.cli import main
from penstock.errors import PathError
from penstock.steps import KeepLast

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

AssertSame = Callable[[Any, Any], None]

STATE = {"w": np.arange(300_000.0), "b": [np.ones(3, np.float16), None], "n": 3}

URL = "keeper://localhost/run"


@pytest.fixture
def keeper(start: Start, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The keeper that the configuration names."""
    keeper = start()
    monkeypatch.setenv("PENSTOCK_STORE__KEEPER__SOCKET", keeper.socket)
    return keeper


@pytest.mark.parametrize(
    "path", ["keeper:///run/1", Path("keeper:///run/1"), "keeper://localhost/run/1"], ids=repr
)
async def test_a_tree_is_saved_replaced_and_restored_by_its_url(
    keeper: Any, assert_same: AssertSame, path: Any
) -> None:
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(path, {"n": 0}))
        await (await checkpointer.save(path, STATE, overwrite=True))
        assert_same(await checkpointer.restore(path), STATE)
        assert (await checkpointer.verify(path)).intact

    store = keeper.store()
    assert list(store.list_directory("/run")) == ["1"]
    assert [step.path for step in store.status().steps] == ["run/1"]


async def test_what_was_saved_is_mapped_and_verified(keeper: Any) -> None:
    state = {"w": jax.numpy.arange(2**20, dtype="float32"), "n": 1}
    await penstock.save(f"{URL}/1", state)
    found = await penstock.restore(f"{URL}/1", mmap=True, verify=True)
    assert found["w"].tobytes() == np.asarray(state["w"]).tobytes()


async def test_steps_are_managed_deleted_and_linked(keeper: Any, assert_same: AssertSame) -> None:
    async with CheckpointManager(URL, keep=KeepLast(2)) as manager:
        for step in (1, 2, 3):
            save = await manager.save(step, {**STATE, "n": step})
            assert save is not None
            await save

        await manager.wait()
        assert list(manager.all_steps()) == [2, 3]
        assert_same((await manager.restore())["w"], STATE["w"])

    reports = json.loads(keeper.store().read_file(f"/run/{REPORTS}"))["reports"]
    assert [each["name"] for each in reports if "staged_s" in each] == ["1", "2", "3"]
    assert set(keeper.store().list_directory("/run")) == {"2", "3", REPORTS}


async def test_a_manager_that_is_left_has_no_pages_of_the_keeper_mapped(keeper: Any) -> None:
    gc.collect()
    before = pages_in_use()
    gc.disable()  # its parts refer to each other, and a cycle may live for hours
    try:
        async with CheckpointManager(URL, keep=KeepLast(1)) as manager:
            for step in range(4):
                save = await manager.save(step, {"w": np.full(300_000, step)})
                assert save is not None
                await save

            assert pages_in_use() > before, "pages that are written again are mapped"

        assert pages_in_use() <= before
    finally:
        gc.enable()


async def test_the_command_line_looks_at_it(keeper: Any, capsys: pytest.CaptureFixture[str]) -> None:
    await penstock.save(f"{URL}/7", STATE)
    for command in (["ls", URL], ["verify", f"{URL}/7"], ["show", f"{URL}/7"], ["du", f"{URL}/7"]):
        assert await to_thread.run_sync(main, command) == 0
        assert capsys.readouterr().out

    assert await to_thread.run_sync(main, ["gc", URL]) == 0
    assert await to_thread.run_sync(main, ["rm", f"{URL}/7"]) == 0
    assert keeper.store().kind("/run/7") is None


async def test_doctor_says_if_a_keeper_can_be_written_and_read(
    keeper: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await to_thread.run_sync(main, ["doctor", URL]) == 0
    assert "write and read\tyes\tok" in capsys.readouterr().out
    assert keeper.store().list_directory("/") == []

    keeper.kill()
    assert await to_thread.run_sync(main, ["doctor", URL]) == 1
    assert "write and read\tno\tmissing\task the keeper at" in capsys.readouterr().out


async def test_a_checkpoint_is_copied_to_a_disk_and_back(
    keeper: Any, tmp_path: Path, assert_same: AssertSame
) -> None:
    await penstock.save(f"{URL}/7", STATE)
    assert await to_thread.run_sync(main, ["cp", f"{URL}/7", str(tmp_path / "7")]) == 0
    assert_same(await penstock.restore(tmp_path / "7"), STATE)
    assert await to_thread.run_sync(main, ["cp", str(tmp_path / "7"), f"{URL}/8"]) == 0
    assert_same(await penstock.restore(f"{URL}/8"), STATE)


async def test_a_trainer_that_is_killed_leaves_its_step_whole_and_nothing_of_the_next(keeper: Any) -> None:
    program = """
import os, signal, numpy as np, penstock.sync as penstock
state = {"w": np.arange(2**20, dtype=np.float32), "n": 5}
penstock.save("keeper:///run/5", state)

from penstock.handlers.stores.keeper import keeper_store
def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
keeper_store.KeeperStore.publish = killed
penstock.save("keeper:///run/6", state)
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = await to_thread.run_sync(
        lambda: subprocess.run([sys.executable, "-c", program], env=environ, check=False, timeout=120)
    )
    assert ended.returncode == -signal.SIGKILL
    found = await penstock.restore("keeper:///run/5", mmap=True, verify=True)
    assert found["w"].tobytes() == np.arange(2**20, dtype=np.float32).tobytes()
    assert found["n"] == 5
    store = keeper.store()
    await penstock.save("keeper:///run/6", STATE)
    assert list(store.list_directory("/run")) == ["5", "6"]


async def test_no_pages_are_made_for_what_is_encoded_beside_a_step_and_goes_at_once(keeper: Any) -> None:
    store, state = keeper.store(), {"w": np.arange(2**20)}
    await penstock.save(f"{URL}/1", state)
    fresh = store.status().fresh_bytes
    for _ in range(3):
        await penstock.save(f"{URL}/_PENSTOCK_ENCODED-1-0/1", state)
        store.remove_tree(f"{URL}/_PENSTOCK_ENCODED-1-0")

    assert store.status().fresh_bytes <= fresh + 2**23 + 2**20, "those of the first go to the others"


async def test_pages_are_used_again(keeper: Any) -> None:
    state, fresh = {"w": np.arange(2**20)}, 0
    async with CheckpointManager(URL, keep=KeepLast(1)) as manager:
        for step in range(6):
            save = await manager.save(step, state)
            assert save is not None
            await save
            await manager.wait()
            if step == 2:
                fresh = keeper.store().status().fresh_bytes

    status = keeper.store().status()
    assert status.fresh_bytes - fresh <= 2**20, "from the third save on the pages are used again"
    assert status.reused_bytes >= 3 * 2**23
    assert status.used_bytes <= 3 * 2**23 + 2**21, "one kept, one built, one ready"
    assert status.fresh_bytes <= 4 * 2**23, "none are made ready where a step that goes gives back its own"


@pytest.mark.parametrize("path", ["keeper://elsewhere/run/1", "keeper:///", "keeper:///run/../x"])
async def test_a_path_that_leads_nowhere_is_refused(keeper: Any, path: str) -> None:
    with pytest.raises(PathError):
        await penstock.save(path, STATE)


async def test_safetensors_are_saved_and_restored(keeper: Any, assert_same: AssertSame) -> None:
    from penstock.handlers import SafetensorsLayout

    state = {"w": np.arange(5000.0)}
    async with Checkpointer(layout=SafetensorsLayout()) as checkpointer:
        await (await checkpointer.save(f"{URL}/tensors", state))

    assert_same(await penstock.restore(f"{URL}/tensors"), state)


def test_status_says_what_it_holds(keeper: Any, capsys: pytest.CaptureFixture[str]) -> None:
    penstock.sync.save(f"{URL}/7", STATE)
    assert main(["keeper", "status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pid"] == keeper.process.pid
    assert [(step["path"], step["state"]) for step in found["steps"]] == [("run/7", "whole")]
    assert found["steps"][0]["nbytes"] >= 300_000 * 8
    assert main(["--table", "keeper", "status"]) == 0
    shown = capsys.readouterr().out
    assert "run/7" in shown
    assert "elsewhere" in shown
    assert main(["keeper", "stop"]) == 1
    assert "run/7; --force loses that" in capsys.readouterr().err
    assert main(["keeper", "stop", "--force"]) == 0
    assert keeper.process.wait(60) == 0
    assert main(["keeper", "status"]) == 1
    assert "penstock keeper run" in capsys.readouterr().err


def test_run_is_refused_what_it_cannot_do(keeper: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keeper", "run", "--limit", "many"]) == 1
    assert "many" in capsys.readouterr().err
    command = [sys.executable, "-m", "penstock", "keeper", "run"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run(command, env=environ, check=False, timeout=60).returncode == 3
