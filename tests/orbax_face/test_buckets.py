"""The checkpointers of `penstock.orbax` on a bucket in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket, bucket_of_every_url

import penstock.orbax as ocp

PATH = f"{URL}/run/7"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket that every URL leads to."""
    return bucket_of_every_url(monkeypatch)


def state(step: int = 1) -> dict[str, Any]:
    return {"w": jnp.arange(1000.0) * step, "b": np.full(3, step), "step": step}


def test_a_standard_checkpointer_saves_describes_and_restores(bucket: Bucket) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(PATH, state(), custom_metadata={"lr": 0.1})
        checkpointer.wait_until_finished()
        same(checkpointer.restore(PATH, state(2)), state())
        same(checkpointer.restore(PATH), state())
        about = checkpointer.metadata(PATH)
        assert about.custom_metadata == {"lr": 0.1}
        assert about.item_metadata["w"].shape == (1000,)
        with pytest.raises(ValueError, match="exists"):
            checkpointer.save(PATH, state(2))

        same(checkpointer.restore(PATH), state())
        checkpointer.save(PATH, state(2), force=True)
        same(checkpointer.restore(PATH), state(2))

    assert not [key for key in bucket.objects_there() if "penstock" in key.rpartition(".")[2]]


@pytest.mark.parametrize("kind", ["text", "pathlib", "epath"])
def test_a_checkpointer_takes_every_kind_of_path(bucket: Bucket, kind: str) -> None:
    path: Any = "s3://bucket/run/1"
    if kind == "pathlib":
        path = Path(path)
    elif kind == "epath":
        path = pytest.importorskip("etils.epath").Path(path)

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(state()))
        asked = ocp.args.PyTreeRestore(state(), ocp.checkpoint_utils.construct_restore_args(state()))
        same(checkpointer.restore(path, args=asked), state())

    assert "run/1/commit_success.txt" in bucket.objects_there()
    assert not [name for name in os.listdir() if name.startswith("s3:")]


def test_large_arrays_are_cut_to_objects(bucket: Bucket) -> None:
    tree = {"zeros": jnp.zeros((20, 2**18)), "noise": np.random.default_rng(0).random((3, 2**20))}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(PATH, tree)
        largest = max(bucket.client().head(key).size for key in bucket.objects_there())  # type: ignore[union-attr]
        assert largest <= 17 * 2**20
        same(checkpointer.restore(PATH), tree)


def same(found: Any, expected: Any) -> None:
    """Compare types and values; which device an array is committed to does not matter here."""
    assert jax.tree.map(type, found) == jax.tree.map(type, expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


class OwnHandler(ocp.CheckpointHandler):
    """Writes a file by itself."""

    def save(self, directory: Any, item: Any) -> None:
        (directory / "file").write_text(item)

    def restore(self, directory: Any, item: Any = None) -> str:
        return str((directory / "file").read_text())


@pytest.mark.parametrize(
    "handler",
    [OwnHandler, ocp.JsonCheckpointHandler, ocp.ArrayCheckpointHandler],
)
def test_a_handler_that_writes_files_is_refused_before_anything_is_written(
    bucket: Bucket, handler: Any
) -> None:
    with ocp.Checkpointer(handler()) as checkpointer:
        with pytest.raises(ValueError, match=r"is in a bucket, and a .* reads and writes files by itself"):
            checkpointer.save(PATH, "value")
        with pytest.raises(ValueError, match="by itself"):
            checkpointer.restore(PATH)

    assert bucket.objects_there() == []


@pytest.mark.parametrize("kind", ["array", "random key"])
def test_an_item_that_is_written_by_its_handler_is_refused_before_anything_is_written(
    bucket: Bucket, kind: str
) -> None:
    item = ocp.args.ArraySave(np.ones(3)) if kind == "array" else ocp.args.JaxRandomKeySave(jax.random.key(0))
    items = ocp.args.Composite(state=ocp.args.StandardSave(state()), other=item)
    with (
        ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer,
        pytest.raises(ValueError, match=r"the \w+ of 'other' reads and writes files by itself"),
    ):
        checkpointer.save(PATH, args=items)

    assert bucket.objects_there() == []


@pytest.mark.parametrize(
    "options",
    [
        {"todelete_full_path": "trash"},
        {"file_options": ocp.options.FileOptions(path_permission_mode=0o700)},
    ],
    ids=["trash", "permissions"],
)
def test_a_manager_refuses_what_a_bucket_cannot_do(bucket: Bucket, options: Any) -> None:
    with pytest.raises(ValueError, match="bucket"):
        ocp.CheckpointManager(f"{URL}/run", options=ocp.CheckpointManagerOptions(**options))

    assert bucket.objects_there() == []


def test_a_folder_for_deleted_steps_has_no_effect_as_in_orbax(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=1, todelete_subdir="trash")
    with ocp.CheckpointManager(f"{URL}/run", options=options) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave({"b": np.full(3, step)}))

    assert {key.split("/")[1] for key in bucket.objects_there()} == {"2"}
    assert caplog.text.count("step.trash_ignored") == 1


