"""A save or a restore of any kind, any of whose store operations fails, leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contract.scenarios import RESTORINGS, SAVINGS, Place, no_task_is_left, numbers_in

from penstock.errors import PenstockError, StorageError
from penstock.handlers import LocalStore
from penstock.testing import FaultyStore

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

AFTER_PUBLISHING = {"identity", "discard", "kind", "sync_directory"}
"""What is done once the new checkpoint has its own name. What it replaced may then stay beside it."""


@pytest.mark.sweep
@pytest.mark.parametrize("fault", ["fail", "tear"])
@pytest.mark.parametrize("kind", SAVINGS)
async def test_a_save_whose_kth_operation_fails_leaves_nothing_behind(
    folder: Path, kind: str, fault: str
) -> None:
    place = Place(folder, SAVINGS[kind])
    await place.prepare()
    at, published = 0, False
    while True:
        at += 1
        place.store = FaultyStore(LocalStore())
        error = StorageError("any", "path", f"operation {at}", 5)
        (place.store.fail_at if fault == "fail" else place.store.tear_at)(at, error)
        raised: list[PenstockError] = []
        with no_task_is_left():
            try:
                async with place.open() as checkpointer:
                    await (await place.save(checkpointer, 2))
            except PenstockError as failure:
                raised.append(failure)

        operations = [operation.name for operation in place.store.operations]
        published = "exchange" in operations and at > operations.index("exchange") + 1
        if at > len(operations):
            break
        place.check_idle()
        if published:  # what was replaced may lie beside it, until the next save
            assert operations[at - 1] in AFTER_PUBLISHING
            assert await place.number() == 2
        else:
            assert raised == [error] or (not raised and operations[at - 1] in OPTIONAL)
            assert await place.check(2) is (not raised)

        await place.check_next_save(read=at % 10 == 0)

    assert published
    place.store = FaultyStore(LocalStore())
    assert await place.check(2)


OPTIONAL = {"share", "identity", "data.allocate", "hold_reading"}
"""What a save can do without: what cannot be linked is written."""


@pytest.mark.sweep
@pytest.mark.parametrize("kind", RESTORINGS)
async def test_a_restore_whose_kth_operation_fails_holds_nothing(folder: Path, kind: str) -> None:
    restoring = RESTORINGS[kind]
    place = Place(folder, restoring.saving)
    await place.prepare()
    at = 0
    while True:
        at += 1
        place.store = FaultyStore(LocalStore())
        error = StorageError("any", "path", f"operation {at}", 5)
        place.store.fail_at(at, error)
        raised: list[PenstockError] = []
        found: set[int] = set()
        with no_task_is_left():
            try:
                async with place.open() as checkpointer:
                    found = numbers_in(await checkpointer.restore(place.new, **restoring.keywords()))
            except PenstockError as failure:
                raised.append(failure)

        if at > len(place.store.operations):
            break
        assert raised == [error] or (not raised and found == {1})
        assert await place.check(2, files=kind != "mmap") is False
        place.made.clear()

    assert at > 10
    assert found == {1}
