"""Processes that finish the steps of a killed job agree, whichever of them comes first."""

from __future__ import annotations

import errno
from pathlib import Path

import anyio
import pytest

from penstock.errors import CoordinationError, StorageError
from penstock.handlers import LocalStore
from penstock.handlers.coordinators import JobCoordinator
from penstock.handlers.coordinators.job_options import JobLimits
from penstock.handlers.coordinators.store_key_values import StoreKeyValues
from penstock.kernel import StoreWrapper
from penstock.steps.finishing import PLACE, finish_together
from penstock.steps.tier_record import TierRecord

pytestmark = pytest.mark.anyio

LIMITS = JobLimits(join_s=200.0, silence_s=200.0)


def record(root: Path) -> TierRecord:
    return TierRecord(str(root), processes=(0, 1))


async def agree(coordinator: JobCoordinator) -> None:
    """Return once all processes have come."""

    async def begin(_: object) -> tuple[str, bytes]:
        return "", b""

    operation = coordinator.operation("work")
    async with operation.running():
        operation.at("open")
        await operation.agree(b"come", list, begin)


async def test_who_came_to_an_attempt_that_was_given_up_goes_on_to_the_next(tmp_path: Path) -> None:
    """As one does that a keeper starts before the others, after a new job had ended the attempt before."""
    StoreKeyValues(LocalStore(), f"{tmp_path}/{PLACE}").put("attempt", b"given up", True)
    n_tried, came = [0, 0], anyio.Event()

    async def early(coordinator: JobCoordinator) -> None:
        n_tried[1] += 1
        came.set()
        await agree(coordinator)

    async def late(coordinator: JobCoordinator) -> None:
        n_tried[0] += 1
        await agree(coordinator)

    with anyio.fail_after(60):  # far less than they would wait for each other
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(finish_together, record(tmp_path), 1, early, LIMITS)
            await came.wait()
            tasks.start_soon(finish_together, record(tmp_path), 0, late, LIMITS)

    assert n_tried == [1, 2]
    assert not (tmp_path / PLACE).exists(), "the last one removes it"


class BusyStore(StoreWrapper):
    """A store in which others write again and again into the directory that is to be removed as a whole."""

    def remove_tree(self, path: str) -> None:
        if path.endswith(PLACE):
            raise StorageError("remove", path, "Directory not empty", errno.ENOTEMPTY)

        self.inner.remove_tree(path)


async def test_who_still_writes_in_an_earlier_attempt_hinders_no_newer_one(tmp_path: Path) -> None:
    store = BusyStore(LocalStore())
    StoreKeyValues(store, f"{tmp_path}/{PLACE}").put("attempt", b"given up", True)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for process in (1, 0):
                tasks.start_soon(finish_together, record(tmp_path), process, agree, LIMITS, store)


async def test_what_fails_in_the_newest_attempt_is_raised(tmp_path: Path) -> None:
    async def fail(coordinator: JobCoordinator) -> None:
        raise StorageError("write", str(tmp_path), "it is full")

    with pytest.raises(StorageError, match="it is full"):
        await finish_together(record(tmp_path), 0, fail, LIMITS)


async def test_the_first_one_is_waited_for_no_longer_than_the_limit(tmp_path: Path) -> None:
    with pytest.raises(CoordinationError, match="of process 0"):
        await finish_together(record(tmp_path), 1, agree, JobLimits(join_s=0.1))
