"""Both libraries list the same steps, whatever lies in them and whoever wrote it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint
import pytest

import penstock.orbax

LIBRARIES: tuple[Any, Any] = (penstock.orbax, orbax.checkpoint)
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")

ENDED = '{"init_timestamp_nsecs": 5, "commit_timestamp_nsecs": 6}'
DOCUMENT = json.dumps({"tree_metadata": {}})
CONTENTS: dict[str, dict[str, str]] = {
    "a third party's file": {"state/my_state.npz": "bytes"},
    "a third party's file, deeper": {"state/shards/0.bin": "bytes"},
    "a third party's file, at the top": {"weights.bin": "bytes"},
    "an item called metadata": {"metadata/metadata": '{"a": 1}'},
    "an item called metadata, and another": {"metadata/metadata": '{"a": 1}', "state/x.npz": "bytes"},
    "an item of an unknown name": {"mine/metadata": '{"a": 1}'},
    "metrics alone": {"metrics/metrics": '{"loss": 1.0}'},
    "JSON under a chosen name": {"notes/settings.json": "{}", "notes/more.txt": ""},
    "a protobuf under a chosen name": {"message/message.txt": "x: 1"},
    "a random key under a chosen name": {"rng/mine/manifest.ocdbt": "", "rng/mine_metadata/metadata": "{}"},
    "one array of early versions": {"default/checkpoint/.zarray": "{}"},
    "arrays without a document": {"w/.zarray": "{}", "b/.zarray": "{}"},
    "a tree without arrays": {"default/_METADATA": DOCUMENT},
    "a database alone": {"default/manifest.ocdbt": "", "default/d/0": ""},
    "a damaged document": {"_CHECKPOINT_METADATA": "{"},
    "a document alone": {"_CHECKPOINT_METADATA": ENDED},
    "a commit mark alone": {"commit_success.txt": ""},
    "an empty folder": {"state/": ""},
    "folders of other numbers": {"0/a": "", "1/a": ""},
    "nothing": {"": ""},
}
UNFINISHED: dict[str, dict[str, str]] = {
    "an item being built": {"default.orbax-checkpoint-tmp/x": ""},
    "a database that was never merged": {"state/ocdbt.process_0/manifest.ocdbt": ""},
    "a save that began": {"_CHECKPOINT_METADATA": '{"init_timestamp_nsecs": 5}', "state/x": ""},
}


def make(step: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        path = step / name
        if not name or name.endswith("/"):
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def listed(ocp: Any, root: Path) -> tuple[list[int], int | None]:
    with ocp.CheckpointManager(root) as manager:
        return sorted(manager.all_steps()), manager.latest_step()


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_step_counts_whatever_lies_in_it(content: dict[str, str], tmp_path: Path) -> None:
    make(tmp_path / "3", content)
    make(tmp_path / "2", CONTENTS["a tree without arrays"])
    (tmp_path / "4").write_text("a file")
    (tmp_path / "x").mkdir()

    assert listed(penstock.orbax, tmp_path) == listed(orbax.checkpoint, tmp_path) == ([2, 3], 3)


def told(function: Callable[[], Any]) -> Any:
    """Return what a call returns, or whether it raises a ValueError or another error."""
    try:
        return function()
    except Exception as error:
        return "ValueError" if isinstance(error, ValueError) else "an error"


def over_an_empty_directory(ocp: Any, root: Path) -> list[Any]:
    tree = ocp.args.StandardSave({"a": np.arange(3)})
    found: list[Any] = []
    with ocp.CheckpointManager(root) as manager:
        manager.save(1, args=tree)
        manager.wait_until_finished()
        (root / "3").mkdir()
        found += [manager.all_steps(), manager.all_steps(read=True), manager.latest_step()]
        found += [manager.should_save(step) for step in (2, 3, 4)]
        found += [manager.save(3, args=tree), told(lambda: manager.save(3, args=tree, force=True))]
        found += [sorted(path.name for path in (root / "3").iterdir()), manager.metrics(3)]
        found += [manager.save(4, args=tree), manager.all_steps()]
        manager.wait_until_finished()
        manager.delete(3)
        found += [manager.all_steps(), (root / "3").exists()]

    with ocp.CheckpointManager(root) as manager:
        found += [manager.all_steps(), manager.latest_step()]

    return found


def test_nothing_is_saved_over_an_empty_directory(tmp_path: Path) -> None:
    ours, theirs = (over_an_empty_directory(ocp, tmp_path / ocp.__name__) for ocp in LIBRARIES)

    assert ours == theirs
    assert ours[:3] == [[1], [1, 3], 3]
    assert ours[6:9] == [False, "ValueError", []]


@pytest.mark.parametrize("ocp", LIBRARIES, ids=["penstock", "orbax"])
@pytest.mark.parametrize("step", [3, None])
def test_an_empty_directory_is_an_error_to_restore(ocp: Any, step: int | None, tmp_path: Path) -> None:
    (tmp_path / "3").mkdir()
    with ocp.CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match=r"Composite|is empty"):
        manager.restore(step, args=ocp.args.StandardRestore())


def test_a_step_is_one_object_after_an_error_about_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "3").mkdir()
    with penstock.orbax.CheckpointManager(tmp_path) as manager:
        with pytest.raises(FileNotFoundError, match="is empty; delete this step to save it"):
            manager.restore(args=penstock.orbax.args.StandardRestore())
        assert manager.save(4, args=penstock.orbax.args.StandardSave({"a": np.arange(3)}))


def test_an_empty_directory_takes_no_place_among_the_steps_to_keep(tmp_path: Path) -> None:
    tree = penstock.orbax.args.StandardSave({"a": np.arange(3)})
    options = penstock.orbax.CheckpointManagerOptions(max_to_keep=2)
    (tmp_path / "2").mkdir()
    with penstock.orbax.CheckpointManager(tmp_path, options=options) as manager:
        for step in (3, 4):
            manager.save(step, args=tree)
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3, 4]


@pytest.mark.parametrize("content", UNFINISHED.values(), ids=UNFINISHED)
def test_a_step_known_to_be_unfinished_does_not_count(content: dict[str, str], tmp_path: Path) -> None:
    make(tmp_path / "3", content)
    make(tmp_path / "2", CONTENTS["a tree without arrays"])

    assert listed(penstock.orbax, tmp_path) == ([2], 2)


def npz(ocp: Any) -> tuple[Any, Any]:
    """Make a handler that a third party could have written for a library, and its arguments."""

    class Handler(ocp.CheckpointHandler):  # type: ignore[misc]  # Any
        def save(self, directory: Any, args: Any) -> None:
            np.savez(str(directory / "my_state.npz"), w=args.item)

        def restore(self, directory: Any, args: Any = None) -> Any:
            return np.load(str(directory / "my_state.npz"))["w"]

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    class Args(ocp.args.CheckpointArgs):  # type: ignore[misc]  # Any
        def __init__(self, item: Any = None) -> None:
            self.item = item

    return Handler, Args


@pytest.mark.parametrize("writer", LIBRARIES, ids=["penstock", "orbax"])
@pytest.mark.parametrize("reader", LIBRARIES, ids=["penstock", "orbax"])
def test_a_run_with_a_handler_of_its_own_is_resumed(writer: Any, reader: Any, tmp_path: Path) -> None:
    make_, args = npz(writer)
    with writer.CheckpointManager(tmp_path, item_handlers={"state": make_()}) as manager:
        manager.save(3, args=writer.args.Composite(state=args(np.arange(3))))

    (tmp_path / "3" / "_CHECKPOINT_METADATA").unlink()  # as versions before 0.6 wrote it
    (tmp_path / "3" / "commit_success.txt").unlink()
    (tmp_path / "3" / "_PENSTOCK_INTEGRITY").unlink(missing_ok=True)
    make_, args = npz(reader)
    with reader.CheckpointManager(tmp_path, item_handlers={"state": make_()}) as manager:
        assert manager.latest_step() == 3
        found = manager.restore(3, args=reader.args.Composite(state=args()))

    assert found["state"].tolist() == [0, 1, 2]
