"""Documents that a program rewrites by right, through the face: their digests are recorded anew."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import msgpack
import numpy as np
import orbax.checkpoint
import pytest

import penstock
import penstock.orbax as ocp
from penstock.embedding import document_files
from penstock.errors import ChecksumError, CorruptCheckpointError
from penstock.handlers import LocalStore
from penstock.orbax import type_handlers

TREE: Any = {"a": np.arange(6.0), "s": "text"}
ABOUT = "_CHECKPOINT_METADATA"


def composite(path: Path) -> Path:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        state, config = ocp.args.StandardSave({"a": np.arange(6.0)}), ocp.args.JsonSave({"lr": 1})
        checkpointer.save(path, ocp.args.Composite(state=state, config=config))

    return path


def flat(path: Path) -> Path:
    penstock.sync.save(path, TREE, custom_metadata={"who": "me"})
    return path


def native_items(path: Path) -> Path:
    penstock.sync.save(path, penstock.items.Composite(state=TREE, config=penstock.items.Json({"lr": 1})))
    return path


KINDS: Any = {"composite": composite, "flat": flat, "items": native_items}


def store() -> Any:
    return ocp.metadata.metadata_store(enable_write=True)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("save", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("operation", ["write", "update"])
def test_a_rewritten_document_is_no_damage_and_is_compared(tmp_path: Path, save: Any, operation: str) -> None:
    path = save(tmp_path / "c")
    documents = store().read(path / ABOUT)
    if operation == "write":
        store().write(path / ABOUT, {**documents, "custom_metadata": {"step": 3}})
    else:
        store().update(path / ABOUT, custom_metadata={"step": 3})

    assert penstock.sync.verify(path).intact
    assert penstock.sync.metadata(path).custom_metadata == {"step": 3}
    assert orbax.checkpoint.path.step.is_checkpoint_finalized(path)
    flip(path / ABOUT)
    assert penstock.sync.verify(path).status == "damaged"
    with pytest.raises(CorruptCheckpointError):
        penstock.sync.metadata(path)


def test_the_record_itself_is_still_compared(tmp_path: Path) -> None:
    path = flat(tmp_path / "c")
    store().update(path / ABOUT, custom_metadata={"step": 3})
    flip(path / "_PENSTOCK_INTEGRITY")
    with pytest.raises(CorruptCheckpointError):
        penstock.sync.restore(path)


@pytest.mark.parametrize("save", [composite, native_items])
def test_an_items_document_has_its_digest_in_two_records(tmp_path: Path, save: Any) -> None:
    """That of the tree, whose own digest is in the record of the checkpoint."""
    path = save(tmp_path / "c")
    file = path / "state" / "_METADATA"
    assert store().read(file)
    store().update(file, custom_metadata={"n": 1})

    assert penstock.sync.verify(path).intact
    assert penstock.sync.metadata(path, item="state").leaves
    flip(file)
    assert penstock.sync.verify(path).status == "damaged"


def flip_checksum(record: Path) -> None:
    """Change the checksum of a data file in a record, which stays a record."""
    members = msgpack.unpackb(record.read_bytes())
    data = bytearray(next(iter(members["files"].values()))["crc32c"])
    data[0] ^= 1
    next(iter(members["files"].values()))["crc32c"] = bytes(data)
    record.write_bytes(msgpack.packb(members))


@pytest.mark.parametrize("has_mark", [True, False])  # Orbax writes none into items
def test_a_damaged_record_is_not_written_anew(tmp_path: Path, has_mark: bool) -> None:
    path = native_items(tmp_path / "c")
    if not has_mark:
        (path / "state" / "commit_success.txt").unlink()

    flip_checksum(path / "state" / "_PENSTOCK_INTEGRITY")
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    with pytest.raises(CorruptCheckpointError):
        document_files.rewrite_document(LocalStore(), str(path / "state" / "_METADATA"), b"{}")

    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_an_item_that_was_deleted_before_is_not_missed_afterwards(tmp_path: Path) -> None:
    path = composite(tmp_path / "c")
    about = store().read(path / ABOUT)
    del about["item_handlers"]["config"]
    (path / ABOUT).write_text(json.dumps(about))  # as Orbax deletes an item
    shutil.rmtree(path / "config")

    store().update(path / ABOUT, custom_metadata={"step": 3})

    assert penstock.sync.verify(path).intact


def test_a_json_item_that_is_written_again_is_no_damage(tmp_path: Path) -> None:
    path = composite(tmp_path / "c")
    handler = ocp.JsonCheckpointHandler()
    handler.save(path / "config", args=ocp.args.JsonSave({"lr": 2}))
    handler.close()

    assert penstock.sync.verify(path).intact
    assert penstock.sync.restore(path, item="config") == {"lr": 2}


def test_array_metadata_that_are_added_are_no_damage_and_bless_none(tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", {"a": jax.numpy.arange(6.0)})
    array = type_handlers.SerializedArrayMetadata(param_name="b", write_shape=(3,), chunk_shape=(3,))
    metadata = type_handlers.Store()

    asyncio.run(metadata.write(tmp_path / "c", [array], 0))

    assert penstock.sync.verify(tmp_path / "c").intact
    (file,) = (tmp_path / "c" / "array_metadatas").iterdir()
    file.write_bytes(file.read_bytes().replace(b'"a"', b'"c"'))
    with pytest.raises(ChecksumError):
        asyncio.run(metadata.write(tmp_path / "c", [array], 0))


class _StoppedError(Exception):
    pass


def stopped_after(n_writes: int) -> Callable[..., Any]:
    """Return a store that is killed before write number `n_writes`."""

    class Killed:
        def __init__(self) -> None:
            self.inner, self.n_writes = LocalStore(), 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def write_file(self, path: str, data: bytes, **options: Any) -> bool:
            self.count()
            return self.inner.write_file(path, data, **options)

        def replace_file(self, path: str, data: bytes) -> None:
            self.count()
            self.inner.replace_file(path, data)

        def count(self) -> None:
            if self.n_writes == n_writes:
                raise _StoppedError
            self.n_writes += 1

    return Killed


@pytest.mark.parametrize("save", [flat, native_items])
def test_a_rewrite_killed_at_any_moment_leaves_a_checkpoint_that_can_be_restored(
    tmp_path: Path, save: Any
) -> None:
    whole = save(tmp_path / "whole")
    name = "_METADATA" if save is flat else "state/_METADATA"
    changed = json.dumps({**json.loads((whole / name).read_bytes()), "custom_metadata": {"n": 1}}).encode()
    for n_writes in range(20):
        path = tmp_path / str(n_writes)
        shutil.copytree(whole, path)
        try:
            document_files.rewrite_document(stopped_after(n_writes)(), str(path / name), changed)
        except _StoppedError:
            finished = False
        else:
            finished = True

        item = None if save is flat else "state"
        assert penstock.sync.restore(path, item=item)["s"] == "text"
        assert penstock.sync.verify(path).status in ({"intact"} if finished else {"intact", "unchecked"})
        document_files.rewrite_document(LocalStore(), str(path / name), changed)
        assert penstock.sync.verify(path).intact
        if finished:
            assert n_writes > 4
            return

    raise AssertionError("it never ended")
