"""The newer API on a bucket in memory."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket, bucket_of_every_url

from penstock.orbax import v1 as ocp

PATH = f"{URL}/run/7"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket that every URL leads to."""
    return bucket_of_every_url(monkeypatch)


def state(step: int = 1) -> dict[str, Any]:
    return {"w": jnp.arange(1000.0) * step, "b": np.full(3, step), "step": step, "name": "run"}


def same(found: Any, expected: Any) -> None:
    assert jax.tree.map(type, found) == jax.tree.map(type, expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("as_object", [False, True], ids=["text", "epath"])
def test_a_tree_is_saved_described_and_loaded(bucket: Bucket, as_object: bool) -> None:
    path: Any = (
        pytest.importorskip("etils.epath").Path("s3://bucket/run/7") if as_object else "s3://bucket/run/7"
    )
    ocp.save(path, state(), custom_metadata={"lr": 0.1})
    same(ocp.load(path, state(2)), state())
    same(ocp.load(path), state())
    about = ocp.metadata(path)
    assert about.custom_metadata == {"lr": 0.1}
    assert about.metadata["w"].shape == (1000,)
    with pytest.raises(ValueError, match="exists"):
        ocp.save(path, state(2))

    ocp.save_async(path, state(2), overwrite=True).result()
    same(ocp.load(path, state()), state(2))
    assert ocp.delete(path)
    assert not [key for key in bucket.objects_there() if key.startswith("run")]
    assert not [name for name in os.listdir() if name.startswith("s3:")]


def test_named_objects_are_saved_and_loaded(bucket: Bucket) -> None:
    ocp.save_checkpointables(PATH, {"state": state(), "config": {"lr": 1, "names": ["a"]}})
    found = ocp.load_checkpointables(PATH)
    assert sorted(found) == ["config", "state"]
    same(found["state"], state())
    same(ocp.load_checkpointables(PATH, {"state": state(2)})["state"], state())


def test_steps_are_saved_kept_and_loaded(bucket: Bucket) -> None:
    keep = ocp.training.preservation_policies.LatestN(2)
    with ocp.training.Checkpointer(
        f"{URL}/run", preservation_policy=keep, custom_metadata={"a": 1}
    ) as checkpointer:
        for step in (1, 2, 3):
            assert checkpointer.save(step, state(step), metrics={"loss": step})

        checkpointer.save(3, state(4), overwrite=True, force=True)

    with ocp.training.Checkpointer(f"{URL}/run") as checkpointer:
        assert [one.step for one in checkpointer.checkpoints] == [2, 3]
        assert checkpointer.latest is not None
        same(checkpointer.load(None, state()), state(4))
        same(checkpointer.load(2), state(2))
        assert checkpointer.root_metadata().custom_metadata == {"a": 1}
        assert checkpointer.metadata(2).metrics == {"loss": 2}
        assert checkpointer.delete(2)
        assert [one.step for one in checkpointer.checkpoints] == [3]


class OwnFiles:
    """Saves itself as a file."""

    async def save(self, directory: Any) -> Awaitable[None]:
        raise AssertionError("it is refused before")

    async def load(self, directory: Any) -> Awaitable[None]:
        raise AssertionError("it is refused before")


def test_what_writes_files_itself_is_refused_before_anything_is_written(bucket: Bucket) -> None:
    with pytest.raises(ValueError, match="'own' reads and writes files by itself"):
        ocp.save_checkpointables(PATH, {"state": state(), "own": OwnFiles()})
    with (
        ocp.Context(file_options=ocp.options.FileOptions(path_permission_mode=0o700)),
        pytest.raises(ValueError, match="permissions"),
    ):
        ocp.save(PATH, state())
    for empty in ({}, {"a": np.zeros((0, 3))}):
        with pytest.raises(ValueError, match=r"empty|zero size"):
            ocp.save(PATH, empty)

    assert bucket.objects_there() == []


def test_no_item_of_a_checkpoint_is_deleted_by_itself(bucket: Bucket) -> None:
    ocp.save_checkpointables(PATH, {"state": state(), "config": {"lr": 1}})
    with pytest.raises(ValueError, match="no single item is deleted"):
        ocp.delete(PATH, checkpointable_name="config")

    assert sorted(ocp.load_checkpointables(PATH)) == ["config", "state"]
