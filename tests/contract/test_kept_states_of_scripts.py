"""The same as `test_kept_states.py`, for those who have no event loop, and for those who came from Orbax."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import pytest
from tests.contract.kept_states import States, collector_off

import penstock.orbax as v0
import penstock.orbax.v1 as v1
from penstock import sync
from penstock.items import Composite

__all__ = ("collector_off",)

pytestmark = pytest.mark.usefixtures("collector_off")

Wait: TypeAlias = Callable[[], object]
Save: TypeAlias = Callable[[int, list[Any]], Wait]
Way: TypeAlias = Callable[[Path, ExitStack], Save]


def at_once(save: Callable[[int, Any], object]) -> Save:
    """A save that is durable when it returns."""

    def saved(number: int, given: list[Any]) -> Wait:
        save(number, given.pop())
        return lambda: None

    return saved


def waiting(save: Callable[[int, Any], object], wait: Wait) -> Save:
    """A save that `wait` waits for."""

    def begun(number: int, given: list[Any]) -> Wait:
        save(number, given.pop())
        return wait

    return begun


def by_sync(make: Callable[[Any], Any] = lambda tree: tree, **keywords: Any) -> Way:
    def opened(folder: Path, stack: ExitStack) -> Save:
        checkpointer = stack.enter_context(sync.Checkpointer())
        return lambda number, given: (
            checkpointer.save(folder / str(number), make(given.pop()), **keywords).result
        )

    return opened


def sync_manager(folder: Path, stack: ExitStack) -> Save:
    manager = stack.enter_context(sync.CheckpointManager(folder))

    def save(number: int, given: list[Any]) -> Wait:
        saving = manager.save(number, given.pop(), metrics={"loss": 1.0})
        assert saving is not None
        return saving.result

    return save


def sync_save(folder: Path, _: ExitStack) -> Save:
    return at_once(lambda number, tree: sync.save(folder / str(number), tree))


def by_v0(handler: Callable[[], Any], args: Callable[[Any], Any]) -> Way:
    def opened(folder: Path, stack: ExitStack) -> Save:
        checkpointer = stack.enter_context(v0.AsyncCheckpointer(handler()))
        return waiting(
            lambda number, tree: checkpointer.save(folder / str(number), args=args(tree)),
            checkpointer.wait_until_finished,
        )

    return opened


def v0_checkpointer(folder: Path, stack: ExitStack) -> Save:
    checkpointer = stack.enter_context(v0.Checkpointer(v0.PyTreeCheckpointHandler()))
    return at_once(lambda number, tree: checkpointer.save(folder / str(number), tree))


def v0_standard(folder: Path, stack: ExitStack) -> Save:
    checkpointer = stack.enter_context(v0.StandardCheckpointer())
    return waiting(
        lambda number, tree: checkpointer.save(folder / str(number), tree), checkpointer.wait_until_finished
    )


def by_v0_manager(args: Callable[[Any], Any], **options: Any) -> Way:
    def opened(folder: Path, stack: ExitStack) -> Save:
        asked = v0.CheckpointManagerOptions(**options)
        manager = stack.enter_context(v0.CheckpointManager(folder, options=asked))
        return waiting(
            lambda number, tree: manager.save(number, args=args(tree), metrics={"a": 1.0}),
            manager.wait_until_finished,
        )

    return opened


def items(tree: Any) -> Any:
    return v0.args.Composite(state=v0.args.StandardSave(tree), meta=v0.args.JsonSave({"a": 1}))


class OwnNumpy(v0.type_handlers.NumpyHandler):
    """A type handler of somebody else's, which is adapted."""

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        return await super().serialize(values, infos, args)


class OwnArrays(v0.type_handlers.ArrayHandler):
    """The same, for jax.Arrays."""

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        return await super().serialize(values, infos, args)


def own_type_handlers() -> Any:
    registry = v0.type_handlers.create_type_handler_registry(
        (np.ndarray, OwnNumpy()), (jax.Array, OwnArrays()), (int, v0.type_handlers.ScalarHandler())
    )
    return v0.PyTreeCheckpointHandler(type_handler_registry=registry)


class OwnItem(v0.CheckpointHandler):
    """A handler of somebody else's."""

    def save(self, directory: Any, args: Any) -> None:
        (directory / "small").write_bytes(args.item["small"].tobytes())

    def restore(self, directory: Any, args: Any = None) -> Any:
        return None


