"""What is at a path: one answer, on a disk and in a bucket, which every command and tool gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket

import penstock
from penstock.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    UnsupportedFormatError,
)
from penstock.handlers import LocalStore
from penstock.handlers.layouts.discovery import (
    check_deletable,
    find_checkpoints,
    find_place,
    finished_steps,
    look_at,
)
from penstock.inspection.step_listing import list_checkpoints
from penstock.kernel import Store

MARK = "commit_success.txt"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make `tree`, a checkpoint that is one tree, and `step`, one with items."""
    folder = tmp_path_factory.mktemp("saved")
    penstock.sync.save(folder / "tree", {"a": np.arange(10)})
    penstock.sync.save(folder / "step", penstock.items.Composite(default={"a": np.arange(10)}))
    return folder


Build = Callable[[Path, Path], object]
"""Makes a case at the first path, of what is saved at the second."""

Put = Callable[[str, Build], tuple[Store, str]]
"""Makes a case of a name. Returns its store and its path there."""


def steps(*names: str) -> Build:
    def build(path: Path, saved: Path) -> None:
        for name in names:
            shutil.copytree(saved / "step", path / name)

    return build


def then(build: Build, *changes: Callable[[Path], object]) -> Build:
    def both(path: Path, saved: Path) -> None:
        build(path, saved)
        for change in changes:
            change(path)

    return both


def writes(name: str, text: str = "x") -> Callable[[Path], object]:
    def change(path: Path) -> None:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)

    return change


def begins(name: str = "") -> Callable[[Path], object]:
    """Let a checkpoint look as Orbax writes it under its final name, before it is committed."""

    def change(path: Path) -> None:
        file = path / name / "_CHECKPOINT_METADATA"
        about = {"init_timestamp_nsecs": 5, "commit_timestamp_nsecs": None}
        file.write_text(json.dumps(json.loads(file.read_text()) | about))
        (path / name / MARK).unlink()

    return change


def tree(path: Path, saved: Path) -> None:
    shutil.copytree(saved / "tree", path)


def tree_of_a_step(path: Path, saved: Path) -> None:
    """What an Orbax wrote that recorded nothing of the step around the tree."""
    own = shutil.ignore_patterns("_CHECKPOINT_METADATA", "_PENSTOCK*", MARK)
    shutil.copytree(saved / "tree", path / "state", ignore=own)
    (path / MARK).write_text("")


def trees(path: Path, saved: Path) -> None:
    for name in ("best", "last"):
        shutil.copytree(saved / "tree", path / name)


def nothing(path: Path, saved: Path) -> None:
    del path, saved


def folder(path: Path, saved: Path) -> None:
    del saved
    path.mkdir(parents=True)


def tensors(path: Path, saved: Path) -> None:
    del saved
    path.mkdir()
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')


CASES: Sequence[tuple[str, Build, str, str]] = (
    # the case, how it is made, its kind, and what a list has of it
    ("nothing", nothing, "nothing", ""),
    ("empty", folder, "folder", ""),
    ("tree", tree, "checkpoint", "tree finished"),
    ("tree.orbax-checkpoint-tmp", tree, "unfinished", ""),
    ("tree.partial_save", tree, "unfinished", ""),
    ("begun", then(tree, begins()), "checkpoint", "begun interrupted"),
    ("damaged", then(tree, writes("_CHECKPOINT_METADATA", "{")), "checkpoint", "damaged damaged"),
    ("index", tensors, "tensors", "index finished"),
    ("marked_tensors", then(tensors, writes(MARK)), "tensors", "marked_tensors finished"),
    ("run", steps("1", "10", "9"), "root", "1 finished, 9 finished, 10 finished"),
    ("prefixes", steps("step_1", "step_02"), "root", "step_1 finished, step_02 finished"),
    ("two_names", steps("a_1", "b_2"), "root", "a_1 finished, b_2 finished"),
    (
        "tmp_beside",
        steps("1", "2.orbax-checkpoint-tmp"),
        "root",
        "1 finished, 2.orbax-checkpoint-tmp interrupted",
    ),
    ("only_tmp", steps("2.orbax-checkpoint-tmp-17"), "root", "2.orbax-checkpoint-tmp-17 interrupted"),
    ("file_in_run", then(steps("1"), writes("2")), "root", "1 finished"),
    ("json_in_run", then(steps("1"), writes("metadata", "{}")), "root", "1 finished"),
    ("mark_in_run", then(steps("1"), writes(MARK)), "root", "1 finished"),
    ("begun_step", then(steps("1", "2"), begins("2")), "root", "1 finished, 2 interrupted"),
    (
        "unmerged_step",
        then(steps("1"), writes("2/default/ocdbt.process_0/manifest.ocdbt")),
        "root",
        "1 finished, 2 interrupted",
    ),
    (
        "unfinished_item",
        then(steps("1"), writes("2/default.orbax-checkpoint-tmp/_METADATA", "{}")),
        "root",
        "1 finished, 2 interrupted",
    ),
    (
        "damaged_step",
        then(steps("1", "2"), writes("2/_CHECKPOINT_METADATA", "{")),
        "root",
        "1 finished, 2 damaged",
    ),
    ("runs", steps("run_1/1", "run_2/3"), "folder", "run_1/1 finished, run_2/3 finished"),
    ("named_runs", steps("a/1", "b/1"), "folder", "a/1 finished, b/1 finished"),
    ("trees", trees, "folder", "best finished, last finished"),
    ("step_without_documents", tree_of_a_step, "checkpoint", "step_without_documents finished"),
)


