"""Subclasses of Orbax's classes: what they read of their base, and which of their overrides are called."""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint
import pytest

import penstock.orbax
from penstock.orbax.installation import NEVER_CALLED

LIBRARIES: tuple[Any, Any] = (penstock.orbax, orbax.checkpoint)
both = pytest.mark.parametrize("ocp", LIBRARIES, ids=("penstock", "orbax"))
# Orbax closes event loops that TensorStore still has something to tell.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

HOOKS = {"_finalize_checkpoint", "_get_old_steps_to_remove", "_load_checkpoint_infos"}
"""Private methods of the manager that are called for subclasses alone, or can be replaced."""


def asked_of_self(class_: type, library: str) -> set[str]:
    """The names that methods of a class, and of its bases in the library, ask `self` for."""
    trees = [
        ast.parse(textwrap.dedent(inspect.getsource(base)))
        for base in class_.__mro__
        if base.__module__.startswith(library)
    ]
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def methods(class_: type, library: str) -> set[str]:
    """The names of its methods and properties."""
    return {
        name
        for base in class_.__mro__
        if base.__module__.startswith(library)
        for name, value in vars(base).items()
        if not name.startswith("__") and (callable(value) or isinstance(value, property | staticmethod))
    }


@pytest.mark.parametrize("name", NEVER_CALLED)
def test_the_table_has_what_orbax_s_methods_ask_for_and_ours_do_not(name: str) -> None:
    ours, theirs = (getattr(library, name, None) or getattr(library.handlers, name) for library in LIBRARIES)
    inherited = [base.__name__ for base in ours.__mro__[1:]]
    listed = set(NEVER_CALLED[name]).union(*(NEVER_CALLED.get(one, ()) for one in inherited))
    hooks = methods(theirs, "orbax") & asked_of_self(theirs, "orbax")
    not_called = hooks - asked_of_self(ours, "penstock")

    # What others call: programs, a checkpointer, or a composite handler.
    of_others = {"async_save", "metadata"} if name.endswith("Handler") else {"check_for_errors"}
    assert not_called - of_others - HOOKS <= listed
    assert not listed & (asked_of_self(ours, "penstock") | HOOKS)
    assert listed <= methods(theirs, "orbax")


@pytest.mark.parametrize("name", NEVER_CALLED)
def test_an_override_that_nothing_calls_is_named_in_a_warning(name: str) -> None:
    ours = getattr(penstock.orbax, name, None) or getattr(penstock.orbax.handlers, name)
    hook = min(NEVER_CALLED[name])
    with pytest.warns(UserWarning, match=f"Mine overrides {hook}, which") as found:
        type("Mine", (ours,), {hook: lambda self: None, "own": lambda self: None, "save": ours.save})

    assert found[0].filename == __file__


def test_overrides_that_are_called_are_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Manager(penstock.orbax.CheckpointManager):
            def _finalize_checkpoint(self, step: int) -> None: ...
            def should_save(self, step: int) -> bool:
                return True

        class Handler(penstock.orbax.PyTreeCheckpointHandler):
            def save(self, *args: Any, **kwargs: Any) -> None: ...

        class Further(Manager):
            def wait_until_finished(self) -> None: ...

        assert issubclass(Further, Manager)
        assert Handler.typestr().endswith("Handler")


@both
def test_a_tracker_file_says_which_steps_there_are(ocp: Any, tmp_path: Path) -> None:
    """As in AXLearn."""

    class Tracking(ocp.CheckpointManager):  # type: ignore[misc]  # of either library
        def _load_checkpoint_infos(self, skip_metadata_read: bool = False) -> list[Any]:
            infos = super()._load_checkpoint_infos(skip_metadata_read)
            tracker = self.directory / "latest"
            return [info for info in infos if str(info.step) == tracker.read_text()]

        def _finalize_checkpoint(self, step: int) -> None:
            super()._finalize_checkpoint(step)
            path = self._get_write_step_directory(step, self.directory)
            assert self._get_read_step_directory(step, self.directory) == path
            assert ocp.step.is_path_finalized(path)
            if ocp.utils.is_primary_host(self._multiprocessing_options.primary_host):
                (self.directory / "latest").write_text(str(step))

    (tmp_path / "latest").write_text("none")
    for asynchronous in (False, True):
        options = ocp.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=asynchronous)
        with Tracking(tmp_path, options=options) as manager:
            first = (manager.latest_step() or 0) + 1
            assert list(manager.all_steps()) == ([] if first == 1 else [first - 1])
            for step in (first, first + 1):
                manager.save(step, args=ocp.args.StandardSave({"a": np.arange(3)}))

            manager.wait_until_finished()
            manager.reload()
            assert list(manager.all_steps()) == [first + 1]


@both
def test_a_hook_that_fails_is_a_failure_of_the_save(ocp: Any, tmp_path: Path) -> None:
    class Failing(ocp.CheckpointManager):  # type: ignore[misc]  # of either library
        def _finalize_checkpoint(self, step: int) -> None:
            raise OSError("no room for the tracker")

    manager = Failing(tmp_path)
    manager.save(1, args=ocp.args.StandardSave({"a": 1}))
    with pytest.raises(OSError, match="no room"):
        manager.wait_until_finished()

    assert list(manager.all_steps()) == []
    manager.close()


@both
def test_the_directory_of_a_manager_that_does_nothing_can_be_set(ocp: Any, tmp_path: Path) -> None:
    class Nothing(ocp.CheckpointManager):  # type: ignore[misc]  # of either library
        def __init__(self, directory: Path) -> None:
            self._directory = directory

    assert Nothing(tmp_path).directory == tmp_path


@both
def test_metrics_are_kept_once_the_options_of_a_manager_ask_for_them(ocp: Any, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager._options.best_fn, manager._options.best_mode = (lambda found: found["score"]), "min"
        for step, score in ((1, 2.0), (2, 1.0), (3, 3.0)):
            manager.save(step, args=ocp.args.StandardSave({"a": 1}), metrics={"score": score})

        manager.wait_until_finished()
        assert manager.best_step() == 2
        assert manager.metrics(3) == {"score": 3.0}
