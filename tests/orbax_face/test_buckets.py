"""The checkpointers of `penstock.orbax` on a bucket in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket

import penstock.orbax as ocp
from penstock.handlers.stores.buckets import connections

PATH = f"{URL}/run/7"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket that every URL leads to."""
    made = Bucket()
    monkeypatch.setattr(connections, "connect", lambda name, options: lambda module: made.objects)
    return made


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
    [OwnHandler, ocp.CompositeCheckpointHandler, ocp.JsonCheckpointHandler, ocp.ArrayCheckpointHandler],
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


def test_permissions_and_what_is_not_there_are_refused(bucket: Bucket) -> None:
    files = ocp.options.FileOptions(path_permission_mode=0o700)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), file_options=files) as checkpointer:
        with pytest.raises(ValueError, match="permissions"):
            checkpointer.save(PATH, state())
        with pytest.raises(FileNotFoundError):
            checkpointer.restore(PATH)

    assert bucket.objects_there() == []
    assert jax.process_count() == 1
