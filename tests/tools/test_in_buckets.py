"""Sealing and repairing checkpoints in a bucket in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket, bucket_of_every_url

import penstock
from penstock.errors import ChecksumError, PathError

AssertSame = Callable[[Any, Any], None]

pytestmark = pytest.mark.anyio

PATH = f"{URL}/run/7"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket that every URL leads to."""
    return bucket_of_every_url(monkeypatch)


def state() -> dict[str, Any]:
    return {"w": np.arange(5000.0), "b": np.ones(3), "step": 7}


def unseal(bucket: Bucket, below: str) -> None:
    """Leave what penstock 0.1 recorded: no digests of documents."""
    client = bucket.client()
    for key in bucket.objects_there():
        found = client.read(key)
        assert found is not None
        if key.startswith(below) and key.endswith("_PENSTOCK_INTEGRITY"):
            kept = {k: v for k, v in msgpack.unpackb(found[0]).items() if k not in {"documents", "about"}}
            client.put(key, msgpack.packb(kept))
        if key.startswith(below) and key.endswith("commit_success.txt"):
            client.put(key, b"Checkpoint commit was successful")


def damage(bucket: Bucket, key: str) -> None:
    """Flip a bit in the middle of an object."""
    client = bucket.client()
    found = client.read(key)
    assert found is not None
    data = bytearray(found[0])
    data[len(data) // 2] ^= 1
    client.put(key, bytes(data))


async def test_a_checkpoint_is_sealed(bucket: Bucket, assert_same: AssertSame) -> None:
    await penstock.save(PATH, state())
    unseal(bucket, "run/7")
    report = await penstock.seal(PATH)
    assert report.sealed == (PATH,)
    assert report.n_documents
    assert (await penstock.seal(PATH)).unchanged == (PATH,)
    assert_same(await penstock.restore(PATH), state())
    damage(bucket, "run/7/_METADATA")
    with pytest.raises(ChecksumError):
        await penstock.restore(PATH)


@pytest.mark.parametrize("where", ["bucket", "disk"])
async def test_a_damaged_checkpoint_is_repaired_from_another_one(
    bucket: Bucket, tmp_path: Path, where: str, assert_same: AssertSame
) -> None:
    target = str(tmp_path / "new") if where == "disk" else f"{URL}/run/8"
    for path in (f"{URL}/run/6", PATH):
        await penstock.save(path, state())

    data = max(
        (key for key in bucket.objects_there() if key.startswith("run/7/d/")),
        key=lambda key: bucket.client().head(key).size,  # type: ignore[union-attr]
    )
    damage(bucket, data)
    assert not (await penstock.verify(PATH)).intact
    report = await penstock.repair(PATH, target, others=[f"{URL}/run/6"])
    assert {leaf.outcome for leaf in report.leaves} <= {"kept", "taken"}
    assert "taken" in {leaf.outcome for leaf in report.leaves}
    assert_same(await penstock.restore(target), state())
    assert (await penstock.verify(target)).intact


async def test_what_lies_elsewhere_is_not_taken_from(bucket: Bucket, tmp_path: Path) -> None:
    await penstock.save(PATH, state())
    await penstock.save(tmp_path / "6", state())
    with pytest.raises(PathError, match="copy it there"):
        await penstock.repair(PATH, f"{URL}/run/8", others=[tmp_path / "6"])


async def test_safetensors_are_restored_from_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    await penstock.export_safetensors({"a": np.arange(9.0)}, tmp_path / "model.safetensors")
    bucket.client().put("run/model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    found = await penstock.restore(f"{URL}/run/model.safetensors")
    assert found["a"].tolist() == list(range(9))
    assert (await penstock.verify(f"{URL}/run/model.safetensors")).intact
