"""What a library made for Orbax, from Orbax's base classes, works in penstock.orbax as it is."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as _orbax
import orbax.checkpoint.experimental.v1 as _orbax_v1
import pytest
from flax.training import checkpoints as flax_checkpoints
from flax.training import orbax_utils

import penstock.orbax as penstock_ocp
import penstock.orbax.v1 as penstock_v1

orbax: Any = _orbax  # it has no types
orbax_v1: Any = _orbax_v1
ours: Any = penstock_ocp


class Counter:
    """An iterator whose place is saved, as a data loader of another library."""

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> int:
        self.at += 1
        return self.at


class CounterHandler(orbax.CheckpointHandler):  # type: ignore[misc]  # it has no types
    """Saves such an iterator."""

    def save(self, directory: Any, args: Any) -> None:
        (directory / "place.json").write_text(json.dumps(args.item.at))

    def restore(self, directory: Any, args: Any) -> Counter:
        found = Counter() if args.item is None else args.item
        found.at = json.loads((directory / "place.json").read_text())
        return found


@orbax.args.register_with_handler(CounterHandler, for_save=True)
@dataclasses.dataclass
class CounterSave(orbax.args.CheckpointArgs):  # type: ignore[misc]  # it has no types
    """As grain's `PyGrainCheckpointSave`."""

    item: Any


@orbax.args.register_with_handler(CounterHandler, for_restore=True)
@dataclasses.dataclass
class CounterRestore(orbax.args.CheckpointArgs):  # type: ignore[misc]  # it has no types
    """As grain's `PyGrainCheckpointRestore`."""

    item: Any = None


