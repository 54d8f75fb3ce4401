"""The guide for custom types, its half about leaves: a dataclass that is stored as npz files.

Written as a reader of Orbax's guide would write it, for either library; run with both.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint
import pytest
from etils import epath

import penstock
from penstock.errors import HandlerFailedError
from penstock.orbax import metadata as penstock_metadata
from penstock.orbax import type_handlers as penstock_handlers
from penstock.orbax.stage_workers import TypeHandlerLookup

orbax_handlers: Any = orbax.checkpoint.type_handlers
orbax_metadata: Any = orbax.checkpoint.metadata
BOTH = pytest.mark.parametrize(
    ("type_handlers", "metadata"),
    [(penstock_handlers, penstock_metadata), (orbax_handlers, orbax_metadata)],
    ids=["penstock", "orbax"],
)


@dataclasses.dataclass
class MyState:
    """What is to be one leaf of a tree."""

    a: Any
    b: Any


def my_state(number: int = 0) -> MyState:
    return MyState(np.arange(4) + number, np.full((2, 3), number))


def handler_of(type_handlers: Any, metadata: Any) -> Any:
    """The guide's handler, and its metadata class."""

    @dataclasses.dataclass
    class MyMetadata(metadata.Metadata):  # type: ignore[misc]  # whichever library's it is
        keys: tuple[str, ...] = ()

    class MyStateHandler(type_handlers.TypeHandler):  # type: ignore[misc]  # whichever library's it is
        def __init__(self) -> None:
            self._executor = futures.ThreadPoolExecutor(max_workers=2)
            self.finalized: list[Path] = []
            self.args: list[Any] = []

        def typestr(self) -> str:
            return "MyState"

        def _file(self, info: Any) -> Path:
            return Path(info.path / "data.npz")

        def _write(self, file: Path, state: MyState) -> None:
            file.parent.mkdir()
            with file.open("wb") as opened:
                np.savez(opened, a=state.a, b=state.b)

        def _read(self, file: Path) -> MyState:
            with np.load(file) as loaded:
                return MyState(loaded["a"], loaded["b"])

        async def serialize(
            self, values: Sequence[MyState], infos: Sequence[Any], args: Sequence[Any] | None = None
        ) -> Sequence[futures.Future[None]]:
            self.args += args or ()
            copies = [MyState(value.a.copy(), value.b.copy()) for value in values]
            return [
                self._executor.submit(self._write, self._file(info), copy)
                for info, copy in zip(infos, copies, strict=True)
            ]

        async def deserialize(
            self, infos: Sequence[Any], args: Sequence[Any] | None = None
        ) -> Sequence[MyState]:
            self.args += args or ()
            loop = asyncio.get_running_loop()
            reading = [loop.run_in_executor(self._executor, self._read, self._file(info)) for info in infos]
            return await asyncio.gather(*reading)

        async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
            return [MyMetadata(name=info.name, directory=info.parent_dir, keys=("a", "b")) for info in infos]

        def finalize(self, directory: Any) -> None:
            self.finalized.append(Path(directory))

        def close(self) -> None:
            self._executor.shutdown()

    return MyStateHandler()


def assert_state(found: Any, expected: MyState) -> None:
    assert type(found) is MyState
    assert np.array_equal(found.a, expected.a)
    assert np.array_equal(found.b, expected.b)


@BOTH
async def test_the_handler_works_when_it_is_called(type_handlers: Any, metadata: Any, tmp_path: Path) -> None:
    handler = handler_of(type_handlers, metadata)
    info = type_handlers.ParamInfo(
        name="x", parent_dir=epath.Path(tmp_path), ts_context=type_handlers.get_ts_context()
    )
    assert isinstance(handler, type_handlers.TypeHandler)

    (future,) = await handler.serialize([my_state()], [info])
    future.result()
    assert (tmp_path / "x" / "data.npz").exists()
    assert_state((await handler.deserialize([info]))[0], my_state())

    (found,) = await handler.metadata([info])
    assert isinstance(found, metadata.Metadata)
    assert (found.name, found.directory, found.keys) == ("x", tmp_path, ("a", "b"))
    handler.finalize(tmp_path)
    handler.close()


