"""What a type handler is given: all its leaves in one call, jax's own keys, limiters of the memory budget."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

import penstock.orbax as face
from penstock import MemoryRegulator
from penstock.embedding import ByteAccount
from penstock.kernel import KeyKind, ParamInfo
from penstock.orbax import v1
from penstock.orbax.stage_workers import ByteLimiter, Limiters, key_entries
from penstock.orbax.v1.path import ExistingPath
from penstock.stages.pytree import flatten_tree

BOTH = pytest.mark.parametrize("library", [face, ocp], ids=["penstock", "orbax"])


class Note:
    def __init__(self, text: str) -> None:
        self.text = text


class Remark(Note):
    """Another type of the same handler."""


@jax.tree_util.register_dataclass
@dataclass
class Fields:
    first: Any
    second: Any


@jax.tree_util.register_pytree_node_class
class Flat:
    """A node without names for its children."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Flat:
        return cls(*children)


def notes_handler(library: Any) -> Any:
    """Make a handler that writes one file for each batch, and so would overwrite itself if there were two."""

    class NotesHandler(library.type_handlers.TypeHandler):  # type: ignore[misc]  # of either library
        def __init__(self) -> None:
            self.calls: list[str] = []
            self.infos: list[Any] = []

        def typestr(self) -> str:
            return "note"

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
            self.calls.append("serialize")
            self.infos = list(infos)
            for info, value in zip(infos, values, strict=True):
                await info.device_host_byte_limiter.wait_for_bytes(len(value.text))
                await info.byte_limiter.wait_for_bytes(len(value.text))

            parent = infos[0].parent_dir
            texts = {info.name: value.text for info, value in zip(infos, values, strict=True)}
            (Path(parent) / "notes.json").write_text(json.dumps(texts))
            for info, value in zip(infos, values, strict=True):
                await info.byte_limiter.release_bytes(len(value.text))
                await info.device_host_byte_limiter.release_bytes(len(value.text))

            return []

        async def deserialize(self, infos: Any, args: Any = None) -> list[Any]:
            self.calls.append("deserialize")
            await infos[0].byte_limiter.wait_for_bytes(3)
            await infos[0].byte_limiter.release_bytes(3)
            texts = json.loads((Path(infos[0].parent_dir) / "notes.json").read_text())
            return [Note(texts[info.name]) for info in infos]

        async def metadata(self, infos: Any) -> list[Any]:
            return [None for _ in infos]

        def memory_size(self, values: Any) -> list[tuple[int, int]]:
            return [(len(value.text), len(value.text)) for value in values]

    return NotesHandler()


def checkpointer(library: Any, handler: Any) -> Any:
    registry = library.type_handlers.create_type_handler_registry((Note, handler))
    return library.Checkpointer(library.PyTreeCheckpointHandler(type_handler_registry=registry))


@BOTH
def test_all_leaves_of_a_handler_come_in_one_call(library: Any, tmp_path: Path) -> None:
    handler = notes_handler(library)
    saver = checkpointer(library, handler)
    saver.save(tmp_path / "a", {"a": Note("x"), "b": [Remark("yy"), Note("zzz")]})
    restored = saver.restore(tmp_path / "a")

    assert handler.calls == ["serialize", "deserialize"]
    assert [info.name for info in handler.infos] == ["a", "b.0", "b.1"]
    assert (restored["a"].text, [note.text for note in restored["b"]]) == ("x", ["yy", "zzz"])


@BOTH
def test_a_save_says_jax_s_own_keys(library: Any, tmp_path: Path) -> None:
    handler = notes_handler(library)
    tree = {"a": Fields(Note("x"), [Note("y")]), "b": {"c.d": Note("z")}, "e": Flat(Note("u"))}
    checkpointer(library, handler).save(tmp_path / "a", tree)

    assert [info.keypath for info in handler.infos] == [
        (DictKey("a"), GetAttrKey("first")),
        (DictKey("a"), GetAttrKey("second"), SequenceKey(0)),
        (DictKey("b"), DictKey("c.d")),
        (DictKey("e"), FlattenedIndexKey(0)),
    ]


