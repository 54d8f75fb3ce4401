from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
from anyio import CancelScope, Event, create_task_group

from penstock.blocking import LoopHandle
from penstock.errors import HandlerError, HandlerFailedError, InvalidLeafError, PipelineError
from penstock.handlers.leaves.adapted_handler import AdaptedHandler
from penstock.kernel import (
    KeyKind,
    Leaf,
    LeafSpec,
    ParamInfo,
    ReadLeaf,
    ReadLeaves,
    StoredLeaf,
    Target,
    Threads,
    TypeHandler,
)

pytestmark = pytest.mark.anyio

NAME = f"{__name__}.NpzHandler"


class Weights:
    """A leaf type of somebody else's."""

    def __init__(self, **arrays: np.ndarray[Any, Any]) -> None:
        self.arrays = arrays


@final
class NpzHandler:
    """Keeps each leaf in an npz file, written by threads of its own."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.executor = executor
        self.fails: dict[str, Exception] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.finalized: list[str] = []

    def _maybe_fail(self, where: str) -> None:
        if where in self.fails:
            raise self.fails[where]

    def typestr(self) -> str:
        self._maybe_fail("typestr")
        return "weights"

    async def serialize(
        self, values: Sequence[Weights], infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Future[None]]:
        self._maybe_fail("serialize")
        return [
            self.executor.submit(self._write, info, {k: v.copy() for k, v in value.arrays.items()}, part)
            for value, info in zip(values, infos, strict=True)
            for part in ("first", "second")
        ]

    def _write(self, info: ParamInfo, arrays: dict[str, Any], part: str) -> None:
        self.gate.wait(60)
        self._maybe_fail(part)
        np.savez(self._path(info, part), **arrays)

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Weights]:
        self._maybe_fail("deserialize")
        values: list[Weights] = []
        for info in infos:
            with np.load(self._path(info, "first")) as stored:
                values.append(Weights(**{name: stored[name] for name in stored.files}))
        return values

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        return [None for _ in infos]

    def memory_size(self, values: Sequence[Weights]) -> Sequence[tuple[int, int]]:
        self._maybe_fail("memory_size")
        sizes = [sum(array.nbytes for array in value.arrays.values()) for value in values]
        return [(size, 2 * size) for size in sizes]

    def finalize(self, directory: str) -> None:
        self._maybe_fail("finalize")
        self.finalized.append(directory)

    @staticmethod
    def _path(info: ParamInfo, part: str) -> Path:
        return Path(info.directory, f"{info.name}.{part}.npz")


@pytest.fixture
def handler() -> Generator[NpzHandler]:
    with ThreadPoolExecutor(2) as executor:
        yield NpzHandler(executor)


def leaf_of(handler: NpzHandler, directory: Path) -> Leaf:
    info = ParamInfo(("opt", "w"), (KeyKind.MAPPING,) * 2, "['opt'].w", str(directory))
    value = Weights(a=np.arange(4, dtype=np.float32), b=np.ones(2))
    return Leaf(0, info, value, LeafSpec("weights"), AdaptedHandler(handler))


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def as_read(leaf: Leaf) -> ReadLeaf:
    return ReadLeaf(0, StoredLeaf(leaf.info, leaf.spec), leaf.handler)


async def test_a_batch_handler_saves_and_loads_in_files_of_its_own(
    handler: NpzHandler, tmp_path: Path
) -> None:
    adapted, leaf, threads = AdaptedHandler(handler), leaf_of(handler, tmp_path), Threads()

    assert isinstance(handler, TypeHandler)
    assert (adapted.name, adapted.typestr) == (NAME, "weights")
    assert adapted.describe([leaf.value], [leaf.info], {}) == [LeafSpec("weights")]
    assert adapted.write_size([leaf]) == 4 * 4 + 2 * 8

    pending = await adapted.save([leaf], threads)
    assert (pending.key_path, pending.handler) == ("['opt'].w", NAME)
    await pending.wait()
    await adapted.finalizing(str(tmp_path), threads).wait()
    (loaded,) = await adapted.load([as_read(leaf)])

    assert files(tmp_path) == ["opt.w.first.npz", "opt.w.second.npz"]
    assert loaded.arrays["a"].tolist() == [0, 1, 2, 3]
    assert loaded.arrays["b"].tolist() == [1, 1]
    assert handler.finalized == [str(tmp_path)]
    assert threads.busy == 0


async def test_the_value_may_change_once_it_is_saved_and_before_it_is_written(
    handler: NpzHandler, tmp_path: Path
) -> None:
    adapted, leaf = AdaptedHandler(handler), leaf_of(handler, tmp_path)
    handler.gate.clear()
    assert isinstance(leaf.value, Weights)

    pending = await adapted.save([leaf], Threads())
    leaf.value.arrays["a"][:] = -1
    handler.gate.set()
    await pending.wait()

    assert (await adapted.load([as_read(leaf)]))[0].arrays["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("where", ["typestr", "memory_size", "serialize", "first", "second", "deserialize"])
async def test_whatever_a_handler_raises_names_the_leaf_and_the_handler(
    where: str, handler: NpzHandler, tmp_path: Path
) -> None:
    adapted, leaf, threads = AdaptedHandler(handler), leaf_of(handler, tmp_path), Threads()
    boom = RuntimeError("boom")
    handler.fails[where] = boom

    with pytest.raises(HandlerFailedError, match="boom") as caught:
        await use(adapted, leaf, threads)

    assert str(caught.value) == f"['opt'].w: {NAME} failed: RuntimeError: boom"
    assert (caught.value.key_path, caught.value.handler) == ("['opt'].w", NAME)
    assert caught.value.__cause__ is boom
    assert isinstance(caught.value, HandlerError)
    assert threads.busy == 0


async def use(adapted: AdaptedHandler, leaf: Leaf, threads: Threads) -> None:
    adapted.describe([leaf.value], [leaf.info], {})
    adapted.write_size([leaf])
    await (await adapted.save([leaf], threads)).wait()
    await adapted.load([as_read(leaf)])


async def test_finalize_may_fail(handler: NpzHandler) -> None:
    handler.fails["finalize"] = RuntimeError("boom")

    with pytest.raises(HandlerFailedError, match=f"{NAME} failed: RuntimeError: boom") as caught:
        await AdaptedHandler(handler).finalizing("/c", Threads()).wait()

    assert caught.value.key_path == "finalize of 'weights'"


async def test_a_finalize_that_had_not_begun_when_it_was_cancelled_never_does(handler: NpzHandler) -> None:
    finalizing = AdaptedHandler(handler).finalizing("/c", Threads())
    with CancelScope() as scope:
        scope.cancel()
        await finalizing.wait()

    await finalizing.wait()
    assert scope.cancelled_caught
    assert handler.finalized == []


async def test_an_error_of_ours_stays_as_it_is_and_gets_the_key_path(
    handler: NpzHandler, tmp_path: Path
) -> None:
    adapted, leaf = AdaptedHandler(handler), leaf_of(handler, tmp_path)
    for error, key_path in ((InvalidLeafError("['x']", "no"), "['x']"), (HandlerError("no"), "['opt'].w")):
        handler.fails["serialize"] = error
        with pytest.raises(type(error)) as caught:
            await adapted.save([leaf], Threads())

        assert caught.value is error
        assert error.key_path == key_path


async def test_after_a_failure_the_other_futures_are_still_waited_for(
    handler: NpzHandler, tmp_path: Path
) -> None:
    # Or they would write into a directory that is being removed.
    adapted, leaf = AdaptedHandler(handler), leaf_of(handler, tmp_path)
    handler.fails["first"] = RuntimeError("boom")
    handler.gate.clear()
    ended, begun = list[str](), Event()

    async def wait() -> None:
        pending = await adapted.save([leaf], Threads())
        begun.set()
        with pytest.raises(HandlerFailedError):
            await pending.wait()
        ended.extend(files(tmp_path))

    async with create_task_group() as tasks:
        tasks.start_soon(wait)
        await begun.wait()
        handler.gate.set()

    assert ended == ["opt.w.second.npz"]


class Given:
    """A future that has ended in a given way."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
        self.asked = 0

    def result(self, timeout: float | None = None) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error


