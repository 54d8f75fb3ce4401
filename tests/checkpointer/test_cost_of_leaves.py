"""What a leaf costs does not grow with their number: calls are counted, and no second is measured."""

from __future__ import annotations

import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import jax
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

import penstock
import penstock.orbax as ocp

_jax: Any = jax
FEW, MANY = 100, 2000
MOST_CALLS = {
    "save": 5.0,
    "metadata": 8.0,
    "restore": 10.0,
    "unchanged": 39.0,  # what is linked is read and compared, a tenth in each save, and all of a small one
    "read alone": 135.0,
    "orbax": 5.0,
}
"""Of functions in Python, for each leaf."""


def siblings(n: int) -> dict[str, Any]:
    return {f"leaf_{at}": np.full(16, at, np.float32) for at in range(n)}


def jax_leaves(n: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for at in range(n):
        array = _jax.device_put(np.full(16, at, np.float32 if at % 2 else np.int32))
        found.setdefault(f"module_{at % 10}", {})[f"leaf_{at}"] = array

    return found


def calls_of(work: Callable[[], Awaitable[object]]) -> int:
    """Count the calls of Python functions of penstock that `work()` makes, in all threads.

    On asyncio, since trio keeps its threads for the next run, where they would not be counted.
    """
    found = [0]

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/penstock/" in frame.f_code.co_filename:
            found[0] += 1

    async def counted() -> None:
        sys.setprofile(count)
        try:
            await work()
        finally:
            sys.setprofile(None)

    threading.setprofile(count)
    try:
        anyio.run(counted)
    finally:
        threading.setprofile(None)

    return found[0]


@pytest.mark.parametrize("make", [siblings, jax_leaves])
def test_the_calls_for_a_leaf_are_few_and_do_not_grow(tmp_path: Path, make: Callable[[int], Any]) -> None:
    calls: dict[str, list[int]] = {"save": [], "metadata": [], "restore": []}
    for n in (FEW, MANY):
        path, tree = tmp_path / str(n), make(n)
        calls["save"].append(calls_of(partial(penstock.save, path, tree)))
        calls["metadata"].append(calls_of(partial(penstock.metadata, path)))
        calls["restore"].append(calls_of(partial(penstock.restore, path)))

    # The few also pay for what is done once. If the work grew with the square, the many would be far above.
    cost = {what: (many - few) / (MANY - FEW) for what, (few, many) in calls.items()}
    assert all(each <= MOST_CALLS[what] for what, each in cost.items()), (cost, calls)


def test_a_leaf_that_is_read_alone_costs_few_calls(tmp_path: Path) -> None:
    few, many = 50, 250
    calls: list[int] = []
    for n in (few, many):
        tree = {f"leaf_{at}": _jax.device_put(np.full(2**15, at, np.float32)) for at in range(n)}
        anyio.run(penstock.save, tmp_path / str(n), tree)
        calls.append(calls_of(partial(penstock.restore, tmp_path / str(n))))

    assert (calls[1] - calls[0]) / (many - few) <= MOST_CALLS["read alone"], calls


def test_a_leaf_that_the_base_holds_costs_few_calls(tmp_path: Path) -> None:
    async def save_twice(n: int, tree: Any) -> None:
        async with penstock.Checkpointer() as ckpt:
            await (await ckpt.save(tmp_path / f"base {n}", tree))
            report = await (await ckpt.save(tmp_path / str(n), tree, base=tmp_path / f"base {n}"))
            assert report.nbytes == 0

    few, many = (calls_of(partial(save_twice, n, jax_leaves(n))) for n in (FEW, MANY))
    assert (many - few) / (MANY - FEW) <= MOST_CALLS["save"] + MOST_CALLS["unchanged"], (few, many)


@pytest.mark.parametrize("make", [siblings, jax_leaves])
def test_a_leaf_costs_an_orbax_checkpointer_few_calls(tmp_path: Path, make: Callable[[int], Any]) -> None:
    def save(n: int, tree: Any) -> int:
        with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as ckpt:

            async def both() -> None:
                ckpt.save(tmp_path / str(n), args=ocp.args.StandardSave(tree))
                ckpt.wait_until_finished()

            return calls_of(both)

    few, many = (save(n, make(n)) for n in (FEW, MANY))
    assert (many - few) / (MANY - FEW) <= MOST_CALLS["orbax"], (few, many)


@pytest.mark.parametrize("what", ["save", "digest", "restore", "metadata"])
def test_the_event_loop_never_works_on_all_leaves_in_one_turn(tmp_path: Path, what: str) -> None:
    async def longest(n: int) -> int:
        path, tree = tmp_path / str(n), siblings(n)
        async with penstock.Checkpointer() as ckpt:
            if what != "save":
                await (await ckpt.save(path, tree))

            async def work() -> None:
                match what:
                    case "save":
                        await (await ckpt.save(path, tree))
                    case "digest":
                        await (await ckpt.save(tmp_path / f"{n} again", tree, base=path, compare="digest"))
                    case "restore":
                        await ckpt.restore(path)
                    case _:
                        await ckpt.metadata(path)

            return await longest_turn(work)

    few, many = 2_000, 6_000
    assert anyio.run(longest, many) <= max(1.5 * anyio.run(longest, few), 1_000)


async def longest_turn(work: Callable[[], Awaitable[object]]) -> int:
    """The most lines of penstock that the event loop runs between two of its turns."""
    n_lines, longest = 0, 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal n_lines
        n_lines += event == "line"
        return count if "/penstock/" in frame.f_code.co_filename else None

    async def turn() -> None:
        nonlocal longest
        while True:
            before = n_lines
            await checkpoint()
            longest = max(longest, n_lines - before)

    before = sys.gettrace()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turn)
        sys.settrace(count)  # of this thread alone
        try:
            await work()
        finally:
            sys.settrace(before)
            tasks.cancel_scope.cancel()

    return longest
