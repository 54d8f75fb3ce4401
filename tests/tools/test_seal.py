"""Checkpoints that had no digests have them afterwards, and nothing else of them has changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file
from tests.unsealed import unseal

import penstock
from penstock.errors import ChecksumError, MissingFileError, NotACheckpointError, UnsupportedFormatError

ARRAY = np.arange(3000.0)
TREE = {"a": ARRAY, "b": [jnp.arange(500)], "text": "words"}


def by_orbax(path: Path) -> None:
    ocp.PyTreeCheckpointer().save(path, TREE)


def by_orbax_with_zstd(path: Path) -> None:
    handler: Any = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
    ocp.Checkpointer(handler).save(path, args=ocp.args.PyTreeSave(TREE))


def by_the_first_penstock(path: Path) -> None:
    penstock.sync.save(path, TREE)
    unseal(path)


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def by_early_orbax(path: Path) -> None:
    """Write a msgpack file, as Orbax did before it had databases."""
    path.mkdir()
    array = [[3000], "float64", ARRAY.tobytes()]
    tree = {"a": msgpack.ExtType(1, msgpack.packb(array)), "text": "words"}
    (path / "checkpoint").write_bytes(msgpack.packb(tree))


WRITERS = [by_orbax, by_orbax_with_zstd, by_the_first_penstock]


@pytest.mark.parametrize("write", WRITERS)
def test_every_byte_is_compared_from_then_on(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "c")
    before = files(tmp_path / "c")

    report = penstock.sync.seal(tmp_path / "c")

    after = files(tmp_path / "c")
    ours = {"_PENSTOCK_INTEGRITY", "commit_success.txt"}
    assert {name: data for name, data in after.items() if name not in ours} == {
        name: data for name, data in before.items() if name not in ours
    }
    assert after["commit_success.txt"].startswith(b"Checkpoint commit was successful")
    assert report.sealed == (str(tmp_path / "c"),)
    assert report.n_documents
    damaged = Path(shutil.copytree(tmp_path / "c", tmp_path / "damaged"))
    with penstock.sync.Checkpointer() as checkpointer:
        for name in after:
            if name in {"manifest.ocdbt", "commit_success.txt"} or name.startswith(("d/", "ocdbt.")):
                continue  # an index has checksums of its own, and the mark's text is free
            data = bytearray(after[name])
            data[len(data) // 2] ^= 1
            (damaged / name).write_bytes(data)
            with pytest.raises(penstock.errors.CorruptCheckpointError):
                checkpointer.restore(damaged)
            (damaged / name).write_bytes(after[name])

        checkpointer.restore(damaged)  # whole again


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax reads what is recorded
@pytest.mark.parametrize("write", WRITERS)
def test_orbax_and_penstock_read_a_sealed_checkpoint_as_before(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    write(tmp_path / "c")
    penstock.sync.seal(tmp_path / "c")

    for found in (penstock.sync.restore(tmp_path / "c"), ocp.PyTreeCheckpointer().restore(tmp_path / "c")):
        assert np.asarray(found["a"]).tobytes() == np.arange(3000.0).tobytes()
        assert found["text"] == "words"


@pytest.mark.parametrize("at", [20, 10_000, -3])
def test_a_msgpack_file_is_compared_where_it_is_read(at: int, tmp_path: Path) -> None:
    by_early_orbax(tmp_path / "c")
    penstock.sync.seal(tmp_path / "c")
    assert penstock.sync.restore(tmp_path / "c")["a"].tobytes() == np.arange(3000.0).tobytes()

    data = bytearray((tmp_path / "c" / "checkpoint").read_bytes())
    data[at] ^= 1
    (tmp_path / "c" / "checkpoint").write_bytes(data)

    with pytest.raises(ChecksumError):
        penstock.sync.restore(tmp_path / "c")


def test_what_is_sealed_stays_as_it_is(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "c", TREE)
    before = files(tmp_path / "c")

    report = penstock.sync.seal(tmp_path / "c")

    assert report.sealed == ()
    assert report.unchanged == (str(tmp_path / "c"),)
    assert files(tmp_path / "c") == before


def test_all_steps_and_their_items(tmp_path: Path) -> None:
    with penstock.sync.CheckpointManager(tmp_path, metadata={"project": 1}) as manager:
        for step in (1, 2):
            save = manager.save(step, TREE, metrics={"loss": 0.5})
            assert save is not None
            save.result()
    unseal(tmp_path)
    for step in (1, 2):
        (tmp_path / str(step) / "_PENSTOCK_INTEGRITY").unlink()

    report = penstock.sync.seal(tmp_path)

    assert report.sealed == tuple(
        str(tmp_path / name) for name in ("1/default", "1", "2/default", "2", "metadata")
    )
    assert penstock.sync.seal(tmp_path).sealed == ()
    metrics = tmp_path / "1" / "metrics" / "metrics"
    metrics.write_text(metrics.read_text().replace("5", "4"))
    with penstock.sync.CheckpointManager(tmp_path) as manager:
        assert manager.metadata(2).metrics == {"loss": 0.5}
        with pytest.raises(ChecksumError):
            manager.metadata(1)


def test_what_is_damaged_already_is_not_sealed(tmp_path: Path) -> None:
    by_the_first_penstock(tmp_path / "c")
    file = max((tmp_path / "c" / "d").iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    before = files(tmp_path / "c")

    with pytest.raises(ChecksumError):
        penstock.sync.seal(tmp_path / "c")
    assert files(tmp_path / "c") == before


def test_a_lost_record_is_noticed(tmp_path: Path) -> None:
    by_orbax(tmp_path / "c")
    penstock.sync.seal(tmp_path / "c")
    (tmp_path / "c" / "_PENSTOCK_INTEGRITY").unlink()

    with pytest.raises(MissingFileError, match="_PENSTOCK_INTEGRITY"):
        penstock.sync.restore(tmp_path / "c")


def test_what_cannot_be_sealed(tmp_path: Path) -> None:
    save_file({"a": np.ones(1)}, tmp_path / "x.safetensors")

    with pytest.raises(UnsupportedFormatError, match="`penstock convert` writes a copy"):
        penstock.sync.seal(tmp_path / "x.safetensors")
    with pytest.raises(NotACheckpointError):
        penstock.sync.seal(tmp_path / "nothing")


def test_safetensors_of_ours_are_sealed_already(tmp_path: Path) -> None:
    penstock.sync.export_safetensors({"a": np.ones(1)}, tmp_path / "x.safetensors")
    before = (tmp_path / "x.safetensors").read_bytes()

    assert penstock.sync.seal(tmp_path / "x.safetensors").unchanged == (str(tmp_path / "x.safetensors"),)
    assert (tmp_path / "x.safetensors").read_bytes() == before