@pytest.mark.parametrize(
    "tree",
    [
        {"a": [{1: 0, 23: (0, 0)}], "x.a": {"y": 0}, "']": {"['q']": 0}},
        Fields(Flat(0, [0]), {"first": {True: 0}}),
        {1.5: 0},
        0,
    ],
)
def test_keys_are_those_of_jax(tree: Any) -> None:
    flat, _ = flatten_tree(tree)
    paths: Any = jax.tree_util.tree_flatten_with_path(tree)[0]
    found = [key_entries(leaf.info) for leaf in flat]
    assert found == [path for path, _ in paths]
    assert [[type(entry.key) for entry in keys if isinstance(entry, DictKey)] for keys in found] == [
        [type(entry.key) for entry in path if isinstance(entry, DictKey)] for path, _ in paths
    ]


def test_keys_of_a_leaf_in_an_item_are_those_of_the_item() -> None:
    info = ParamInfo(("a", "0"), (KeyKind.MAPPING, KeyKind.SEQUENCE), "['item']['a'][0]")
    assert key_entries(info) == (DictKey("a"), SequenceKey(0))
    bare = ParamInfo(("a", "0"), (KeyKind.MAPPING, KeyKind.SEQUENCE), "")
    assert key_entries(bare) == (DictKey("a"), SequenceKey(0))


class TestLimiters:
    pytestmark = pytest.mark.anyio

    async def test_bytes_are_waited_for_until_they_are_released(self) -> None:
        limiter = ByteLimiter(ByteAccount(10))
        order: list[str] = []
        await limiter.wait_for_bytes(4)
        await limiter.wait_for_bytes(4)

        async def third() -> None:
            order.append("wait")
            await limiter.wait_for_bytes(5)
            order.append("granted")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(third)
            await anyio.wait_all_tasks_blocked()
            order.append("release")
            await limiter.release_bytes(6)  # of two reservations

        assert order == ["wait", "release", "granted"]
        await limiter.release_bytes(7)
        with pytest.raises(ValueError, match="1 more than were reserved"):
            await limiter.release_bytes(1)

    async def test_a_request_for_the_limit_and_above_is_granted_alone(self) -> None:
        limiter = ByteLimiter(ByteAccount(10))
        for nbytes in (10, 25):
            await limiter.wait_for_bytes(nbytes)
            await limiter.release_bytes(nbytes)

    async def test_the_limits_are_those_of_the_memory_budget(self) -> None:
        memory = MemoryRegulator(
            100, save_device_host_concurrent_bytes=30, save_concurrent_bytes=20, restore_concurrent_bytes=10
        )
        saving, restoring = Limiters.of(memory, "save"), Limiters.of(memory, "restore")
        assert (saving.in_flight.max_bytes, saving.device_host.max_bytes) == (20, 30)
        assert (restoring.in_flight.max_bytes, restoring.device_host.max_bytes) == (10, 100)


class OneFile:
    """A leaf handler of the newer form that writes one file for each batch."""

    calls: list[tuple[str, list[Any], Any]]

    def __init__(self, context: Any = None) -> None:
        self.context = context

    async def serialize(self, params: Sequence[Any], serialization_context: Any) -> Awaitable[None]:
        limiter = serialization_context.byte_limiter
        assert serialization_context.ts_context is not None  # what Orbax's own handlers open arrays in
        self.calls.append(("serialize", [param.keypath for param in params], limiter))
        texts = {param.name: param.value.text for param in params}
        await limiter.wait_for_bytes(len(texts))
        await limiter.release_bytes(len(texts))

        async def write() -> None:
            directory = await serialization_context.parent_dir.await_creation()
            (Path(directory) / "notes.json").write_text(json.dumps(texts))

        return write()

    async def deserialize(self, params: Sequence[Any], deserialization_context: Any) -> Awaitable[Any]:
        limiter = deserialization_context.byte_limiter
        assert deserialization_context.ts_context is not None
        self.calls.append(("deserialize", [param.name for param in params], limiter))

        async def read() -> list[Note]:
            texts = json.loads((Path(deserialization_context.parent_dir) / "notes.json").read_text())
            return [Note(texts[param.name]) for param in params]

        return read()

    async def metadata(self, params: Sequence[Any], deserialization_context: Any) -> list[type[Note]]:
        return [Note for _ in params]