def listed(store: Store, path: str) -> str:
    found = list_checkpoints(store, find_place(store, path))
    return ", ".join(f"{each.name} {each.state}" for each in found)


@pytest.fixture(params=["disk", "bucket"])
def put(request: pytest.FixtureRequest, tmp_path: Path, saved: Path) -> Put:
    """Return a function that makes a case, on a disk or in a bucket, and returns its store and path."""

    def make(name: str, build: Build) -> tuple[Store, str]:
        path = tmp_path / name
        build(path, saved)
        if request.param == "disk":
            return LocalStore(), str(path)

        bucket = Bucket()
        for file in sorted(path.rglob("*")):
            if file.is_file():
                bucket.client().put(str(file.relative_to(tmp_path)), file.read_bytes())

        return bucket.store(), f"{URL}/{name}"

    return make


@pytest.mark.parametrize(("name", "build", "kind", "states"), CASES, ids=[case[0] for case in CASES])
def test_places_are_found_alike_on_a_disk_and_in_a_bucket(
    put: Put, name: str, build: Build, kind: str, states: str
) -> None:
    store, path = put(name, build)
    if name == "empty" and path.startswith(URL):
        kind = "nothing"  # a bucket has no empty folders

    place = look_at(store, path)
    assert place.kind == kind
    assert (place.problem is None) == (kind not in {"nothing", "unfinished"})
    if place.problem is not None:
        with pytest.raises(type(place.problem)):
            find_place(store, path)
        assert [finding.kind for finding in find_checkpoints(store, path).findings] == ["absent"]
        return

    assert listed(store, path) == states
    # `verify` finds what a list calls finished or damaged, and what is left of saves apart.
    found = find_checkpoints(store, path)
    complete = [line.split()[0] for line in states.split(", ") if line.endswith(("finished", "damaged"))]
    expected = [path if one == name else f"{path}/{one}" for one in complete]
    assert sorted(found.checkpoints) == sorted(expected)
    assert bool(found.leftovers) == ("interrupted" in states)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (tree, None),
        (steps("2", "1", "3.orbax-checkpoint-tmp"), ["1", "2"]),
        (then(steps("1", "2"), begins("2")), ["1"]),
        (then(steps("1"), writes("2"), writes("metadata/_ROOT_METADATA", "{}")), ["1"]),
        (then(steps("1", "2"), writes("1/_CHECKPOINT_METADATA", "{")), CorruptCheckpointError),
        (steps("1.orbax-checkpoint-tmp"), IncompleteCheckpointError),
        (steps("a_1", "b_2"), UnsupportedFormatError),
        (nothing, NotACheckpointError),
    ],
)
def test_tools_work_on_the_finished_steps(
    put: Put, build: Build, expected: type[Exception] | list[str] | None
) -> None:
    store, path = put("run", build)
    if isinstance(expected, type):
        with pytest.raises(expected):
            finished_steps(store, path)
    else:
        assert finished_steps(store, path) == expected


def test_a_step_that_only_its_own_handler_knows_is_not_left_out(tmp_path: Path, saved: Path) -> None:
    then(steps("2"), writes("1/state/mine.bin"))(tmp_path / "run", saved)
    with pytest.raises(UnsupportedFormatError, match="nothing in it is known"):
        finished_steps(LocalStore(), str(tmp_path / "run"))


def test_only_whole_checkpoints_may_be_deleted(
    put: Put,
) -> None:
    store, path = put("run", steps("1", "2.orbax-checkpoint-tmp"))
    assert check_deletable(store, f"{path}/1") == "directory"
    for name in ("1/default", "2.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp/default", "absent", ""):
        with pytest.raises(NotACheckpointError):
            check_deletable(store, f"{path}/{name}".rstrip("/"))


@pytest.mark.parametrize("name", ["tree.orbax-checkpoint-tmp", "tree.partial_save"])
def test_what_a_save_left_is_not_deleted_as_a_checkpoint(put: Put, name: str) -> None:
    with pytest.raises(NotACheckpointError):
        check_deletable(*put(name, tree))


def test_links_are_followed_and_end(tmp_path: Path, saved: Path) -> None:
    store, run = LocalStore(), tmp_path / "run"
    steps("1")(run, saved)
    (run / "2").symlink_to(run / "1")
    (run / "3").symlink_to(tmp_path / "gone")
    (tmp_path / "link").symlink_to(run)
    for path in (run, tmp_path / "link"):
        assert look_at(store, str(path)).kind == "root"
        assert listed(store, str(path)) == "1 finished, 2 finished"
        assert finished_steps(store, str(path)) == ["1", "2"]

    (run / "logs").symlink_to(tmp_path)
    found = find_checkpoints(store, str(tmp_path))
    assert {Path(path).name for path in found.checkpoints} == {"1", "2"}