@BOTH
def test_the_handler_is_registered_for_everybody(type_handlers: Any, metadata: Any) -> None:
    handler = handler_of(type_handlers, metadata)

    class State(MyState):
        """Another one each time: the registry is that of the process."""

    assert not type_handlers.has_type_handler(State)
    with pytest.raises(ValueError, match="State"):
        type_handlers.get_type_handler(State)

    handler.typestr = lambda: f"MyState {metadata.__name__}"
    type_handlers.register_type_handler(State, handler)
    assert type_handlers.has_type_handler(State)
    assert type_handlers.get_type_handler(State) is handler
    assert type_handlers.get_type_handler(handler.typestr()) is handler
    with pytest.raises(ValueError, match="registered"):
        type_handlers.register_type_handler(State, handler)
    type_handlers.register_type_handler(State, handler, override=True)
    handler.close()


@BOTH
def test_an_abstract_handler_cannot_be_made(type_handlers: Any, metadata: Any) -> None:
    class Half(type_handlers.TypeHandler):  # type: ignore[misc]  # whichever library's it is
        def typestr(self) -> str:
            return "half"

    with pytest.raises(TypeError, match="abstract"):
        Half()


@BOTH
async def test_the_handler_is_a_worker_of_penstock_s_pipelines(
    type_handlers: Any, metadata: Any, tmp_path: Path
) -> None:
    """Also a subclass of Orbax's own TypeHandler: it is known by what it can do."""
    handler = handler_of(type_handlers, metadata)
    registry = penstock_handlers.create_type_handler_registry(
        (MyState, handler),
        (np.ndarray, penstock_handlers.NumpyHandler()),
        (jax.Array, penstock_handlers.ArrayHandler()),
    )
    tree = {"state": my_state(1), "deep": [my_state(2), np.arange(3)]}
    path = tmp_path / "checkpoint"
    async with penstock.Checkpointer(registry=TypeHandlerLookup(registry)) as checkpointer:
        save = await checkpointer.save(path, tree)
        tree["state"].a[:] = -1  # type: ignore[attr-defined]  # staged: it may change
        await save
        assert handler.finalized == [Path(f"{path}.orbax-checkpoint-tmp")]
        assert [type(arg).__name__ for arg in handler.args] == ["SaveArgs", "SaveArgs"]
        assert (path / "deep.0" / "data.npz").exists()

        back = await checkpointer.restore(path)
        assert_state(back["state"], my_state(1))
        assert_state(back["deep"][0], my_state(2))
        assert [type(arg).__name__ for arg in handler.args[2:]] == ["RestoreArgs", "RestoreArgs"]

        back = await checkpointer.restore(path, like={"state": MyState, "deep": [my_state(), np.ndarray]})
        assert_state(back["state"], my_state(1))
        assert checkpointer.statistics().leased == 0

    handler.close()


async def test_penstock_s_own_registry_takes_the_handler_as_it_is(tmp_path: Path) -> None:
    from penstock.handlers import default_handlers

    handler = handler_of(penstock_handlers, penstock_metadata)
    registry = default_handlers(entry_points=False)
    registry.register(MyState, handler)
    registry.register(np.ndarray, penstock_handlers.NumpyHandler(), override=True)
    async with penstock.Checkpointer(registry=registry) as checkpointer:
        await (await checkpointer.save(tmp_path / "x", {"s": my_state(3), "n": np.arange(2)}))
        back = await checkpointer.restore(tmp_path / "x")
        assert_state(back["s"], my_state(3))
        assert np.array_equal(back["n"], np.arange(2))

    handler.close()


async def test_an_error_in_the_background_names_the_leaf_and_the_handler(tmp_path: Path) -> None:
    handler = handler_of(penstock_handlers, penstock_metadata)

    def fail(file: Path, state: MyState) -> None:
        raise OSError(28, "no space left")

    handler._write = fail
    registry = penstock_handlers.create_type_handler_registry((MyState, handler))
    async with penstock.Checkpointer(registry=TypeHandlerLookup(registry)) as checkpointer:
        with pytest.raises(HandlerFailedError, match=r"\['s'\].*MyStateHandler.*no space left") as caught:
            await (await checkpointer.save(tmp_path / "x", {"s": my_state()}))

        assert isinstance(caught.value.__cause__, OSError)
        assert checkpointer.statistics().leased == 0

    assert list(tmp_path.iterdir()) == []
    handler.close()
