"""The guide for custom handlers of whole objects, as a reader of Orbax's guide would follow it.

A handler that chooses npz or json by an argument, its legacy twin, and one that saves in the background.
Each step is run with both libraries.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from concurrent import futures
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import orbax.checkpoint
import pytest

import penstock.orbax

LIBRARIES: tuple[Any, Any] = (penstock.orbax, orbax.checkpoint)
NAMES = ("penstock", "orbax")


@dataclasses.dataclass
class MyState:
    """What is saved: no tree, but a whole object."""

    a: Any
    b: Any


def my_state() -> MyState:
    return MyState(a=np.array([1.0, 1.5]), b=np.array([3, 4, 5]))


def write(directory: Any, item: MyState, *, use_npz: bool) -> None:
    if use_npz:
        np.savez(directory / "my_state.npz", a=item.a, b=item.b)
    else:
        with open(os.path.join(directory, "my_state.json"), "w") as file:
            file.write(json.dumps({"a": item.a.tolist(), "b": item.b.tolist()}))


def read(directory: Any, *, as_dict: bool) -> Any:
    if (directory / "my_state.npz").exists():
        with np.load(directory / "my_state.npz") as data:
            found = {"a": data["a"], "b": data["b"]}
    else:
        found = {
            key: np.array(value)
            for key, value in json.loads((directory / "my_state.json").read_text()).items()
        }

    return found if as_dict else MyState(**found)


@dataclasses.dataclass
class Guide:
    """The classes of the guide, for one library."""

    legacy: Any
    handler: Any
    save: Any
    restore: Any
    in_background: Any


def guide(ocp: Any) -> Guide:
    """Define the classes, each as the guide does."""

    class LegacyHandler(ocp.CheckpointHandler):  # type: ignore[misc]  # whichever library's it is
        def save(self, directory: Any, item: MyState, use_npz: bool = True, **kwargs: Any) -> None:
            write(directory, item, use_npz=use_npz)

        def restore(
            self, directory: Any, item: Any = None, restore_as_dict: bool = False, **kwargs: Any
        ) -> Any:
            return read(directory, as_dict=restore_as_dict)

        def metadata(self, directory: Any) -> Any:
            return read(directory, as_dict=False).a.shape

    class Handler(ocp.CheckpointHandler):  # type: ignore[misc]  # likewise
        def save(self, directory: Any, args: Any) -> None:
            write(directory, args.item, use_npz=args.use_npz)

        def restore(self, directory: Any, args: Any) -> Any:
            return read(directory, as_dict=args.restore_as_dict)

        def metadata(self, directory: Any) -> Any:
            return self.restore(directory, args=Restore()).a.shape

    @ocp.args.register_with_handler(Handler, for_save=True)
    @dataclasses.dataclass
    class Save(ocp.args.CheckpointArgs):  # type: ignore[misc]  # likewise
        item: MyState
        use_npz: bool = True

    @ocp.args.register_with_handler(Handler, for_restore=True)
    @dataclasses.dataclass
    class Restore(ocp.args.CheckpointArgs):  # type: ignore[misc]  # likewise
        restore_as_dict: bool = False

    class InBackground(ocp.AsyncCheckpointHandler, Handler):  # type: ignore[misc]  # likewise
        def __init__(self) -> None:
            self._executor = futures.ThreadPoolExecutor(max_workers=1)
            self.written, self.go_on = Event(), Event()

        def save(self, directory: Any, args: Any) -> None:
            super().save(directory, args)
            self.written.set()
            assert self.go_on.wait(20)

        async def async_save(self, directory: Any, args: Any) -> Any:
            return [self._executor.submit(functools.partial(self.save, directory, args))]

        def close(self) -> None:
            self._executor.shutdown()

    return Guide(LegacyHandler, Handler, Save, Restore, InBackground)


def same(found: Any, as_dict: bool = False) -> None:
    expected = my_state()
    assert isinstance(found, dict if as_dict else MyState)
    pairs: Any = found if as_dict else vars(found)
    np.testing.assert_array_equal(pairs["a"], expected.a)
    np.testing.assert_array_equal(pairs["b"], expected.b)


def files_in(path: Path) -> set[str]:
    return {name for name in os.listdir(path) if name.startswith("my_state")}


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
@pytest.mark.parametrize("use_npz", [True, False])
def test_a_handler_that_chooses_its_format_by_an_argument(ocp: Any, use_npz: bool, tmp_path: Path) -> None:
    my = guide(ocp)
    with ocp.Checkpointer(my.handler()) as checkpointer:
        checkpointer.save(tmp_path / "state", args=my.save(item=my_state(), use_npz=use_npz))

        assert os.listdir(tmp_path) == ["state"]
        assert files_in(tmp_path / "state") == {"my_state.npz" if use_npz else "my_state.json"}
        same(checkpointer.restore(tmp_path / "state", args=my.restore()))
        same(checkpointer.restore(tmp_path / "state", args=my.restore(restore_as_dict=True)), as_dict=True)
        assert checkpointer.metadata(tmp_path / "state").item_metadata == (2,)


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_the_arguments_are_made_of_what_the_call_has(ocp: Any, tmp_path: Path) -> None:
    my = guide(ocp)
    with ocp.Checkpointer(my.handler()) as checkpointer:
        checkpointer.save(tmp_path / "state", my_state(), use_npz=False)

        assert files_in(tmp_path / "state") == {"my_state.json"}
        same(checkpointer.restore(tmp_path / "state", restore_as_dict=True), as_dict=True)


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_a_legacy_handler_takes_the_arguments_as_they_are(ocp: Any, tmp_path: Path) -> None:
    my = guide(ocp)
    with ocp.Checkpointer(my.legacy()) as checkpointer:
        checkpointer.save(tmp_path / "state", my_state(), use_npz=False)

        assert files_in(tmp_path / "state") == {"my_state.json"}
        same(checkpointer.restore(tmp_path / "state"))
        same(checkpointer.restore(tmp_path / "state", restore_as_dict=True), as_dict=True)
        assert checkpointer.metadata(tmp_path / "state").item_metadata == (2,)


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_what_is_written_in_the_background_is_in_the_temporary_directory_first(
    ocp: Any, tmp_path: Path
) -> None:
    my = guide(ocp)
    ocp.args.register_with_handler(my.in_background, for_save=True)(my.save)
    ocp.args.register_with_handler(my.in_background, for_restore=True)(my.restore)
    handler = my.in_background()
    # The guide sleeps until Orbax has made the directory.
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    checkpointer = ocp.AsyncCheckpointer(handler, async_options=at_once)
    try:
        checkpointer.save(tmp_path / "async-state", args=my.save(item=my_state()))
        assert handler.written.wait(20)
        [temporary] = os.listdir(tmp_path)
        assert temporary.startswith("async-state.orbax-checkpoint-tmp")
        assert files_in(tmp_path / temporary) == {"my_state.npz"}
    finally:
        handler.go_on.set()
        checkpointer.wait_until_finished()

    assert os.listdir(tmp_path) == ["async-state"]
    assert files_in(tmp_path / "async-state") == {"my_state.npz"}
    same(checkpointer.restore(tmp_path / "async-state", args=my.restore()))
    checkpointer.close()


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_what_the_handler_raises_is_raised_and_nothing_becomes_visible(ocp: Any, tmp_path: Path) -> None:
    my = guide(ocp)
    with ocp.Checkpointer(my.handler()) as checkpointer:
        with pytest.raises(AttributeError):
            checkpointer.save(tmp_path / "state", args=my.save(item=None))

        assert not (tmp_path / "state").exists()
        with pytest.raises(FileNotFoundError):
            checkpointer.restore(tmp_path / "state", args=my.restore())


@pytest.mark.parametrize("ocp", LIBRARIES, ids=NAMES)
def test_a_second_handler_of_one_recorded_name_is_refused_and_one_made_again_takes_the_place(
    ocp: Any,
) -> None:
    class Named(ocp.CheckpointHandler):  # type: ignore[misc]  # of either library
        def save(self, directory: Any, args: Any) -> None: ...
        def restore(self, directory: Any, args: Any) -> None: ...

        @classmethod
        def typestr(cls) -> str:
            return "tests.the_one_name"

    def registered(handler: type[Any]) -> type[Any]:
        class Args(ocp.args.CheckpointArgs):  # type: ignore[misc]
            pass

        ocp.args.register_with_handler(handler, for_save=True, for_restore=True)(Args)
        return Args

    def made() -> type[Any]:
        class Again(Named): ...

        return Again

    first = registered(made())
    second = registered(made())  # as by a cell that runs twice
    with pytest.raises(ValueError, match="already exists in the registry"):
        registered(Named)

    assert first is not second
