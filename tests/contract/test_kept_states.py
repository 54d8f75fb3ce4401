"""Nothing of ours keeps a state alive: not after a save, a restore, a failure or a cancellation.

The collector is off: what is in a reference cycle would stay for ever. On an accelerator a state that stays
is memory that is gone.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias
from weakref import ref

import anyio
import pytest
from tests.contract.kept_states import States, collector_off
from tests.contract.stepping import acting_at
from tests.stages.stage_rig import Parcel, ParcelHandler, with_parcels

import penstock
from penstock import Checkpointer, SaveFuture, steps
from penstock.errors import HandlerError, PenstockError, SaveCancelledError, StorageError
from penstock.handlers import LocalStore, SafetensorsLayout, default_handlers
from penstock.items import Array, Composite, Json, PyTree
from penstock.steps import CheckpointManager
from penstock.testing import FaultyStore

__all__ = ("collector_off",)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("collector_off")]

Make: TypeAlias = Callable[[States, int], Any]
Save: TypeAlias = Callable[[int, Any], Awaitable[Any]]
Way: TypeAlias = tuple[Make, Callable[[Path], AbstractAsyncContextManager[Save]]]


def tree(states: States, number: int) -> Any:
    return states.tree(number)


def items(states: States, number: int) -> Any:
    return Composite(state=PyTree(tree(states, number)), lr=Json(0.1), mean=Array(states.array(number, 3)))


def one_item(states: States, number: int) -> Any:
    return Composite(state=PyTree(tree(states, number)))


def of_each_process(states: States, number: int) -> Any:
    return {"own": penstock.PerProcess(tree(states, number))}


def parcels(states: States, number: int) -> Any:
    return tree(states, number) | {"parcel": states.noted(number, Parcel(str(number)))}


def arrays(states: States, number: int) -> Any:
    return {"a": states.array(number, 70_000), "b": states.array(number, 7)}


def by_checkpointer(
    make: Make = tree, options: Callable[[], Mapping[str, Any]] = dict[str, Any], /, **keywords: Any
) -> Way:
    """Saves to a path each; `base=True` means the one before."""

    @asynccontextmanager
    async def opened(folder: Path) -> AsyncGenerator[Save]:
        async with Checkpointer(**options()) as checkpointer:

            def save(number: int, states: Any) -> Awaitable[SaveFuture]:
                base = folder / str(number - 1) if keywords.get("base") and number else None
                chosen: Any = keywords | {"base": base}
                return checkpointer.save(folder / str(number), states.pop(), **chosen)

            yield save

    return make, opened


def by_manager(make: Make = tree, **options: Any) -> Way:
    @asynccontextmanager
    async def opened(folder: Path) -> AsyncGenerator[Save]:
        async with CheckpointManager(folder / "root", **options) as manager:

            def save(number: int, states: Any) -> Awaitable[SaveFuture | None]:
                return manager.save(number, states.pop(), metrics={"loss": 1.0 / (number + 1)})

            yield save

    return make, opened


@asynccontextmanager
async def _at_once(folder: Path) -> AsyncGenerator[Save]:
    async def save(number: int, states: Any) -> None:
        await penstock.save(folder / str(number), states.pop())

    yield save


def _with_parcels() -> Mapping[str, Any]:
    return {"registry": with_parcels(default_handlers(entry_points=False), ParcelHandler())}


WAYS: dict[str, Way] = {
    "tree": by_checkpointer(),
    "overlap": by_checkpointer(staging="overlap"),
    "items": by_checkpointer(items),
    "items, overlap": by_checkpointer(items, staging="overlap"),
    "one item": by_checkpointer(one_item),
    "PerProcess": by_checkpointer(of_each_process),
    "base": by_checkpointer(base=True),
    "items, base": by_checkpointer(items, base=True),
    "digests": by_checkpointer(base=True, compare="digest"),
    "prioritised": by_checkpointer(prioritise=lambda keys: keys[0] == "node"),
    "save_args": by_checkpointer(save_args=lambda _: penstock.SaveArgs(chunk_byte_size=100_000)),
    "codec": by_checkpointer(tree, lambda: {"save_format": penstock.SaveFormat(codec="zstd")}),
    "directories": by_checkpointer(tree, lambda: {"save_format": penstock.SaveFormat(ocdbt=False)}),
    "safetensors": by_checkpointer(arrays, lambda: {"layout": SafetensorsLayout()}),
    "little memory": by_checkpointer(tree, lambda: {"memory_limit": 100_000}),
    "progress": by_checkpointer(progress=lambda *_: None),
    "third party": by_checkpointer(parcels, _with_parcels),
    "penstock.save": (tree, _at_once),
    "manager": by_manager(),
    "manager, items": by_manager(items),
    "manager that deletes": by_manager(keep=steps.KeepLast(1)),
    "manager without links": by_manager(link=False),
}


WAITS = ("penstock.save", "base", "items, base", "digests")
"""Those in which a save ends before the next one."""


@pytest.mark.thinned(3)
@pytest.mark.parametrize("way", WAYS)
async def test_no_state_is_alive_once_it_is_durable_and_dropped(folder: Path, way: str) -> None:
    make, opened = WAYS[way]
    states, most = States(), 0
    async with opened(folder) as save:
        for number in range(4):
            given = [make(states, number)]
            future = await save(number, given)
            most = max(most, len(states.alive))
            if future is not None:
                await future

            assert await states.none_is_left(), number  # and the future is still held

    assert most <= 1


@pytest.mark.thinned(3)
@pytest.mark.parametrize("way", [name for name in WAYS if name not in WAITS])
async def test_while_saves_follow_each_other_two_states_are_alive_at_most(folder: Path, way: str) -> None:
    make, opened = WAYS[way]
    states, most, futures = States(), 0, list[Any]()
    async with opened(folder) as save:
        for number in range(5):
            state = make(states, number)
            futures.append(await save(number, [state]))
            if number:
                await futures[-2]  # the one before, while this one goes on

            await futures[-1].staged()
            most = max(most, len(states.alive))
            del state

        await futures[-1]
        assert await states.none_is_left()

    assert most <= 2


# Failures


def fails_at_a_leaf(states: States, store: FaultyStore) -> Any:
    """In the first stage, with all leaves in its hands."""
    return states.tree(0) | {"z": object()}


def fails_at_the_copy(states: States, store: FaultyStore) -> Any:
    """An array was deleted meanwhile."""
    found = states.tree(0)
    found["large jax"].delete()
    return found


def fails_at_writing(states: States, store: FaultyStore) -> Any:
    """The disk is full, with copies in its hands."""
    store.fail_on("data.write_at", error=StorageError("write", "x", "is full", errno.ENOSPC))
    return states.tree(0)


def fails_at_publishing(states: States, store: FaultyStore) -> Any:
    """After everything is written."""
    refuse(store, "publish")
    return states.tree(0)


def refuse(store: FaultyStore, operation: str) -> None:
    """Fail at the next operation of a kind."""
    n_before = [each.name for each in store.operations].count(operation)
    store.fail_on(operation, n_before + 1, StorageError(operation, "x", "is refused"))


FAULTS = [fails_at_a_leaf, fails_at_the_copy, fails_at_writing, fails_at_publishing]
Fault: TypeAlias = Callable[[States, FaultyStore], Any]


def as_tree(given: Any) -> Any:
    return given


def as_items(given: Any) -> Any:
    return Composite(state=PyTree(given), lr=Json(0.1))


FORMS = [as_tree, as_items]


async def attempted(checkpointer: Checkpointer, path: Path, given: list[Any], kept: list[Any]) -> None:
    """Save, and keep the future and the exception. This frame is in the traceback, and has both."""
    save: SaveFuture | None = None
    try:
        save = await checkpointer.save(path, given.pop())
        kept.append(save)
        await save
    except PenstockError as error:
        kept.append(error)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failure_that_the_caller_keeps_keeps_no_state(folder: Path, fault: Fault, form: Any) -> None:
    states, store, kept = States(), FaultyStore(LocalStore()), list[Any]()
    async with Checkpointer(store=store) as checkpointer:
        await attempted(checkpointer, folder / "a", [form(fault(states, store))], kept)
        assert isinstance(kept[-1], PenstockError)
        assert await states.none_is_left()
        if len(kept) == 2:
            with pytest.raises(type(kept[-1])):
                await kept[0]

            assert await states.none_is_left()


async def holding(checkpointer: Checkpointer, path: Path, states: States, given: list[Any]) -> None:
    """Save a state that this frame holds, and the future, too. It is in the traceback of the failure."""
    state = given.pop()
    with suppress(PenstockError):
        save = await checkpointer.save(path, state)
        await save


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failure_that_the_caller_drops_keeps_nothing_of_its_frames(
    folder: Path, fault: Fault, form: Any
) -> None:
    states, store = States(), FaultyStore(LocalStore())
    async with Checkpointer(store=store) as checkpointer:
        await holding(checkpointer, folder / "a", states, [form(fault(states, store))])
        assert await states.none_is_left()


@pytest.mark.parametrize("fault", [fails_at_writing, fails_at_publishing])
async def test_a_failure_that_is_told_later_keeps_no_state(folder: Path, fault: Fault) -> None:
    states, store = States(), FaultyStore(LocalStore())
    with pytest.raises(StorageError):
        async with Checkpointer(store=store) as checkpointer:
            with suppress(StorageError):
                await checkpointer.save(folder / "a", fault(states, store))

            refuse(store, "publish")
            await checkpointer.save(folder / "b", states.tree(1))
            await checkpointer.operations.life.background.wait_ended()
            assert await states.none_is_left()
            with suppress(StorageError):
                await checkpointer.save(folder / "c", states.tree(2))

            assert await states.none_is_left()
            refuse(store, "publish")
            await checkpointer.save(folder / "d", states.tree(3))

    assert await states.none_is_left()


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failure_of_a_manager_keeps_no_state(folder: Path, fault: Fault) -> None:
    states, store, kept = States(), FaultyStore(LocalStore()), list[BaseException]()

    async def attempt(manager: CheckpointManager, given: list[Any]) -> None:
        try:
            save = await manager.save(1, given.pop())
            assert save is not None
            await save
        except PenstockError as error:
            kept.append(error)

    async with (
        Checkpointer(store=store) as checkpointer,
        CheckpointManager(folder, checkpointer=checkpointer) as manager,
    ):
        await attempt(manager, [fault(states, store)])
        assert await states.none_is_left()
        assert len(kept) == 1


async def test_a_handler_that_fails_keeps_no_state(folder: Path) -> None:
    states, kept = States(), list[Any]()
    handler = ParcelHandler()
    handler.fail("serialize", "parcel", ValueError("is broken"))
    registry = with_parcels(default_handlers(entry_points=False), handler)
    async with Checkpointer(registry=registry) as checkpointer:
        await attempted(checkpointer, folder / "a", [parcels(states, 0)], kept)
        assert isinstance(kept[-1], HandlerError)
        assert await states.none_is_left()


# Cancellations


async def by_scope(checkpointer: Checkpointer, path: Path, given: list[Any], at: int) -> None:
    with anyio.CancelScope() as scope, acting_at(at, scope.cancel):
        state = given.pop()
        save = await checkpointer.save(path, state, staging="overlap")
        await save


async def by_future(checkpointer: Checkpointer, path: Path, given: list[Any], at: int) -> None:
    state = given.pop()
    save = await checkpointer.save(path, state, staging="overlap")
    del state
    with acting_at(at, save.cancel), suppress(SaveCancelledError):
        await save


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", [by_scope, by_future])
async def test_a_cancelled_save_keeps_no_state(folder: Path, way: Any, form: Any) -> None:
    states = States()
    async with Checkpointer() as checkpointer:
        for at in (1, 3, 6, 10, 15, 21, 28):
            await way(checkpointer, folder / str(at), [form(states.tree(at))], at)
            await checkpointer.wait()
            assert await states.none_is_left(), at


async def test_a_checkpointer_that_is_left_on_an_error_keeps_no_state(folder: Path) -> None:
    states = States()
    with pytest.raises(KeyError):
        async with Checkpointer() as checkpointer:
            await checkpointer.save(folder / "a", states.tree(1))
            raise KeyError

    assert await states.none_is_left()


# Restores


Restore: TypeAlias = Callable[[Checkpointer, Path, States], Awaitable[Any]]


async def plainly(checkpointer: Checkpointer, path: Path, states: States) -> Any:
    return await checkpointer.restore(path)


async def onto_a_target(checkpointer: Checkpointer, path: Path, states: States) -> Any:
    return await checkpointer.restore(path, like=states.plain(1))


async def mapped(checkpointer: Checkpointer, path: Path, states: States) -> Any:
    return await checkpointer.restore(path, mmap=True)


async def in_part(checkpointer: Checkpointer, path: Path, states: States) -> Any:
    return await checkpointer.restore(path, only=["large*"], dtype="float16")


async def streamed(checkpointer: Checkpointer, path: Path, states: States) -> Any:
    return [value async for _, value in checkpointer.stream(path)]


async def streamed_in_part(checkpointer: Checkpointer, path: Path, states: States) -> Any:
    async with checkpointer.stream(path) as stream:
        return await anext(stream)


async def dropped_stream(checkpointer: Checkpointer, path: Path, states: States) -> Any:
    async for _, value in checkpointer.stream(path):
        return value

    return None


async def described(checkpointer: Checkpointer, path: Path, states: States) -> Any:
    return await checkpointer.metadata(path)


RESTORES: list[Restore] = [
    plainly,
    onto_a_target,
    mapped,
    in_part,
    streamed,
    streamed_in_part,
    dropped_stream,
    described,
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("way", RESTORES)
async def test_no_restored_tree_is_alive_once_it_is_dropped(folder: Path, way: Restore) -> None:
    states = States()
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(folder / "a", states.plain(0)))
        for number in range(2, 5):
            found = await way(checkpointer, folder / "a", states)
            states.note_all(number, found)
            del found
            assert await states.none_is_left(), number


async def test_no_restored_items_are_alive_once_they_are_dropped(folder: Path) -> None:
    states = States()
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(folder / "a", as_items(states.plain(0))))
        found = await checkpointer.restore_items(folder / "a", like={"state": states.plain(1)})
        states.note_all(2, found)
        del found
        assert await states.none_is_left()


async def test_no_restored_step_is_alive_once_it_is_dropped(folder: Path) -> None:
    states = States()
    async with CheckpointManager(folder) as manager:
        save = await manager.save(1, states.plain(0))
        assert save is not None
        await save
        for like in (..., states.plain(1)):
            found = await manager.restore(like=like)
            states.note_all(2, found)
            del found, like

        await manager.metadata()
        assert await states.none_is_left()


async def test_a_restore_that_fails_keeps_neither_its_target_nor_what_was_read(folder: Path) -> None:
    states, kept, store = States(), list[BaseException](), FaultyStore(LocalStore())

    async def attempt(checkpointer: Checkpointer, like: list[Any]) -> None:
        try:
            await checkpointer.restore(folder / "a", like=like.pop())
        except PenstockError as error:
            kept.append(error)

    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(folder / "a", states.plain(0)))
        await attempt(checkpointer, [states.tree(1)])  # it does not fit
        assert await states.none_is_left()
        refuse(store, "file.read_at")
        await attempt(checkpointer, [states.plain(2)])
        assert await states.none_is_left()
        assert len(kept) == 2


async def test_a_cancelled_restore_keeps_nothing(folder: Path) -> None:
    states = States()
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(folder / "a", states.plain(0)))
        for at in (1, 3, 6, 10, 15, 21):
            with anyio.CancelScope() as scope, acting_at(at, scope.cancel):
                await checkpointer.restore(folder / "a", like=states.plain(at))

            assert await states.none_is_left(), at


# What else a caller gives


class Given:
    """A function of the caller's."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def __call__(self, *_: Any) -> Any:
        return self._result


@pytest.mark.parametrize("fails", [False, True])
async def test_a_save_that_is_over_keeps_no_function_of_the_callers(folder: Path, fails: bool) -> None:
    store = FaultyStore(LocalStore())
    if fails:
        refuse(store, "publish")

    first, asked, shown = Given(False), Given(None), Given(None)
    references = [ref(first), ref(asked), ref(shown)]
    async with Checkpointer(store=store) as checkpointer:
        save = await checkpointer.save(
            folder / "a", {"x": 1}, prioritise=first, save_args=asked, progress=shown
        )
        with suppress(StorageError):
            await save

        del first, asked, shown
        states = States()
        await states.none_is_left()
        await anyio.wait_all_tasks_blocked()
        assert [reference() for reference in references] == [None] * 3
        assert save.progress.leaves_total == 1
