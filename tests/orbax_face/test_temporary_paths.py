"""Classes of temporary paths: what they stand for, beside Orbax, and those that are refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint
import pytest

import penstock.orbax
from penstock.errors import ConfigError

LIBRARIES: tuple[Any, Any] = (penstock.orbax, orbax.checkpoint)
both = pytest.mark.parametrize("ocp", LIBRARIES, ids=("penstock", "orbax"))
# Orbax closes event loops that TensorStore still has something to tell.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CLASSES = ("AtomicRenameTemporaryPath", "CommitFileTemporaryPath")
TREE = {"a": np.arange(3)}


def seen_while_saving(ocp: Any, temporary_path: Any, directory: Path) -> tuple[bool, bool]:
    """Return whether a checkpoint is built in its own place, and whether it has a commit mark at the end."""
    places: list[Path] = []

    class Noting(ocp.CheckpointHandler):  # type: ignore[misc]  # of either library
        def save(self, directory: Any, item: Any) -> None:
            places.append(Path(directory))
            (Path(directory) / "words").write_text(item)

        def restore(self, directory: Any) -> str:
            return (Path(directory) / "words").read_text()

    with ocp.Checkpointer(Noting(), temporary_path_class=temporary_path) as checkpointer:
        checkpointer.save(directory, "ab")
        assert checkpointer.restore(directory) == "ab"

    return places == [directory], (directory / ocp.path.atomicity.COMMIT_SUCCESS_FILE).exists()


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_says_where_a_checkpoint_is_built(name: str, tmp_path: Path) -> None:
    ours, theirs = (
        seen_while_saving(ocp, getattr(ocp.path.atomicity, name), tmp_path / ocp.__name__)
        for ocp in LIBRARIES
    )
    assert ours == theirs == (name == "CommitFileTemporaryPath", True)


@both
@pytest.mark.parametrize("name", CLASSES)
def test_steps_are_saved_as_a_class_says(ocp: Any, name: str, tmp_path: Path) -> None:
    """As flax's example `gemma` does."""
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(1),
        temporary_path_class=getattr(ocp.path.atomicity, name),
    )
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (0, 1):
            manager.save(step, args=ocp.args.Composite(model=ocp.args.StandardSave(TREE)))

        manager.wait_until_finished()
        np.testing.assert_array_equal(manager.restore(1)["model"]["a"], TREE["a"])
        if name == "CommitFileTemporaryPath":
            assert (tmp_path / "1" / ocp.path.atomicity.COMMIT_SUCCESS_FILE).exists()
            assert (tmp_path / "1" / "model" / ocp.path.atomicity.COMMIT_SUCCESS_FILE).exists()

    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["1"]


@both
def test_the_class_of_a_place_is_its_default(ocp: Any, tmp_path: Path) -> None:
    defaults = ocp.path.atomicity_defaults
    in_place = ocp.options.AtomicityOptions(ocp.options.AtomicityMode.COMMIT_FILE)
    found = [
        defaults.get_default_temporary_path_class(tmp_path),
        defaults.get_item_default_temporary_path_class(tmp_path),
        defaults.get_default_temporary_path_class(tmp_path, atomicity_options=in_place),
        defaults.get_item_default_temporary_path_class(tmp_path, atomicity_options=in_place),
    ]
    assert [one.__name__ for one in found] == [CLASSES[0], CLASSES[0], CLASSES[1], CLASSES[1]]
    assert all(issubclass(one, ocp.path.atomicity_types.TemporaryPath) for one in found)


def test_a_class_of_orbax_stands_for_the_same(tmp_path: Path) -> None:
    theirs: Any = LIBRARIES[1].path.atomicity.CommitFileTemporaryPath
    assert seen_while_saving(penstock.orbax, theirs, tmp_path / "a") == (True, True)


def test_a_derived_class_that_replaces_nothing_stands_for_the_same(tmp_path: Path) -> None:
    class Named(penstock.orbax.path.atomicity.CommitFileTemporaryPath):
        def __repr__(self) -> str:
            return "ours"

    assert seen_while_saving(penstock.orbax, Named, tmp_path / "a") == (True, True)


class Moving(penstock.orbax.path.atomicity.AtomicRenameTemporaryPath):
    async def finalize(self) -> None: ...


class MovingAsOrbax(LIBRARIES[1].path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
    async def create(self) -> Any: ...


class Alone(penstock.orbax.path.atomicity_types.TemporaryPath):
    def get_final(self) -> None: ...


REFUSED = {
    Moving: "its own finalize",
    MovingAsOrbax: "its own create",
    Alone: "its own get_final",
    Path: "is no class",
}


@pytest.mark.parametrize("theirs", REFUSED)
def test_a_class_that_publishes_by_itself_is_named_in_the_error(theirs: Any, tmp_path: Path) -> None:
    ocp: Any = penstock.orbax
    handler, options = ocp.StandardCheckpointHandler(), ocp.CheckpointManagerOptions
    for make in (
        partial(ocp.Checkpointer, handler),
        partial(ocp.AsyncCheckpointer, handler),
        ocp.StandardCheckpointer,
        ocp.CompositeOptions,
        lambda **given: ocp.CheckpointManager(tmp_path / "steps", options=options(**given)),
    ):
        with pytest.raises(ConfigError, match=f"{theirs.__name__}.*{REFUSED[theirs]}"):
            make(temporary_path_class=theirs)

    assert not (tmp_path / "steps").exists()