class NumberHandler(orbax.AsyncCheckpointHandler):  # type: ignore[misc]  # it has no types
    """Saves a number in the background."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    async def async_save(self, directory: Any, args: Any) -> list[Future[Any]]:
        return [self._pool.submit((directory / "number").write_text, str(args.item))]

    def save(self, directory: Any, args: Any) -> None:
        raise AssertionError("it can save in the background")

    def restore(self, directory: Any, args: Any) -> int:
        return int((directory / "number").read_text())

    def close(self) -> None:
        self._pool.shutdown()


@orbax.args.register_with_handler(NumberHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class NumberArgs(orbax.args.CheckpointArgs):  # type: ignore[misc]  # it has no types
    """For both."""

    item: Any = None


@pytest.mark.parametrize("reader", [ours, orbax], ids=["to-penstock", "to-orbax"])
@pytest.mark.parametrize("writer", [ours, orbax], ids=["penstock", "orbax"])
def test_an_iterator_of_a_library_resumes_at_the_same_place(tmp_path: Path, writer: Any, reader: Any) -> None:
    data = Counter()
    next(data)
    with writer.CheckpointManager(tmp_path) as manager:
        state = writer.args.StandardSave({"w": jnp.ones(3)})
        manager.save(0, args=writer.args.Composite(state=state, data=CounterSave(data)))
    expected = next(data)

    with reader.CheckpointManager(tmp_path) as manager:
        restored = manager.restore(0, args=reader.args.Composite(data=CounterRestore(Counter())))
    assert next(restored["data"]) == expected


def test_what_was_saved_by_a_library_is_restored_without_arguments(tmp_path: Path) -> None:
    with ours.Checkpointer(ours.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", args=ours.args.Composite(data=CounterSave(Counter())))
    with ours.Checkpointer(ours.CompositeCheckpointHandler()) as checkpointer:
        assert checkpointer.restore(tmp_path / "one")["data"].at == 0


def test_a_handler_of_a_library_has_the_arguments_that_it_registered(tmp_path: Path) -> None:
    with ours.Checkpointer(CounterHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", Counter())
        assert checkpointer.restore(tmp_path / "one").at == 0


def test_a_handler_of_a_library_saves_in_the_background(tmp_path: Path) -> None:
    with ours.CheckpointManager(tmp_path, item_handlers=NumberHandler()) as manager:
        manager.save(0, args=NumberArgs(7))
        manager.wait_until_finished()
        assert manager.restore(0, args=NumberArgs()) == 7


def test_arguments_without_a_handler_are_refused(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Unregistered(orbax.args.CheckpointArgs):  # type: ignore[misc]  # it has no types
        item: Any = None

    with (
        ours.CheckpointManager(tmp_path) as manager,
        pytest.raises(ValueError, match="Unable to find registered"),
    ):
        manager.save(0, args=Unregistered())


def test_a_registry_of_orbax_says_which_handler_saves_an_item(tmp_path: Path) -> None:
    registry = orbax.DefaultCheckpointHandlerRegistry()
    registry.add("data", CounterSave, CounterHandler())
    registry.add("data", CounterRestore, CounterHandler())
    with ours.CheckpointManager(tmp_path, handler_registry=registry) as manager:
        manager.save(0, args=ours.args.Composite(data=CounterSave(Counter())))
        manager.wait_until_finished()
        assert manager.restore(0)["data"].at == 0


def test_leaf_arguments_of_orbax_count(tmp_path: Path) -> None:
    tree = {"a": jnp.arange(4.0), "b": np.arange(3)}
    with ours.PyTreeCheckpointer() as checkpointer:
        wanted = jax.tree.map(lambda _: orbax.SaveArgs(dtype=np.float16), tree)
        checkpointer.save(tmp_path / "one", tree, save_args=wanted)
        longer = orbax.ArrayRestoreArgs(dtype=np.float32, global_shape=(6,), strict=False)
        args = {"a": longer, "b": orbax.RestoreArgs(restore_type=np.ndarray, dtype=np.int8)}
        found = checkpointer.restore(tmp_path / "one", restore_args=args)

    assert isinstance(found["a"], jax.Array)
    assert (found["a"].shape, str(found["a"].dtype), str(found["b"].dtype)) == ((6,), "float32", "int8")


def test_arguments_that_flax_makes_count(tmp_path: Path) -> None:
    tree = {"a": jnp.arange(4.0), "b": np.arange(3)}
    with ours.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "one", tree, save_args=orbax_utils.save_args_from_target(tree))
        found = checkpointer.restore(
            tmp_path / "one", item=tree, restore_args=orbax_utils.restore_args_from_target(tree)
        )

    assert isinstance(found["a"], jax.Array)
    assert isinstance(found["b"], np.ndarray)


class Word:
    """A leaf of another library."""

    def __init__(self, text: str) -> None:
        self.text = text


class WordHandler(orbax.type_handlers.TypeHandler):  # type: ignore[misc]  # it has no types
    """Stores words as files."""

    def typestr(self) -> str:
        return "tests.Word"

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        return [orbax.metadata.value.Metadata(name=info.name, directory=info.parent_dir) for info in infos]

    async def serialize(
        self, values: Sequence[Word], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        for value, info in zip(values, infos, strict=True):
            (info.parent_dir / f"{info.name}.txt").write_text(value.text)

        return [orbax.future.NoopFuture()]

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Word]:
        return [Word((info.parent_dir / f"{info.name}.txt").read_text()) for info in infos]


@pytest.mark.parametrize("registered", ["with orbax", "in a registry of orbax"])
def test_a_type_handler_of_a_library_stores_its_leaves(tmp_path: Path, registered: str) -> None:
    class Special(Word):
        """So that what is registered for the process is for this test alone."""

    class SpecialHandler(WordHandler):
        def typestr(self) -> str:
            return f"tests.{registered}"

    options: dict[str, Any] = {}
    if registered == "with orbax":
        orbax.type_handlers.register_type_handler(Special, SpecialHandler())
    else:
        entries = (Special, SpecialHandler()), (np.ndarray, orbax.type_handlers.NumpyHandler())
        options["type_handler_registry"] = orbax.type_handlers.create_type_handler_registry(*entries)

    with ours.Checkpointer(ours.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(tmp_path / "one", args=ours.args.PyTreeSave({"w": Special("yes"), "x": np.ones(2)}))
        found = checkpointer.restore(tmp_path / "one")

    assert found["w"].text == "yes"
    np.testing.assert_array_equal(found["x"], np.ones(2))


class PlaceHandler(orbax_v1.handlers.CheckpointableHandler[Counter, Counter]):  # type: ignore[misc]  # it has no types
    """Saves the place of an iterator, in the newer API."""

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, Counter)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return isinstance(abstract_checkpointable, Counter)

    async def save(self, directory: Any, checkpointable: Counter) -> Any:
        at = checkpointable.at

        async def write() -> None:
            ((await directory.await_creation()) / "place").write_text(str(at))

        return write()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        async def read() -> Counter:
            found = Counter() if abstract_checkpointable is None else abstract_checkpointable
            found.at = int((directory / "place").read_text())
            return found

        return read()

    async def metadata(self, directory: Any) -> None:
        return None


def context_of(library: Any, registry: Any) -> Any:
    context = library.Context()
    context.checkpointables.registry = registry
    return context


@pytest.mark.parametrize("reader", [penstock_v1, orbax_v1], ids=["to-penstock", "to-orbax"])
@pytest.mark.parametrize("writer", [penstock_v1, orbax_v1], ids=["penstock", "orbax"])
def test_a_handler_of_the_newer_api_saves_and_loads(tmp_path: Path, writer: Any, reader: Any) -> None:
    data = Counter()
    next(data)
    with context_of(writer, writer.handlers.local_registry().add(PlaceHandler)):
        writer.save_checkpointables(tmp_path / "one", {"data": data, "state": {"w": jnp.ones(3)}})
    expected = next(data)

    with context_of(reader, reader.handlers.local_registry().add(PlaceHandler)):
        found = reader.load_checkpointables(tmp_path / "one", {"data": Counter()})
    assert next(found["data"]) == expected


def test_a_registry_of_orbax_serves_the_newer_api(tmp_path: Path) -> None:
    registry = orbax_v1.handlers.local_registry(include_global_registry=False).add(PlaceHandler)
    with context_of(penstock_v1, registry):
        penstock_v1.save_checkpointables(tmp_path / "one", {"data": Counter()})
        assert penstock_v1.load_checkpointables(tmp_path / "one")["data"].at == 0


def test_libraries_take_checkpointers_and_handlers_for_those_of_orbax() -> None:
    """As flax asks before it waits, and before it restores."""
    handler = ours.PyTreeCheckpointHandler()
    assert isinstance(handler, orbax.PyTreeCheckpointHandler)
    for theirs, checkpointer in (
        (orbax.AsyncCheckpointer, ours.AsyncCheckpointer(handler)),
        (orbax.AsyncCheckpointer, ours.StandardCheckpointer()),
        (orbax.Checkpointer, ours.PyTreeCheckpointer()),
    ):
        assert isinstance(checkpointer, theirs)
    assert not isinstance(ours.Checkpointer(handler), orbax.AsyncCheckpointer)
    assert not isinstance(ours.StandardCheckpointHandler(), orbax.PyTreeCheckpointHandler)


def test_flax_waits_for_a_checkpointer_of_ours(tmp_path: Path) -> None:
    state = {"w": jnp.arange(4.0), "step": 3}
    with ours.AsyncCheckpointer(ours.PyTreeCheckpointHandler()) as checkpointer:
        for step in (1, 2):
            flax_checkpoints.save_checkpoint(
                tmp_path, state, step=step, orbax_checkpointer=checkpointer, keep=1
            )
        found = flax_checkpoints.restore_checkpoint(tmp_path, target=state, orbax_checkpointer=checkpointer)

    np.testing.assert_array_equal(found["w"], state["w"])
    assert found["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_2"]


def test_orbax_is_not_imported_for_any_of_it(tmp_path: Path) -> None:
    script = (
        "import sys, penstock.orbax as ocp, jax.numpy as jnp\n"
        f"with ocp.CheckpointManager({str(tmp_path)!r}) as manager:\n"
        "    manager.save(0, args=ocp.args.StandardSave({'w': jnp.ones(3)}))\n"
        "    manager.wait_until_finished()\n"
        "    manager.restore(0)\n"
        "try:\n"
        "    ocp.type_handlers.get_type_handler(set)\n"
        "except ValueError:\n"
        "    print([name for name in sys.modules if name.startswith('orbax')])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )

    assert run.stdout.strip() == "[]"
