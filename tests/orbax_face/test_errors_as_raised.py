"""The same script on both libraries: what a handler of the caller's raises has its own type."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import orbax.checkpoint.experimental.v1 as orbax_v1
import pytest

import penstock.orbax
import penstock.orbax.v1 as penstock_v1

LIBRARIES: tuple[Any, Any] = (penstock.orbax, orbax.checkpoint)
BOTH = pytest.mark.parametrize("ocp", LIBRARIES, ids=["penstock", "orbax"])
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _within_the_test() -> Generator[None]:
    """Orbax leaves coroutines that nobody awaits: Python says so here, where it is ignored."""
    yield
    gc.collect()


class TheirOwnError(Exception):
    """Of no library's family."""


class Word:
    """A leaf that only its handler knows."""


def fail(*args: Any) -> Any:
    del args
    raise TheirOwnError("on purpose")


def nothing(*args: Any) -> Any:
    del args


def word_handler(ocp: Any, failing: str) -> Any:
    """A type handler that fails at one step."""
    at: dict[str, Callable[..., Any]] = dict.fromkeys(
        ("serialize", "write", "deserialize", "finalize"), nothing
    )
    at[failing] = fail

    class WordHandler(ocp.type_handlers.TypeHandler):  # type: ignore[misc]  # either library's
        def typestr(self) -> str:
            return "tests.FailingWord"

        async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
            return [ocp.metadata.value.Metadata(name=info.name, directory=info.parent_dir) for info in infos]

        async def serialize(self, values: Any, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
            del values, infos, args
            at["serialize"]()
            future: Future[None] = Future()
            try:
                future.set_result(at["write"]())
            except TheirOwnError as error:
                future.set_exception(error)
            return [future]  # it writes nothing: Orbax may not have made the directory yet

        async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Word]:
            del args
            at["deserialize"]()
            return [Word() for _ in infos]

        def finalize(self, directory: Any) -> None:
            del directory
            at["finalize"]()

    return WordHandler()


def tree_handler(ocp: Any, failing: str) -> Any:
    types = ocp.type_handlers
    registry = types.create_type_handler_registry(
        (Word, word_handler(ocp, failing)),
        (np.ndarray, types.NumpyHandler()),
        (jax.Array, types.ArrayHandler()),
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def tree() -> dict[str, Any]:
    return {"word": Word(), "array": jnp.arange(3), "host": np.arange(2)}


@BOTH
@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ["Checkpointer", "AsyncCheckpointer"])
@pytest.mark.parametrize("failing", ["serialize", "write", "finalize"])
def test_what_a_type_handler_raises_in_a_save(ocp: Any, kind: str, failing: str, tmp_path: Path) -> None:
    checkpointer = getattr(ocp, kind)(tree_handler(ocp, failing))
    if (failing, ocp) == ("finalize", orbax.checkpoint):
        pytest.skip("Orbax does not call it for a tree of one process with OCDBT")

    def save() -> None:
        checkpointer.save(tmp_path / "one", args=ocp.args.PyTreeSave(tree()))
        if kind == "AsyncCheckpointer":
            checkpointer.wait_until_finished()

    with pytest.raises(TheirOwnError, match="on purpose") as caught:
        save()

    if ocp is penstock.orbax:
        assert any("WordHandler" in note for note in caught.value.__notes__)
    checkpointer.close()


@BOTH
@pytest.mark.parametrize("item", [None, tree()], ids=["as stored", "with an item"])
def test_what_a_type_handler_raises_in_a_restore(ocp: Any, item: Any, tmp_path: Path) -> None:
    with ocp.Checkpointer(tree_handler(ocp, "nothing")) as checkpointer:
        checkpointer.save(tmp_path / "one", args=ocp.args.PyTreeSave(tree()))

    args = None if item is None else jax.tree.map(lambda _: ocp.RestoreArgs(), item)
    with (
        ocp.Checkpointer(tree_handler(ocp, "deserialize")) as checkpointer,
        pytest.raises(TheirOwnError, match="on purpose"),
    ):
        checkpointer.restore(tmp_path / "one", args=ocp.args.PyTreeRestore(item, restore_args=args))


def whole_handler(ocp: Any, failing: str) -> tuple[Any, Any]:
    """A handler of a whole item that fails at one step, and its arguments."""

    class Handler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]  # either library's
        async def async_save(self, directory: Any, args: Any) -> list[Any]:
            del directory, args
            if failing == "async_save":
                fail()
            future: Future[None] = Future()
            if failing == "write":
                future.set_exception(TheirOwnError("on purpose"))
            else:
                future.set_result(None)
            return [future]

        def save(self, directory: Any, args: Any) -> None:
            raise AssertionError("it saves in the background")

        def restore(self, directory: Any, args: Any) -> int:
            return int(fail()) if failing == "restore" else 1

        def finalize(self, directory: Any) -> None:
            if failing == "finalize":
                fail()

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    @dataclasses.dataclass
    class Args(ocp.args.CheckpointArgs):  # type: ignore[misc]  # either library's
        item: Any = None

    return Handler(), Args()


@BOTH
@pytest.mark.parametrize("failing", ["async_save", "write", "finalize", "restore"])
def test_what_a_handler_of_an_item_raises(ocp: Any, failing: str, tmp_path: Path) -> None:
    handler, args = whole_handler(ocp, failing)

    def save_and_restore(manager: Any) -> None:
        manager.save(0, args=ocp.args.Composite(one=args))
        manager.wait_until_finished()
        manager.restore(0, args=ocp.args.Composite(one=args))

    with (
        ocp.CheckpointManager(tmp_path, item_names=("one",), item_handlers={"one": handler}) as manager,
        pytest.raises(TheirOwnError, match="on purpose"),
    ):
        save_and_restore(manager)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("library", [penstock_v1, orbax_v1], ids=["penstock", "orbax"])
@pytest.mark.parametrize("failing", ["save", "write", "load", "read"])
def test_what_a_handler_of_the_newer_api_raises(library: Any, failing: str, tmp_path: Path) -> None:
    async def later(step: str) -> None:
        if step == failing:
            fail()

    class Handler:
        async def save(self, directory: Any, checkpointable: Any) -> Any:
            del checkpointable
            await later("save")
            (Path(await directory.await_creation()) / "file").write_text("")
            return later("write")

        async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
            await later("load")
            return later("read")

        async def metadata(self, directory: Any) -> None:
            del directory

        def is_handleable(self, checkpointable: Any) -> bool:
            return isinstance(checkpointable, Word)

        def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
            return isinstance(abstract_checkpointable, Word)

    context = library.Context()
    context.checkpointables.registry = library.handlers.local_registry().add(Handler)

    def save_and_load() -> None:
        library.save_checkpointables(tmp_path / "one", {"word": Word()})
        library.load_checkpointables(tmp_path / "one", {"word": Word()})

    told_otherwise = failing == "read" and library is orbax_v1
    expected = (KeyError, "incompatible handler") if told_otherwise else (TheirOwnError, "on purpose")
    with context, pytest.raises(expected[0], match=expected[1]):
        save_and_load()