@pytest.mark.parametrize("snapshots", [None, "aside"])
def test_new_steps_are_waited_for(bucket: Bucket, tmp_path: Path, snapshots: str | None) -> None:
    root = f"{URL}/run"
    waiting: dict[str, Any] = {"timeout": 0, "snapshot_dir": snapshots and tmp_path / snapshots}
    with ocp.checkpoint_utils.wait_for_new_checkpoint(root, **waiting) as step:
        assert step == -1

    with ocp.CheckpointManager(root) as manager:
        for number in (1, 2):
            manager.save(number, args=ocp.args.StandardSave({"b": np.full(3, number)}))

    there = bucket.objects_there()
    with ocp.checkpoint_utils.wait_for_new_checkpoint(root, until_step=2, **waiting) as step:
        assert step == 2

    assert list(ocp.checkpoint_utils.checkpoints_iterator(root, **waiting)) == [2]
    assert bucket.objects_there() == there
    assert list(tmp_path.iterdir()) == []


def test_permissions_and_what_is_not_there_are_refused(bucket: Bucket) -> None:
    files = ocp.options.FileOptions(path_permission_mode=0o700)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), file_options=files) as checkpointer:
        with pytest.raises(ValueError, match="permissions"):
            checkpointer.save(PATH, state())
        with pytest.raises(FileNotFoundError):
            checkpointer.restore(PATH)

    assert bucket.objects_there() == []
    assert jax.process_count() == 1


def both(step: int) -> Any:
    return ocp.args.Composite(
        state=ocp.args.StandardSave(state(step)),
        extra=ocp.args.PyTreeSave({"ema": np.full(4, step)}),
        config=ocp.args.JsonSave({"lr": step}),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager_saves_keeps_describes_and_restores(bucket: Bucket, asynchronous: bool) -> None:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        best_fn=lambda metrics: metrics["loss"],
        best_mode="min",
        enable_async_checkpointing=asynchronous,
        enable_background_delete=asynchronous,
    )
    with ocp.CheckpointManager(f"{URL}/run", options=options, metadata={"name": "run"}) as manager:
        for step, loss in ((1, 0.5), (2, 0.9), (3, 0.1)):
            assert manager.save(step, args=both(step), metrics={"loss": loss})

        manager.wait_until_finished()
        with pytest.raises(ocp.checkpoint_manager.StepAlreadyExistsError):
            manager.save(3, args=both(3), force=True)

    with ocp.CheckpointManager(f"{URL}/run", options=options) as manager:
        assert list(manager.all_steps()) == [1, 3]
        assert manager.best_step() == 3
        assert manager.metadata().custom_metadata == {"name": "run"}
        found = manager.restore(
            3,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(state(0)), config=ocp.args.JsonRestore()),
        )
        same(found.state, state(3))
        assert found.config == {"lr": 3}
        assert sorted(manager.restore(1)) == ["config", "extra", "metrics", "state"]
        assert manager.item_metadata(3).state["w"].shape == (1000,)
        assert manager.metadata(3).metrics == {"loss": 0.1}
        manager.delete(3)
        assert manager.latest_step() == 1

    assert not [key for key in bucket.objects_there() if "/3/" in key or "penstock-saving" in key]


def test_a_manager_of_one_tree_takes_a_path_object(bucket: Bucket) -> None:
    root = pytest.importorskip("etils.epath").Path("s3://bucket/run")
    with ocp.CheckpointManager(root) as manager:
        manager.save(1, args=ocp.args.StandardSave(state()))
        manager.wait_until_finished()
        same(manager.restore(1), state())
        same(manager.restore(1, args=ocp.args.StandardRestore(state(2))), state())
        assert manager.directory == root

    with ocp.CheckpointManager(root) as manager:
        assert manager.latest_step() == 1
        same(manager.restore(None, args=ocp.args.StandardRestore(state(2))), state())


def test_steps_are_found_by_the_functions_that_list_them(bucket: Bucket) -> None:
    root = f"{URL}/run"
    with ocp.CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(state()))

    assert ocp.utils.checkpoint_steps(root) == [1, 2]
    assert [str(path) for path in ocp.utils.checkpoint_steps_paths(root)] == [f"{root}/1", f"{root}/2"]
    assert ocp.utils.is_checkpoint_finalized(f"{root}/1")
    assert ocp.utils.tmp_checkpoints(root) == []
    assert ocp.utils.checkpoint_steps(f"{URL}/none") == []
    assert not ocp.utils.is_checkpoint_finalized(f"{root}/3")
