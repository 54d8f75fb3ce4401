"""Copies are begun before the first of them is waited for, and before those of the group ahead of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from threading import Barrier
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from anyio import create_task_group
from tests.stages.stage_rig import Rig, Scripted, cancel_in, save_stages

from penstock.handlers import ArrayHandler
from penstock.handlers.leaves import BoxCopy
from penstock.kernel import Leaf, PiecePlan
from penstock.kernel.pipeline import FunctionStage
from penstock.stages import DeviceToHost, Flatten, device_to_host
from penstock.stages.device_to_host import PACKED_BELOW

pytestmark = pytest.mark.anyio

SIZE = PACKED_BELOW + 1
TREE = {name: np.zeros(SIZE, np.uint8) for name in "abcd"}


class FromDevices(Scripted):
    """Handles arrays of the CPU as those of a device, whose copies begin."""

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        for plan in self._inner.pieces(leaf, piece_bytes):
            copy = cast("Any", plan.take).__self__
            assert isinstance(copy, BoxCopy)
            begin = partial(self._begin, leaf.info.name, copy)
            yield replace(plan, begin=begin, take=partial(self._take, leaf.info.name, plan.take))

    def _begin(self, name: str, copy: BoxCopy) -> None:
        self.enter("begin", name)
        copy.begin()


class Beginning(Scripted):
    """A handler whose pieces have a `begin` step."""

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        for plan in super().pieces(leaf, piece_bytes):
            yield replace(plan, begin=partial(self.enter, "begin", leaf.info.name))


@pytest.fixture
def handler(rig: Rig) -> Beginning:
    found = Beginning(rig.registry.lookup(np.ndarray, ""))
    rig.registry = rig.registry.copy()
    rig.registry.register(np.ndarray, found, override=True)
    rig.limits = replace(rig.limits, piece_bytes=2 * SIZE)
    return found


async def stage(rig: Rig) -> list[Any]:
    return await save_stages(rig.save_run(), TREE, Flatten(), DeviceToHost())


def steps(handler: Scripted) -> list[tuple[str, str]]:
    return [call for call in handler.calls if call[0] in {"begin", "take"}]


async def test_a_group_begins_before_the_one_ahead_of_it_is_waited_for(rig: Rig, handler: Beginning) -> None:
    await save_stages(rig.save_run(), TREE | {"e": TREE["a"]}, Flatten(), DeviceToHost())

    assert steps(handler) == [
        *(("begin", "a"), ("begin", "b"), ("begin", "c"), ("begin", "d"), ("take", "a"), ("take", "b")),
        *(("begin", "e"), ("take", "c"), ("take", "d"), ("take", "e")),
    ]
    rig.check_idle()


async def test_a_group_without_room_in_the_budget_begins_once_it_has_its_lease(
    rig: Rig, handler: Beginning
) -> None:
    rig.limit(3 * SIZE, piece=2 * SIZE)
    await stage(rig)

    assert steps(handler) == [
        *(("begin", "a"), ("begin", "b"), ("take", "a"), ("take", "b")),
        *(("begin", "c"), ("begin", "d"), ("take", "c"), ("take", "d")),
    ]


@pytest.mark.parametrize("at_once", [1, 2, 3])
async def test_no_copy_is_leased_before_a_thread_can_make_it(
    rig: Rig, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_to_host, "AT_ONCE", at_once)
    handler = rig.scripted(np.ndarray)
    rig.limits = replace(rig.limits, piece_bytes=SIZE)
    hang = handler.hang("take", "a")
    async with create_task_group() as tasks:
        tasks.start_soon(stage, rig)
        await hang.wait_reached()
        leased = rig.memory.statistics().leased
        hang.release()
        assert leased == at_once * SIZE


async def test_leaves_of_a_device_are_begun_ahead(rig: Rig) -> None:
    handler = FromDevices(ArrayHandler(alias_host=False))
    rig.registry = rig.registry.copy()
    rig.registry.register(jax.Array, handler, override=True)
    rig.limits = replace(rig.limits, piece_bytes=SIZE)
    tree = {name: jnp.full(SIZE, at, jnp.uint8) for at, name in enumerate("abc")}
    batches = await save_stages(rig.save_run(), tree, Flatten(), DeviceToHost())

    assert steps(handler) == [
        *(("begin", "a"), ("begin", "b"), ("take", "a"), ("begin", "c"), ("take", "b"), ("take", "c")),
    ]
    found = {piece.leaf.info.name: bytes(piece.data) for batch in batches for piece in batch.parts()}
    assert found == {name: np.asarray(value).tobytes() for name, value in tree.items()}


async def test_the_lease_of_a_group_ahead_is_given_back_when_the_one_before_it_fails(
    rig: Rig, handler: Beginning
) -> None:
    error = handler.fail("take", "b")

    with pytest.raises(type(error)):
        await stage(rig)

    assert handler.names("begin") == ["a", "b", "c", "d"]
    rig.check_idle()


async def test_the_lease_of_a_group_ahead_is_given_back_when_nobody_takes_the_one_before_it(
    rig: Rig, handler: Beginning
) -> None:
    async def refuse(_: object) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        await save_stages(rig.save_run(), TREE, Flatten(), DeviceToHost(), FunctionStage(refuse))

    assert handler.names("begin") == ["a", "b", "c", "d"]
    rig.check_idle()


async def test_a_copy_that_cannot_begin_fails_the_stage(rig: Rig, handler: Beginning) -> None:
    error = handler.fail("begin", "b")

    with pytest.raises(type(error)) as caught:
        await stage(rig)

    assert caught.value is error
    assert handler.names("take") == []


@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
async def test_a_cancellation_while_a_group_begins_gives_back_its_lease(
    rig: Rig, handler: Beginning, native: bool
) -> None:
    hang = handler.hang("begin", "c")
    await cancel_in(hang, lambda: stage(rig), native=native)


class Meeting(Scripted):
    """A handler whose copies wait for one another, two by two."""

    def __init__(self, inner: Any, *, fails: str = "") -> None:
        super().__init__(inner)
        self._met = Barrier(2)
        self._fails = fails

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        for plan in self._inner.pieces(leaf, piece_bytes):
            yield replace(plan, take=partial(self._meet, leaf.info.name, plan.take))

    def _meet(self, name: str, take: Callable[[], Any]) -> Any:
        self._met.wait(timeout=20)
        if name == self._fails:
            raise RuntimeError(f"cannot copy {name}")

        return take()


def meeting(rig: Rig, **about: Any) -> None:
    rig.registry = rig.registry.copy()
    rig.registry.register(np.ndarray, Meeting(rig.registry.lookup(np.ndarray, ""), **about), override=True)
    rig.limits = replace(rig.limits, piece_bytes=SIZE)


async def test_copies_that_processors_make_run_at_the_same_time_and_pass_on_in_order(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_to_host, "AT_ONCE", 2)
    meeting(rig)

    batches = await stage(rig)

    names = [leaf.info.name for batch in batches for leaf in batch.leaves]
    assert names == ["a", "b", "c", "d"]
    for batch in batches:
        batch.release()
    rig.check_idle()


@pytest.mark.parametrize("name", "abcd")
async def test_if_one_of_the_copies_fails_all_their_leases_are_given_back(
    rig: Rig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_to_host, "AT_ONCE", 2)
    meeting(rig, fails=name)

    with pytest.raises(RuntimeError, match=f"cannot copy {name}"):
        await save_stages(rig.save_run(), TREE, Flatten(), DeviceToHost(), FunctionStage(released))

    rig.check_idle()


async def released(batch: Any) -> Any:
    batch.release()
    return batch