@final
class Returning:
    """A handler that returns given futures, and the wrong number of values."""

    def __init__(self, *futures: Given) -> None:
        self.futures = futures

    def typestr(self) -> str:
        return "given"

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Sequence[Given]:
        return self.futures

    async def deserialize(self, infos: Any, args: Any = None) -> Sequence[Any]:
        return []

    async def metadata(self, infos: Any) -> Sequence[Any]:
        return []

    def memory_size(self, values: Any) -> Sequence[tuple[int, int]]:
        return []

    def finalize(self, directory: str) -> None:
        pass


async def test_a_future_cancelled_by_others_fails_the_leaf_and_does_not_cancel_the_save(
    handler: NpzHandler, tmp_path: Path
) -> None:
    # TensorStore's futures raise asyncio.CancelledError, which a task must not see.
    futures = (Given(None), Given(asyncio.CancelledError()), Given(ValueError("later")), Given(None))
    pending = await AdaptedHandler(Returning(*futures)).save([leaf_of(handler, tmp_path)], Threads())

    with pytest.raises(HandlerFailedError, match="CancelledError") as caught:
        await pending.wait()

    assert isinstance(caught.value.__cause__, CancelledError)
    assert [future.asked for future in futures] == [1, 1, 1, 1]


async def test_a_handler_that_returns_too_little_is_named(handler: NpzHandler, tmp_path: Path) -> None:
    adapted, leaf = AdaptedHandler(Returning()), leaf_of(handler, tmp_path)

    with pytest.raises(HandlerFailedError, match="it returned 0 results for 1 leaf"):
        adapted.write_size([leaf])

    with pytest.raises(HandlerFailedError, match="it returned 0 results for 1 leaf"):
        await adapted.load([as_read(leaf)])