@pytest.mark.anyio
async def test_a_leaf_handler_of_the_newer_form_gets_one_batch(tmp_path: Path) -> None:
    class Counted(OneFile):
        calls: list[tuple[str, list[Any], Any]] = []  # noqa: RUF012  # of this test

    registry = v1.serialization.StandardLeafHandlerRegistry()
    registry.add(Note, Note, Counted)
    registry.add(Remark, Remark, Counted)
    handler = v1.handlers.PyTreeHandler(leaf_handler_registry=registry)
    tree = {"a": Note("x"), "b": [Remark("y"), Note("z")], "c": Fields(Note("u"), 1)}
    await (await handler.save(ExistingPath(tmp_path / "tree"), tree))
    loaded: Any = await (await handler.load(tmp_path / "tree"))

    assert (loaded["a"].text, [note.text for note in loaded["b"]]) == ("x", ["y", "z"])
    (_, keypaths, saving), (_, names, loading) = Counted.calls
    shown = [jax.tree_util.keystr(path) for path in keypaths]
    assert shown == ["['a']", "['b'][0]", "['b'][1]", "['c'].first"]
    assert names == ["a", "b.0", "b.1", "c.first"]
    assert saving.max_bytes > 0
    assert loading.max_bytes > 0


class OwnDatabase(OneFile):
    """A leaf handler of the newer form that writes a database of its process, as Orbax's own do."""

    async def serialize(self, params: Sequence[Any], serialization_context: Any) -> Awaitable[None]:
        values = [np.frombuffer(param.value.text.encode(), np.uint8).copy() for param in params]
        names = [param.name for param in params]

        async def write() -> None:
            directory = await serialization_context.parent_dir.await_creation()
            infos = [
                face.type_handlers.ParamInfo(name=name, parent_dir=directory, is_ocdbt_checkpoint=True)
                for name in names
            ]
            for future in await face.type_handlers.NumpyHandler().serialize(values, infos):
                await anyio.to_thread.run_sync(future.result)

        return write()

    async def deserialize(self, params: Sequence[Any], deserialization_context: Any) -> Awaitable[Any]:
        directory = deserialization_context.parent_dir
        assert deserialization_context.ocdbt_checkpoint
        infos = [
            face.type_handlers.ParamInfo(name=param.name, parent_dir=directory, is_ocdbt_checkpoint=True)
            for param in params
        ]

        async def read() -> list[Note]:
            found = await face.type_handlers.NumpyHandler().deserialize(infos)
            return [Note(value.tobytes().decode()) for value in found]

        return read()


@pytest.mark.anyio
@pytest.mark.parametrize("with_arrays", [True, False])
async def test_what_a_leaf_handler_writes_to_a_database_of_its_own_is_found(
    with_arrays: bool, tmp_path: Path
) -> None:
    registry = v1.serialization.StandardLeafHandlerRegistry()
    registry.add(Note, Note, OwnDatabase)
    handler = v1.handlers.PyTreeHandler(leaf_handler_registry=registry)
    tree: dict[str, Any] = {"a": Note("x"), "b": [Note("some text")]}
    if with_arrays:
        tree["c"] = np.arange(3)
    await (await handler.save(ExistingPath(tmp_path / "tree"), tree))
    loaded: Any = await (await handler.load(tmp_path / "tree"))

    assert (loaded["a"].text, loaded["b"][0].text) == ("x", "some text")
    assert not with_arrays or loaded["c"].tolist() == [0, 1, 2]


@BOTH
async def test_a_type_handler_casts_as_it_is_told(tmp_path: Path, library: Any) -> None:
    class OwnNumpyHandler(library.type_handlers.NumpyHandler):  # type: ignore[misc]  # of either library
        async def deserialize(self, infos: Any, args: Any = None) -> Any:
            return await super().deserialize(infos, args)

    handlers = library.type_handlers.create_type_handler_registry((np.ndarray, OwnNumpyHandler()))
    handler = library.PyTreeCheckpointHandler(type_handler_registry=handlers)
    asked = library.RestoreArgs(restore_type=np.ndarray, dtype=np.uint8)
    with library.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "tree", {"a": np.arange(3)})
        restored = checkpointer.restore(
            tmp_path / "tree", args=library.args.PyTreeRestore(restore_args={"a": asked})
        )

    assert restored["a"].dtype == np.uint8
    assert restored["a"].tolist() == [0, 1, 2]
