"""What Python itself refuses becomes an error of penstock's, and what comes after it works."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from penstock import Checkpointer, sync
from penstock.errors import InsufficientMemoryError, NoThreadError, PenstockError, SpecError
from penstock.handlers import LocalStore
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

TREE = {"x": np.arange(3)}


def deep(levels: int) -> dict[str, Any]:
    tree: dict[str, Any] = TREE
    for _ in range(levels - 1):
        tree = {"d": tree}

    return tree


def cyclic() -> dict[str, Any]:
    tree: dict[str, Any] = {"x": 1}
    tree["again"] = [tree]
    return tree


@pytest.mark.parametrize("tree", [deep(3_000), cyclic(), {"a": [1, (deep(1_200),)]}])
async def test_a_tree_with_too_many_levels_is_refused_and_spoils_no_thread(tmp_path: Path, tree: Any) -> None:
    async with Checkpointer() as checkpointer:
        for _ in range(3):
            with pytest.raises(SpecError, match="levels, or contains itself"):
                await checkpointer.save(tmp_path / "deep", tree)

        assert list(tmp_path.iterdir()) == []
        await (await checkpointer.save(tmp_path / "a", TREE))
        for _ in range(3):
            with pytest.raises(SpecError, match="levels, or contains itself"):
                await checkpointer.restore(tmp_path / "a", like=tree)
            with pytest.raises(SpecError, match="levels, or contains itself"):
                await checkpointer.save(tmp_path / "deep", TREE, save_args=tree)

        assert (await checkpointer.restore(tmp_path / "a"))["x"].tolist() == [0, 1, 2]


async def test_a_tree_of_as_many_levels_as_python_allows_is_saved(tmp_path: Path) -> None:
    tree, n_levels = deep(sys.getrecursionlimit() - 100), 0
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "a", tree))
        found = await checkpointer.restore(tmp_path / "a", like=tree)

    while "d" in found:
        found, n_levels = found["d"], n_levels + 1

    assert n_levels == sys.getrecursionlimit() - 101


@pytest.fixture
def no_more_threads() -> Generator[None]:
    """As where the limit of threads is reached: the next one would have a stack larger than all memory."""
    before = threading.stack_size(1 << 47)
    yield
    threading.stack_size(before)


@pytest.mark.usefixtures("no_more_threads")
def test_a_thread_that_cannot_start_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    async def save() -> None:
        async with Checkpointer() as checkpointer:
            await checkpointer.save(tmp_path / "a", TREE)

    with pytest.raises(NoThreadError, match="ulimit -u"):
        anyio.run(save)  # trio may have threads of earlier tests

    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_more_threads")
def test_a_thread_that_cannot_start_is_the_same_error_in_plain_scripts(tmp_path: Path) -> None:
    with pytest.raises(NoThreadError, match="ulimit -u"):
        sync.save(tmp_path / "a", TREE)


async def test_a_runtime_error_of_a_call_is_not_taken_for_a_missing_thread(tmp_path: Path) -> None:
    async with Checkpointer(store=failing(RuntimeError("of the store"))) as checkpointer:
        with pytest.raises(RuntimeError, match="of the store") as caught:
            await checkpointer.save(tmp_path / "a", TREE)

        assert not isinstance(caught.value, PenstockError)


async def test_a_save_without_memory_is_a_memory_error_that_says_what_to_do(tmp_path: Path) -> None:
    async with Checkpointer(store=failing(MemoryError())) as checkpointer:
        with pytest.raises(InsufficientMemoryError, match="not enough memory") as caught:
            await checkpointer.save(tmp_path / "a", TREE)

        assert isinstance(caught.value.__context__, MemoryError)


def failing(error: Exception) -> FaultyStore:
    store = FaultyStore(LocalStore())
    store.fail_on("kind", error=error)
    return store


class HalfObserver:
    def observing(self, kind: str, path: str) -> None: ...


@pytest.mark.parametrize("observer", [None, 5, object(), HalfObserver(), print])
def test_what_is_no_observer_is_refused_when_the_checkpointer_is_made(observer: Any) -> None:
    with pytest.raises(SpecError, match="`observing` and `watching`"):
        Checkpointer(observers=[observer])


def test_observers_are_several() -> None:
    given: Any = 5
    with pytest.raises(SpecError, match="a list or a tuple"):
        Checkpointer(observers=given)
