"""An expected error shows its caller's frames, the one function of ours that he called, and its sentence."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from tests.event_loops import Backend

import penstock
import penstock.orbax as ocp
import penstock.orbax.v1 as ocp1
from penstock.errors import HandlerFailedError, NotACheckpointError, PenstockError, StorageError
from penstock.handlers import LocalStore
from penstock.kernel.pipeline import FunctionStage
from penstock.pipelines import save_pipeline
from penstock.testing import FaultyStore

TREE = {"a": np.arange(3.0)}


def roots(error: BaseException) -> list[str]:
    """The packages whose functions the traceback names, from the outermost on; tests are `tests`."""
    found: list[str] = []
    entry = error.__traceback__
    while entry is not None:
        found.append(str(entry.tb_frame.f_globals["__name__"]).partition(".")[0])
        entry = entry.tb_next

    return found


def printed(error: BaseException) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()


def check_short(error: PenstockError) -> None:
    assert roots(error).count("penstock") == 1
    assert roots(error)[-1] == "penstock"
    lines = printed(error)
    assert lines[-1] == f"penstock.errors.{type(error).__name__}: {error}"
    assert sum(line.startswith("Traceback") for line in lines) == 1
    assert not any("During handling" in line or "direct cause" in line for line in lines)


async def restore(path: Path) -> None:
    await penstock.restore(path)


async def restore_in_a_checkpointer(path: Path) -> None:
    async with penstock.Checkpointer() as checkpointer:
        await checkpointer.restore(path, like=TREE)


async def describe(path: Path) -> None:
    await penstock.metadata(path)


async def seal(path: Path) -> None:
    await penstock.seal(path)


async def convert(path: Path) -> None:
    await penstock.convert(path, path.with_name("other.npz"))


async def stream(path: Path) -> None:
    async with penstock.Checkpointer() as checkpointer:
        async for _ in checkpointer.stream(path):
            pass


async def restore_a_step(path: Path) -> None:
    async with penstock.CheckpointManager(path.with_name("run")) as manager:
        await manager.restore(3)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "call",
    [restore, restore_in_a_checkpointer, describe, seal, convert, stream, restore_a_step],
    ids=lambda call: call.__name__,
)
async def test_an_absent_checkpoint_is_told_in_a_few_lines(
    call: Callable[[Path], Awaitable[None]], tmp_path: Path
) -> None:
    with pytest.raises(PenstockError) as caught:
        await call(tmp_path / "x")

    check_short(caught.value)


def save_to_a_file_in_the_way(path: Path) -> None:
    path.write_text("not a checkpoint")
    penstock.sync.save(path, TREE)


def restore_and_block(path: Path) -> None:
    penstock.sync.restore(path)


def restore_in_an_open_checkpointer(path: Path) -> None:
    with penstock.sync.Checkpointer() as checkpointer:
        checkpointer.restore(path)


def wait_for_a_result(path: Path) -> None:
    store = FaultyStore(LocalStore())
    store.fail_on("publish", error=StorageError("publish", "x", "no room"))
    with penstock.sync.Checkpointer(store=store) as checkpointer:
        checkpointer.save(path, TREE).result()


@pytest.mark.parametrize(
    "call",
    [save_to_a_file_in_the_way, restore_and_block, restore_in_an_open_checkpointer, wait_for_a_result],
    ids=lambda call: call.__name__,
)
def test_a_blocking_call_fails_in_a_few_lines(call: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(PenstockError) as caught:
        call(tmp_path / "x")

    check_short(caught.value)


def test_calls_of_the_orbax_face_fail_in_a_few_lines(tmp_path: Path) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: ocp.StandardCheckpointer().restore(tmp_path / "x"),
        lambda: ocp.PyTreeCheckpointer().restore(tmp_path / "x"),
        lambda: ocp.CheckpointManager(tmp_path / "run").restore(3),
        lambda: ocp1.load(tmp_path / "x"),
        lambda: ocp1.load_async(tmp_path / "x").result(),
    )
    for call in calls:
        with pytest.raises(PenstockError) as caught:
            call()

        assert roots(caught.value).count("penstock") == 1
        assert len(printed(caught.value)) < 20


@pytest.mark.anyio
async def test_the_stage_stands_in_the_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError) as caught:
        await penstock.restore(tmp_path / "x")

    assert str(caught.value) == f"in stage 'locate': {tmp_path / 'x'}: does not exist"
    assert caught.value.stage == "locate"


@pytest.mark.anyio
async def test_an_error_in_a_group_of_tasks_is_short_too(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(penstock.restore, tmp_path / "x")
            tasks.start_soon(penstock.metadata, tmp_path / "y")

    for error in caught.value.exceptions:
        assert roots(error).count("penstock") == 1


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_on_uvloop_it_is_as_short(anyio_backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError) as caught:
        await penstock.restore(tmp_path / "x")

    assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    check_short(caught.value)


class Parcel:
    """A leaf of the caller's."""


class ParcelHandler:
    """A handler that fails."""

    def typestr(self) -> str:
        return "parcel"

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        return pack(values)

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        raise AssertionError

    async def metadata(self, infos: Any) -> Any:
        raise AssertionError

    def memory_size(self, values: Any) -> Any:
        return [(1, 1) for _ in values]

    def finalize(self, directory: Any) -> None:
        pass


def pack(values: Any) -> Any:
    raise ZeroDivisionError("nothing to pack")


@pytest.mark.anyio
async def test_the_frames_of_a_handler_of_the_callers_stay(tmp_path: Path) -> None:
    registry = penstock.HandlerRegistry()
    registry.register(Parcel, ParcelHandler())
    with pytest.raises(HandlerFailedError) as caught:
        async with penstock.Checkpointer(registry=registry) as checkpointer:
            await (await checkpointer.save(tmp_path / "x", {"p": Parcel()}))

    text = "\n".join(printed(caught.value))
    assert "in serialize" in text
    assert "in pack" in text
    assert "nothing to pack" in text
    assert roots(caught.value).count("penstock") == 1
    assert caught.value.__cause__ is not None
    assert "penstock" not in roots(caught.value.__cause__)


@pytest.mark.anyio
async def test_the_frames_of_a_stage_of_the_callers_stay(tmp_path: Path) -> None:
    async def weigh(message: Any) -> Any:
        raise ZeroDivisionError("weighs nothing")

    pipeline = save_pipeline().insert_after("flatten", FunctionStage(weigh))
    with pytest.raises(ZeroDivisionError, match="weighs nothing") as caught:
        await penstock.save(tmp_path / "x", TREE, pipeline=pipeline)

    assert "in weigh" in "\n".join(printed(caught.value))
    assert roots(caught.value).count("penstock") == 1


@pytest.mark.anyio
async def test_what_its_caller_is_handling_is_still_shown(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError) as caught:
        try:
            int("the first way failed")
        except ValueError:
            await penstock.restore(tmp_path / "x")

    assert "the first way failed" in "\n".join(printed(caught.value))


@pytest.mark.anyio
async def test_a_variable_of_the_environment_shows_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TRACEBACK", "full")
    with pytest.raises(NotACheckpointError) as caught:
        await penstock.restore(tmp_path / "x")

    assert roots(caught.value).count("penstock") > 5
