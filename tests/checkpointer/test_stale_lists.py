"""A server whose lists are old: what was put or deleted lately shows everywhere else, and not there.

Nothing that deletes may believe such a list: each object is decided on by what the server says of it itself.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.object_server import CREDENTIALS, InMemory, ObjectServer, object_server

import penstock
from penstock.steps import CheckpointManager, KeepLast

pytestmark = pytest.mark.anyio

ROOT = "s3://bucket/run"


@dataclass
class OldLists(InMemory):
    """Lists what was there when they froze; None for what is there."""

    listed: Mapping[str, Any] | None = field(default=None)

    def freeze(self) -> None:
        self.listed = dict(self.objects)

    def names(self, prefix: str) -> Mapping[str, int]:
        there = self.objects if self.listed is None else self.listed
        return {key: len(found.data) for key, found in there.items() if key.startswith(prefix)}

    def tags(self, prefix: str) -> Mapping[str, str]:
        there = self.objects if self.listed is None else self.listed
        return {key: found.tag for key, found in there.items() if key.startswith(prefix)}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Generator[ObjectServer]:
    pytest.importorskip("obstore", reason="needs obstore")
    with object_server(OldLists()) as found:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": found.endpoint}.items():
            monkeypatch.setenv(name, value)

        yield found


@pytest.fixture
def lists(server: ObjectServer) -> OldLists:
    assert isinstance(server.backend, OldLists)
    return server.backend


def tree(step: int) -> dict[str, Any]:
    return {"many": [np.full(3, step * 100 + at) for at in range(300)], "step": step}


async def saved(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        future = await manager.save(step, tree(step))
        assert future is not None
        await future

    await manager.wait()


def marked(lists: OldLists) -> list[int]:
    names = [key.split("/") for key in lists.objects]
    return sorted(int(parts[1]) for parts in names if parts[2:] == ["commit_success.txt"])


async def test_a_file_that_no_list_has_is_an_error_that_says_so(lists: OldLists) -> None:
    lists.freeze()
    await penstock.save(f"{ROOT}/7", tree(7))
    with pytest.raises(penstock.PenstockError, match="list does not show it yet"):
        await penstock.restore(f"{ROOT}/7")

    lists.listed = None
    assert (await penstock.restore(f"{ROOT}/7"))["step"] == 7


@pytest.mark.parametrize("absent", ["/d/", "manifest"])
async def test_a_checkpoint_of_which_a_list_lacks_a_part_is_restored_or_refused(
    lists: OldLists, absent: str
) -> None:
    await penstock.save(f"{ROOT}/7", tree(7))
    lists.listed = {key: found for key, found in lists.objects.items() if absent not in key}
    if absent == "/d/":  # the index names them, so the server is asked for each
        assert (await penstock.restore(f"{ROOT}/7", like=tree(0)))["many"][5][0] == 705
        return

    with pytest.raises(penstock.PenstockError, match="missing"):
        await penstock.restore(f"{ROOT}/7")


async def test_an_old_list_of_what_was_replaced_mixes_nothing(lists: OldLists) -> None:
    await penstock.save(f"{ROOT}/7", tree(7))
    before = dict(lists.objects)
    await penstock.save(f"{ROOT}/7", tree(8), overwrite="delete-first")
    lists.listed = before
    found = await penstock.restore(f"{ROOT}/7", like=tree(0))
    assert {int(each[0]) // 100 for each in found["many"]} == {8, 9, 10}
    assert found["step"] == 8


async def test_a_policy_deletes_no_step_that_an_old_list_lacks(lists: OldLists) -> None:
    async with CheckpointManager(ROOT) as manager:
        await saved(manager, 1, 2)
        lists.freeze()
        await saved(manager, 3, 4)

    async with CheckpointManager(ROOT, keep=KeepLast(2)) as manager:  # it sees 1 and 2 alone
        await saved(manager, 5)

    assert marked(lists) == [2, 3, 4, 5]
    lists.listed = None
    async with CheckpointManager(ROOT, read_only=True) as reader:
        for step in (3, 4, 5):
            assert (await reader.restore(step))["many"][299][0] == step * 100 + 299


async def test_steps_that_an_old_list_still_has_take_no_place_of_others(lists: OldLists) -> None:
    async with CheckpointManager(ROOT, keep=KeepLast(2)) as manager:
        await saved(manager, 1, 2)
        lists.freeze()
        await saved(manager, 3, 4)  # 1 and 2 are deleted, and listed still

    assert marked(lists) == [3, 4]
    async with CheckpointManager(ROOT, keep=KeepLast(2)) as manager:
        await saved(manager, 5)

    assert set(marked(lists)) >= {4, 5}


async def test_gc_leaves_alone_what_only_an_old_list_lacks_or_has(lists: OldLists) -> None:
    async with CheckpointManager(ROOT) as manager:
        await saved(manager, 1)
        lists.freeze()
        await saved(manager, 2)
        await manager.delete(1)

    await penstock.gc(ROOT, older_than_s=0)
    assert marked(lists) == [2]
    lists.listed = None
    assert (await penstock.verify(f"{ROOT}/2")).intact


async def test_a_claim_that_an_old_list_still_has_is_no_reason_to_remove_what_was_published(
    server: ObjectServer, lists: OldLists
) -> None:
    frozen: list[str] = []

    def before(asked: Any) -> None:
        if asked.method == "PUT" and asked.key == "run/7/_METADATA" and not frozen:
            frozen.append(asked.key)
            lists.freeze()  # the claim is there, and the mark is not

    server.before = before
    await penstock.save(f"{ROOT}/7", tree(7))
    assert frozen
    await penstock.gc(ROOT, older_than_s=0)
    assert marked(lists) == [7]
    lists.listed = None
    assert (await penstock.verify(f"{ROOT}/7")).intact


async def test_what_an_old_list_hides_is_not_half_deleted(lists: OldLists) -> None:
    lists.freeze()
    await penstock.save(f"{ROOT}/7", tree(7))
    there = set(lists.objects)
    with pytest.raises(penstock.PenstockError, match="list does not show it yet"):
        await penstock.delete(f"{ROOT}/7")

    assert set(lists.objects) == there
    lists.listed = None
    assert (await penstock.restore(f"{ROOT}/7"))["step"] == 7
