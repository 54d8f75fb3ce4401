"""Handlers of one's own, on both libraries; and the guide's way of writing them."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread
import jax.numpy as jnp
import numpy as np
import pytest

import penstock.orbax.v1 as penstock_v1
from penstock.orbax.v1.errors import InvalidLayoutError
from penstock.orbax.v1.handler_registration import AlreadyExistsError, NoEntryError
from penstock.orbax.v1.path import ExistingPath
from penstock.orbax.v1.serialization import AlreadyRegisteredTypeError, UnregisteredTypeError

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@dataclass
class Point:
    x: int
    y: float


class AbstractPoint:
    pass


class PointHandler:
    """Derived from nothing: whoever has the methods is a handler."""

    async def save(self, directory: Any, checkpointable: Point) -> Awaitable[None]:
        copied = asdict(checkpointable)

        async def write() -> None:
            path = await directory.await_creation()
            (Path(path) / "point.json").write_text(json.dumps(copied))

        return write()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Point]:
        async def read() -> Point:
            return Point(**json.loads((Path(directory) / "point.json").read_text()))

        return read()

    async def metadata(self, directory: Any) -> AbstractPoint:
        return AbstractPoint()

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, Point)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return isinstance(abstract_checkpointable, AbstractPoint)


class Counter:
    """Saves and loads itself."""

    def __init__(self, n: int) -> None:
        self.n = n

    async def save(self, directory: Any) -> Awaitable[None]:
        n = self.n

        async def write() -> None:
            (Path(await directory.await_creation()) / "n").write_text(str(n))

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        async def read() -> None:
            self.n = int((Path(directory) / "n").read_text())

        return read()


def with_registry(ocp: Any, *handlers: Any, **named: Any) -> Any:
    registry = ocp.handlers.local_registry()
    for handler in handlers:
        registry.add(handler)
    for name, handler in named.items():
        registry.add(handler, checkpointable_name=name)

    context = ocp.Context()
    context.checkpointables.registry = registry
    return context


def test_an_object_with_a_handler_is_an_item(ocp: Any, tmp_path: Path) -> None:
    with with_registry(ocp, PointHandler):
        point = Point(1, 2.5)
        response = ocp.save_checkpointables_async(tmp_path / "a", {"state": {"a": 1}, "point": point})
        point.x = 100  # it was taken already
        response.result()

        assert ocp.load_checkpointables(tmp_path / "a") == {"state": {"a": 1}, "point": Point(1, 2.5)}
        asked = {"point": AbstractPoint()}
        assert ocp.load_checkpointables(tmp_path / "a", asked) == {"point": Point(1, 2.5)}
        described = ocp.checkpointables_metadata(tmp_path / "a").metadata
        assert isinstance(described["point"], AbstractPoint)

    recorded = json.loads((tmp_path / "a" / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
    assert recorded["point"] == f"{PointHandler.__module__}.PointHandler"


def test_a_name_comes_before_all_other_handlers(ocp: Any, tmp_path: Path) -> None:
    with with_registry(ocp, config=ocp.handlers.JsonHandler):
        ocp.save_checkpointables(tmp_path / "a", {"config": {"a": [1]}, "other": {"a": [1]}})
        assert ocp.load_checkpointables(tmp_path / "a") == {"config": {"a": [1]}, "other": {"a": [1]}}

    assert json.loads((tmp_path / "a" / "config" / "data.json").read_text()) == {"a": [1]}
    assert (tmp_path / "a" / "other" / "_METADATA").exists()


def test_an_object_may_save_itself(ocp: Any, tmp_path: Path) -> None:
    ocp.save_checkpointables(tmp_path / "a", {"counter": Counter(7)})
    target = Counter(0)
    loaded = ocp.load_checkpointables(tmp_path / "a", {"counter": target})

    assert loaded["counter"] is target
    assert target.n == 7
    with pytest.raises(ValueError, match="you must pass an instance"):
        ocp.load_checkpointables(tmp_path / "a")
    assert isinstance(target, ocp.StatefulCheckpointable)
    assert not isinstance(Point(1, 2), ocp.StatefulCheckpointable)


def test_an_object_that_saves_itself_does_so_under_any_name(ocp: Any, tmp_path: Path) -> None:
    with with_registry(ocp, counter=ocp.handlers.JsonHandler):
        ocp.save_checkpointables(tmp_path / "a", {"counter": Counter(7)})
        loaded = ocp.load_checkpointables(tmp_path / "a", {"counter": Counter(0)})

    assert loaded["counter"].n == 7


def test_registries(ocp: Any) -> None:
    registry = ocp.handlers.local_registry(include_global_registry=False)
    assert registry.add(PointHandler, checkpointable_name="a", secondary_typestrs=["old"]) is registry
    assert registry.has("a")
    assert not registry.has("b")
    assert registry.get("a") is PointHandler
    assert list(registry.get_all_entries()) == [(PointHandler, "a")]
    assert list(registry.get_secondary_typestrs(PointHandler)) == ["old"]
    with pytest.raises(ValueError, match="already exists"):
        registry.add(PointHandler, checkpointable_name="a")
    with pytest.raises(KeyError):
        registry.get("b")
    with pytest.raises(ValueError, match="must be a type"):
        registry.add(PointHandler())

    copied = ocp.handlers.local_registry(registry, include_global_registry=False)
    with pytest.raises(ValueError, match="already exists"):
        copied.add(PointHandler)  # whatever name it is registered for
    copied.add(PointHandler, checkpointable_name="b")
    assert len(registry.get_all_entries()) == 1
    with pytest.raises(NotImplementedError):
        ocp.Context().checkpointables.registry.add(PointHandler)


def test_the_registries_of_the_process_are_alike() -> None:
    import orbax.checkpoint.experimental.v1 as orbax_v1

    ours, theirs = penstock_v1.handlers.global_registry(), orbax_v1.handlers.global_registry()
    for (mine, my_name), (other, name) in zip(ours.get_all_entries(), theirs.get_all_entries(), strict=True):
        assert (mine.__name__, my_name) == (other.__name__, name)
        assert list(ours.get_secondary_typestrs(mine)) == list(theirs.get_secondary_typestrs(other))


def test_a_class_is_registered_for_the_process() -> None:
    """Only here: a registration cannot be taken back."""
    registered = penstock_v1.handlers.register_handler(_Registered)

    assert registered is _Registered
    entries = penstock_v1.Context().checkpointables.registry.get_all_entries()
    assert entries[-1] == (_Registered, None)
    with pytest.raises(AlreadyExistsError):
        penstock_v1.handlers.register_handler(_Registered)


class _Registered(PointHandler):
    def is_handleable(self, checkpointable: Any) -> bool:
        return False

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return False


def test_whoever_has_the_methods_is_a_handler() -> None:
    assert isinstance(PointHandler(), penstock_v1.CheckpointableHandler)
    assert isinstance(penstock_v1.handlers.PyTreeHandler(), penstock_v1.CheckpointableHandler)
    assert not isinstance(Counter(1), penstock_v1.CheckpointableHandler)
    assert isinstance(ExistingPath(Path()), penstock_v1.path.PathAwaitingCreation)


@pytest.mark.parametrize("at", ["save", "background"])
def test_what_a_handler_raises_is_raised_and_nothing_is_left(at: str, tmp_path: Path) -> None:
    class Failing(PointHandler):
        async def save(self, directory: Any, checkpointable: Point) -> Awaitable[None]:
            if at == "save":
                raise LookupError("at once")

            async def write() -> None:
                await directory.await_creation()
                raise LookupError("later")

            return write()

    items = {"state": {"a": jnp.ones((100, 100))}, "point": Point(1, 2)}
    with with_registry(penstock_v1, Failing), pytest.raises(LookupError):
        penstock_v1.save_checkpointables(tmp_path / "a", items)

    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_awaited_also_by_those_below_it(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Nested(PointHandler):
        async def save(self, directory: Any, checkpointable: Point) -> Awaitable[None]:
            seen.append((directory.path.name, isinstance(directory, penstock_v1.path.PathAwaitingCreation)))

            async def write() -> None:
                below = directory / "below"
                assert Path(await below.await_creation()) == Path(directory.path) / "below"
                assert Path(directory.path).is_dir()
                Path(below.path).mkdir()

            return write()

    with with_registry(penstock_v1, Nested):
        penstock_v1.save_checkpointables(tmp_path / "a", {"point": Point(1, 2)})

    assert seen == [("point", True)]
    assert (tmp_path / "a" / "point" / "below").is_dir()


def test_an_async_handler_is_at_work_before_the_checkpoint_is_there(tmp_path: Path) -> None:
    seen, go_on = list[str](), threading.Event()

    class Slow(PointHandler):
        async def save(self, directory: Any, checkpointable: Point) -> Awaitable[None]:
            path = await directory.await_creation()
            (Path(path) / "begun").write_text("")

            async def write() -> None:
                await anyio.to_thread.run_sync(go_on.wait)
                seen.append("written")

            return write()

    with with_registry(penstock_v1, Slow):
        response = penstock_v1.save_checkpointables_async(tmp_path / "a", {"point": Point(1, 2)})

    assert (tmp_path / "a.orbax-checkpoint-tmp" / "point" / "begun").exists()
    assert not (tmp_path / "a").exists()
    assert not seen
    with pytest.raises(TimeoutError):
        response.result(timeout=0.01)

    go_on.set()
    response.result()
    assert (tmp_path / "a" / "point" / "begun").exists()


async def test_the_tree_handler_alone(tmp_path: Path) -> None:
    handler = penstock_v1.handlers.PyTreeHandler()
    tree = {"a": jnp.arange(4.0), "b": [1, "x"]}
    await (await handler.save(ExistingPath(tmp_path / "tree"), tree))

    assert not (tmp_path / "tree" / "_CHECKPOINT_METADATA").exists()
    loaded = await (await handler.load(tmp_path / "tree", {"a": np.ndarray, "b": [int, None]}))
    np.testing.assert_array_equal(loaded["a"], tree["a"])
    assert isinstance(loaded["a"], np.ndarray)
    assert loaded["b"] == tree["b"]
    assert (await handler.metadata(tmp_path / "tree"))["b"] == [0, "string"]
    assert handler.is_handleable(tree)
    assert not handler.is_handleable({"a": object()})
    assert handler.is_abstract_handleable({"a": int, "b": ..., "c": None})
    assert not handler.is_abstract_handleable({"a": AbstractPoint})
    with pytest.raises(UnregisteredTypeError):
        await handler.save(ExistingPath(tmp_path / "x"), {"a": object()})
    with pytest.raises(FileNotFoundError):
        await (await handler.load(tmp_path / "none"))


class PointLeafHandler:
    def __init__(self, context: Any = None) -> None:
        self.context = context

    async def serialize(self, params: Any, serialization_context: Any) -> Awaitable[None]:
        async def write() -> None:
            path = await serialization_context.parent_dir.await_creation()
            for param in params:
                (Path(path) / f"{param.name}.txt").write_text(json.dumps(asdict(param.value)))

        return write()

    async def deserialize(self, params: Any, deserialization_context: Any) -> Awaitable[Any]:
        async def read() -> Any:
            folder = Path(deserialization_context.parent_dir)
            found = [Point(**json.loads((folder / f"{param.name}.txt").read_text())) for param in params]
            negative = [param.value == "negative" for param in params]
            return [Point(-p.x, -p.y) if minus else p for p, minus in zip(found, negative, strict=True)]

        return read()

    async def metadata(self, params: Any, deserialization_context: Any) -> Any:
        return [AbstractPoint() for _ in params]


async def test_leaves_of_ones_own_type(tmp_path: Path) -> None:
    registry = penstock_v1.serialization.StandardLeafHandlerRegistry()
    registry.add(Point, AbstractPoint, PointLeafHandler)
    handler = penstock_v1.handlers.PyTreeHandler(leaf_handler_registry=registry)
    tree = {"points": [Point(1, 2), Point(3, 4)], "array": np.arange(3)}
    await (await handler.save(ExistingPath(tmp_path / "tree"), tree))

    loaded = await (await handler.load(tmp_path / "tree"))
    assert loaded["points"] == tree["points"]
    asked = {"points": [AbstractPoint(), AbstractPoint], "array": np.ndarray}
    assert (await (await handler.load(tmp_path / "tree", asked)))["points"] == tree["points"]
    described = await handler.metadata(tmp_path / "tree")
    assert isinstance(described["points"][1], AbstractPoint)
    with pytest.raises(UnregisteredTypeError):
        await (await penstock_v1.handlers.PyTreeHandler().load(tmp_path / "tree"))
    assert isinstance(PointLeafHandler(), penstock_v1.serialization.LeafHandler)


def test_leaf_registries() -> None:
    registry = penstock_v1.serialization.StandardLeafHandlerRegistry()
    built_in = registry.get(np.ndarray)

    class Special(np.ndarray[Any, Any]):
        pass

    assert registry.get(Special) is built_in
    registry.add(Special, AbstractPoint, PointLeafHandler, secondary_typestrs=["old"])
    registry.add(Special, AbstractPoint, PointLeafHandler)
    assert registry.get(Special) is PointLeafHandler
    assert registry.get(np.ndarray) is built_in
    assert registry.get_abstract(AbstractPoint) is PointLeafHandler
    assert list(registry.get_secondary_typestrs(PointLeafHandler)) == ["old"]
    with pytest.raises(AlreadyRegisteredTypeError):
        registry.add(np.ndarray, AbstractPoint, PointHandler)
    with pytest.raises(UnregisteredTypeError):
        registry.get(Point)

    registry.add(np.ndarray, Point, PointLeafHandler, override=True)
    assert registry.get(np.ndarray) is PointLeafHandler


def test_protobuf_messages(ocp: Any, tmp_path: Path) -> None:
    struct = pytest.importorskip("google.protobuf.struct_pb2")
    message = struct.Value(string_value="text")
    ocp.save_checkpointables(tmp_path / "a", {"message": message})

    assert ocp.load_checkpointables(tmp_path / "a", {"message": struct.Value})["message"] == message
    with pytest.raises(ValueError, match="must be provided"):
        ocp.load_checkpointables(tmp_path / "a")


def test_a_value_without_a_handler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoEntryError, match="Could not identify a valid handler"):
        penstock_v1.save_checkpointables(tmp_path / "a", {"point": Point(1, 2)})

    with with_registry(penstock_v1, PointHandler):
        penstock_v1.save_checkpointables(tmp_path / "a", {"point": Point(1, 2)})
    with pytest.raises(NoEntryError, match="Failed to load checkpointable: point") as caught:
        penstock_v1.load_checkpointables(tmp_path / "a")

    assert isinstance(caught.value.__context__, FileNotFoundError)
    with pytest.raises(InvalidLayoutError):
        penstock_v1.load(tmp_path / "a")