async def test_a_wait_that_is_cancelled_leaves_the_handler_at_work_and_can_be_made_again(
    handler: NpzHandler, tmp_path: Path
) -> None:
    adapted, leaf, threads = AdaptedHandler(handler), leaf_of(handler, tmp_path), Threads()
    handler.gate.clear()
    waiting = Event()
    loop = LoopHandle()
    result = Given(None)

    def block(timeout: float | None = None) -> None:
        loop.post(waiting.set)
        handler.gate.wait(60)

    result.result = block  # type: ignore[method-assign]  # a future that is in the test's hands
    pending = await AdaptedHandler(Returning(result)).save([leaf], threads)
    scope = CancelScope()
    async with create_task_group() as tasks:

        async def wait() -> None:
            with scope:
                await pending.wait()

        tasks.start_soon(wait)
        await waiting.wait()
        scope.cancel()

    assert scope.cancelled_caught
    handler.gate.set()  # nobody could interrupt it; it went on
    await pending.wait()
    assert adapted.typestr == "weights"


async def test_a_leaf_in_pieces_is_refused_for_it_would_be_lost(handler: NpzHandler, tmp_path: Path) -> None:
    adapted, leaf = AdaptedHandler(handler), leaf_of(handler, tmp_path)

    with pytest.raises(PipelineError, match=r"\['opt'\]\.w: .*NpzHandler keeps files of its own"):
        adapted.pieces(leaf, 10)
    with pytest.raises(PipelineError, match=r"\['opt'\]\.w: .*NpzHandler keeps files of its own"):
        adapted.build(ReadLeaves.of([as_read(leaf)]))


def test_what_a_restore_holds_is_asked_of_all_values_at_once_and_unknown_without_one(
    handler: NpzHandler, tmp_path: Path
) -> None:
    adapted, leaf = AdaptedHandler(handler), leaf_of(handler, tmp_path)
    likes = [leaf.value, None, Weights, leaf.value]
    leaves = [replace(as_read(leaf), target=Target(detail=like)) for like in likes]

    assert adapted.read_sizes(leaves) == [64, None, None, 64]
    assert adapted.read_sizes(leaves[1:3]) == [None, None]
    handler.fails["memory_size"] = TypeError("an abstract value")
    assert adapted.read_sizes(leaves) == [None] * 4
