"""The same promises for scripts that have no event loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import penstock
from penstock.errors import (
    ClosedError,
    ConfigError,
    DestinationExistsError,
    NotACheckpointError,
    SaveCancelledError,
    StorageError,
)
from penstock.handlers import LocalStore
from penstock.kernel import Milestone
from penstock.steps import Disk
from penstock.testing import FaultyStore, Hang

AssertSame = Callable[[Any, Any], None]


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(LocalStore())


def tree(fill: int = 1) -> dict[str, Any]:
    return {"device": jnp.full(100, fill), "host": np.full(100, fill), "step": fill}


def test_a_thread_waits_until_a_step_is_kept_and_no_longer(tmp_path: Path, store: FaultyStore) -> None:
    root = str(tmp_path / "run")
    with penstock.sync.CheckpointManager(root, tiers=Disk(tmp_path / "near"), store=store) as manager:
        hang = store.hang_on("create_long_file")  # of the root: the copy of what is kept
        save = manager.save(1, tree())
        assert save is not None
        save.block_until_kept(timeout=60)
        assert (save.status, save.done) == ("kept", False)
        with pytest.raises(TimeoutError, match=r"is kept after 0\.0 s"):
            save.result(timeout=0.0)

        hang.release()
        assert save.result(timeout=60).path == f"{root}/1"
        save.block_until_kept()  # it is over


def test_a_save_that_fails_before_it_is_kept_says_so_to_who_waits_for_that(
    tmp_path: Path, store: FaultyStore
) -> None:
    store.fail_on("publish")
    with penstock.sync.Checkpointer(store=store) as checkpointer:
        save = checkpointer.save(tmp_path / "a", tree())
        with pytest.raises(StorageError):
            save.block_until_kept(timeout=60)


def test_each_blocking_function_does_its_operation_in_one_call(
    tmp_path: Path, assert_same: AssertSame
) -> None:
    report = penstock.sync.save(tmp_path / "a", tree(), custom_metadata={"lr": 1})
    assert (report.n_leaves, report.path) == (3, str(tmp_path / "a"))
    assert_same(penstock.sync.restore(tmp_path / "a", like=tree(0)), tree())
    assert penstock.sync.metadata(tmp_path / "a").custom_metadata == {"lr": 1}
    with pytest.raises(DestinationExistsError):
        penstock.sync.save(tmp_path / "a", tree())
    penstock.sync.save(tmp_path / "a", tree(2), overwrite=True)
    assert penstock.sync.restore(tmp_path / "a")["step"] == 2
    with pytest.raises(NotACheckpointError):
        penstock.sync.restore(tmp_path / "b")


def test_save_returns_when_staged(tmp_path: Path, store: FaultyStore) -> None:
    hang = store.hang_on("data.write_at")
    with penstock.sync.Checkpointer(store=store) as checkpointer:
        state = tree()
        save = checkpointer.save(tmp_path / "a", state)
        assert save.milestone is Milestone.STAGED
        state["host"][:] = 7
        with pytest.raises(TimeoutError, match="is staged after"):
            save.result(0)
        hang.release()
        assert save.result(30).n_leaves == 3
        assert save.result() is save.result()
        assert checkpointer.restore(tmp_path / "a")["host"].tolist() == [1] * 100
        assert checkpointer.metadata(tmp_path / "a").nbytes == 1208
        checkpointer.wait()


def test_leaving_waits_for_the_saves(tmp_path: Path, store: FaultyStore) -> None:
    hang = store.hang_on("data.write_at")
    with ThreadPoolExecutor(1) as pool, penstock.sync.Checkpointer(store=store) as checkpointer:
        save = checkpointer.save(tmp_path / "a", tree())
        pool.submit(_release_when_reached, hang)

    assert save.done
    assert os.listdir(tmp_path) == ["a"]


def _release_when_reached(hang: Hang) -> None:
    hang.wait_reached_blocking()
    hang.release()


def test_leaving_on_an_error_cancels_and_the_error_leaves_as_itself(
    tmp_path: Path, store: FaultyStore
) -> None:
    hang = store.hang_on("data.write_at")
    save = None
    for error in (KeyError("mine"), KeyboardInterrupt(), SystemExit(3)):
        with (  # noqa: PT012  # what happens before the error is what is tested
            pytest.raises(type(error)) as caught,
            penstock.sync.Checkpointer(store=store) as checkpointer,
        ):
            save = checkpointer.save(tmp_path / "a", tree())
            save.cancel()
            hang.release()
            raise error

        assert caught.value is error
        assert os.listdir(tmp_path) == []
        hang = store.hang_on("data.write_at", 1 + sum(o.name == "data.write_at" for o in store.operations))

    assert save is not None
    with pytest.raises(SaveCancelledError):
        save.result()


def test_a_failure_nobody_waited_for_is_raised_at_the_next_save_or_on_leaving(
    tmp_path: Path, store: FaultyStore
) -> None:
    over = threading.Event()
    first, second = StorageError("write", "x", "no"), StorageError("write", "x", "not again")
    hang = store.hang_on("data.write_at", 1, then=first)
    with (  # noqa: PT012  # the last of the block is what raises
        pytest.raises(StorageError, match="not again") as caught,
        penstock.sync.Checkpointer(store=store) as checkpointer,
    ):
        save = checkpointer.save(tmp_path / "a", tree())
        save.add_done_callback(lambda _: over.set())
        hang.release()
        assert over.wait(30)
        with pytest.raises(StorageError, match="write 'x': no") as told:
            checkpointer.save(tmp_path / "b", tree())
        assert told.value is first

        store.hang_on("data.write_at", 2, then=second).release()
        checkpointer.save(tmp_path / "b", tree())  # raises by itself if it fails before it is staged

    assert caught.value is second
    assert os.listdir(tmp_path) == []


def test_a_cancel_is_heard(tmp_path: Path, store: FaultyStore) -> None:
    hang = store.hang_on("data.write_at")
    with penstock.sync.Checkpointer(store=store) as checkpointer:
        save = checkpointer.save(tmp_path / "a", tree())
        save.cancel()
        hang.release()
        with pytest.raises(SaveCancelledError):
            save.result(30)

    assert os.listdir(tmp_path) == []


def test_many_threads_share_one_blocking_checkpointer(tmp_path: Path) -> None:
    with penstock.sync.Checkpointer(memory_limit="4KiB") as checkpointer, ThreadPoolExecutor(4) as pool:

        def work(number: int) -> int:
            checkpointer.save(tmp_path / str(number), tree(number)).result(30)
            step: int = checkpointer.restore(tmp_path / str(number))["step"]
            return step

        assert list(pool.map(work, range(8))) == list(range(8))


def test_a_blocking_checkpointer_used_wrongly_is_an_error(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # other tests may have left idle ones
    checkpointer = penstock.sync.Checkpointer()
    with pytest.raises(ClosedError, match="use it inside its `with`"):
        checkpointer.save(tmp_path / "a", {})
    with checkpointer:
        checkpointer.save(tmp_path / "a", {"x": 1}).result()
    with pytest.raises(ClosedError):
        checkpointer.restore(tmp_path / "a")
    with pytest.raises(ClosedError, match="entered once"), checkpointer:
        pytest.fail("entered twice")
    with pytest.raises(ConfigError):
        penstock.sync.Checkpointer(memory_limit=0)
    with pytest.raises(TypeError, match="unexpected keyword"):
        penstock.sync.save(tmp_path / "b", {}, overwriting=True)  # type: ignore[call-arg]  # the point of the test
    assert len(set(threading.enumerate()) - before) < 10