@v0.args.register_with_handler(OwnItem, for_save=True, for_restore=True)
@dataclass
class OwnArgs(v0.args.CheckpointArgs):
    item: Any = None


def v1_save(folder: Path, _: ExitStack) -> Save:
    return at_once(lambda number, tree: v1.save(folder / str(number), tree))


def v1_save_async(folder: Path, _: ExitStack) -> Save:
    return lambda number, given: v1.save_async(folder / str(number), given.pop()).result


def v1_checkpointables(folder: Path, _: ExitStack) -> Save:
    def save(number: int, given: list[Any]) -> Wait:
        named = {"state": given.pop(), "meta": {"a": 1}}
        return v1.save_checkpointables_async(folder / str(number), named).result

    return save


def v1_checkpointer(folder: Path, stack: ExitStack) -> Save:
    checkpointer = stack.enter_context(v1.training.Checkpointer(folder))
    return at_once(checkpointer.save)


def v1_checkpointer_async(folder: Path, stack: ExitStack) -> Save:
    checkpointer = stack.enter_context(v1.training.Checkpointer(folder))

    def save(number: int, given: list[Any]) -> Wait:
        saving = checkpointer.save_async(number, given.pop(), metrics={"a": 1.0})
        assert saving is not None
        return saving.result

    return save


def v1_partial(folder: Path, stack: ExitStack) -> Save:
    return lambda number, given: (
        v1.partial.save_async(folder / "whole", {f"part{number}": given.pop()}).result
    )


WAYS: dict[str, Way] = {
    "sync": by_sync(),
    "sync, items": by_sync(lambda tree: Composite(state=tree)),
    "sync, overlap": by_sync(staging="overlap"),
    "sync manager": sync_manager,
    "sync.save": sync_save,
    "v0": v0_checkpointer,
    "v0, async": by_v0(v0.StandardCheckpointHandler, v0.args.StandardSave),
    "v0, PyTree": by_v0(v0.PyTreeCheckpointHandler, v0.args.PyTreeSave),
    "v0, items": by_v0(v0.CompositeCheckpointHandler, items),
    "v0, standard": v0_standard,
    "v0, type handlers": by_v0(own_type_handlers, v0.args.PyTreeSave),
    "v0, handler": by_v0(v0.CompositeCheckpointHandler, lambda tree: v0.args.Composite(own=OwnArgs(tree))),
    "v0 manager": by_v0_manager(v0.args.StandardSave),
    "v0 manager, items": by_v0_manager(items, max_to_keep=1, best_fn=lambda metrics: metrics["a"]),
    "v1": v1_save,
    "v1, async": v1_save_async,
    "v1, items": v1_checkpointables,
    "v1 manager": v1_checkpointer,
    "v1 manager, async": v1_checkpointer_async,
    "v1, parts": v1_partial,
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("way", WAYS)
def test_no_state_is_alive_once_it_is_durable_and_dropped(folder: Path, way: str) -> None:
    states, most = States(), 0
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        save = WAYS[way](folder, stack)
        for number in range(3):
            wait = save(number, [states.plain(number)])
            most = max(most, len(states.alive))
            wait()
            assert states.none_is_left_now(), number  # and what it returned is still held

    assert most <= 1


def attempted(save: Save, number: int, given: list[Any]) -> str:
    """Save what this frame holds, which is in the traceback of the failure."""
    state = given.pop()
    try:
        save(number, [state])()
    except Exception as error:
        return type(error).__name__

    return ""


@pytest.mark.parametrize("fault", ["leaf", "place"])
@pytest.mark.parametrize("way", [name for name in WAYS if name not in ("v0, handler", "v1, parts")])
def test_a_failure_that_the_caller_drops_keeps_nothing_of_its_frames(
    folder: Path, way: str, fault: str
) -> None:
    states = States()
    folder.mkdir(exist_ok=True)
    stack = ExitStack()
    save = WAYS[way](folder, stack)
    given = [states.plain(1)]
    if fault == "leaf":
        given[0]["unknown"] = object()
    else:
        (folder / "1").mkdir()
        (folder / "1" / "something").write_bytes(b"1")

    # A manager of Orbax's replaces what its listing did not show.
    assert attempted(save, 1, given) or (fault == "place" and way.startswith("v0 manager"))
    assert states.none_is_left_now()
    with suppress(Exception):  # a failure that was told by then
        stack.close()
