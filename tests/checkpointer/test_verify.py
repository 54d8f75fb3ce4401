"""A checkpoint at rest, intact and damaged in every way that bytes can be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock
from penstock.checkpointer.verify import VerifyReport
from penstock.handlers.formats.common.integrity import decode
from penstock.handlers.formats.orbax.reading.open_checkpoint import open_checkpoint
from penstock.handlers.formats.orbax.reading.verification import BLOCK_BYTES, check_ranges, survey
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    PenstockError,
    UnsupportedFormatError,
)
from penstock.testing.faulty_store import FaultyStore


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))  # type: ignore[no-untyped-call]  # jax's
    tree = {
        "a": np.arange(1000),
        "b": [jnp.ones(50), jax.device_put(jnp.arange(3000.0), sharding)],
        "tiny": 3,
        "text": "t",
        "none": None,
        "empty": np.zeros((0, 3)),
    }
    path = tmp_path_factory.mktemp("verify") / "ckpt"
    penstock.sync.save(path, tree)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "ckpt"))


def data_file(path: Path) -> Path:
    files = decode("", (path / "_PENSTOCK_INTEGRITY").read_bytes()).files
    return max((path / name for name in files), key=lambda file: file.stat().st_size)


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def verify(path: Path) -> VerifyReport:
    return penstock.sync.verify(path)


def test_what_was_just_saved_is_intact(saved: Path) -> None:
    found = verify(saved)

    assert found.intact
    assert not found.damages
    assert not found.unchecked
    assert not found.damaged_leaves
    assert found.n_leaves == 7
    assert found.nbytes == 8000 + 200 + 12000 + 8
    assert found.path == str(saved)


def test_every_changed_byte_is_found_with_the_leaf_it_belongs_to(copy: Path) -> None:
    file = data_file(copy)
    checkpoint = open_checkpoint(LocalStore(), str(copy))
    places = [(found.checksum, found.key_paths) for found in survey(checkpoint).ranges]
    assert sorted({name for _, names in places for name in names}) == [
        "['a']",
        "['b'][0]",
        "['b'][1]",
        "['tiny']",
    ]
    for checksum, names in places:
        for offset in (checksum.offset, checksum.offset + checksum.nbytes - 1):
            flip(file, offset)
            found = verify(copy)
            flip(file, offset)

            (damage,) = found.damages
            assert not found.intact
            assert damage.key_paths == found.damaged_leaves == names
            assert (damage.offset, damage.nbytes) == (checksum.offset, checksum.nbytes)
            assert damage.file == str(file)
            assert "not those that were written" in str(damage)

    assert verify(copy).intact


def test_a_missing_file_damages_every_leaf_in_it(copy: Path) -> None:
    data_file(copy).unlink()

    found = verify(copy)

    assert set(found.damaged_leaves) == {"['a']", "['b'][0]", "['b'][1]", "['tiny']"}
    assert all("missing" in damage.problem for damage in found.damages)


def test_a_file_cut_short_damages_what_lay_behind(copy: Path) -> None:
    file = data_file(copy)
    last = survey(open_checkpoint(LocalStore(), str(copy))).ranges[-1]
    with file.open("r+b") as opened:
        opened.truncate(last.checksum.offset + last.checksum.nbytes - 1)

    found = verify(copy)

    assert found.damaged_leaves == last.key_paths
    assert "ends at byte" in found.damages[0].problem


def test_what_cannot_be_read_is_damage(saved: Path) -> None:
    ranges = survey(open_checkpoint(LocalStore(), str(saved))).ranges
    for operation in ("open_data_file", "data.read_at", "file.read_at"):
        store = FaultyStore(LocalStore())
        store.fail_on(operation)
        damages = check_ranges(store, ranges)
        assert store.open_files == 0
        if any(done.name == operation for done in store.operations):
            assert damages
            assert "cannot be" in damages[0].problem


def test_a_large_range_is_read_block_by_block(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "c", {"a": np.arange(5 * BLOCK_BYTES // 16)})
    assert verify(tmp_path / "c").intact

    flip(data_file(tmp_path / "c"), BLOCK_BYTES + 1)
    assert verify(tmp_path / "c").damaged_leaves == ("['a']",)


def test_leaves_without_a_recorded_checksum_are_named(copy: Path) -> None:
    file = copy / "_PENSTOCK_INTEGRITY"
    document: Any = msgpack.unpackb(file.read_bytes())
    survivors = {
        name: {column: data[: -(8 if column != "crc32c" else 4)] for column, data in columns.items()}
        for name, columns in document["files"].items()
    }
    file.write_bytes(msgpack.packb({**document, "files": survivors}))

    found = verify(copy)

    assert found.intact
    assert len(found.unchecked) == 1


def drop_integrity(path: Path) -> None:
    (path / "_PENSTOCK_INTEGRITY").unlink()


def break_integrity(path: Path) -> None:
    (path / "_PENSTOCK_INTEGRITY").write_bytes(b"\xc1")


def lead_out(path: Path) -> None:
    (path / "_PENSTOCK_INTEGRITY").write_bytes(msgpack.packb({"version": 1, "files": {"../x": [[0, 1, 2]]}}))


def break_manifest(path: Path) -> None:
    flip(path / "manifest.ocdbt", 40)


def remove_all(path: Path) -> None:
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (drop_integrity, UnsupportedFormatError),
        (break_integrity, CorruptCheckpointError),
        (lead_out, CorruptCheckpointError),
        (break_manifest, CorruptCheckpointError),
        (remove_all, NotACheckpointError),
    ],
)
def test_what_keeps_it_from_being_checked_is_an_error(
    copy: Path, change: Callable[[Path], None], error: type[Exception]
) -> None:
    change(copy)

    with pytest.raises(error):
        verify(copy)


def test_safetensors_have_no_checksums(tmp_path: Path) -> None:
    penstock.sync.export_safetensors({"a": np.ones(1)}, tmp_path / "x.safetensors")

    with pytest.raises(UnsupportedFormatError, match="no checksums"):
        verify(tmp_path / "x.safetensors")


def test_a_tree_without_arrays(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "c", {"a": None, "s": "x"})

    assert verify(tmp_path / "c").intact


@pytest.mark.anyio
async def test_it_holds_little_memory_and_gives_it_back(saved: Path) -> None:
    async with penstock.Checkpointer(memory_limit=1 << 20) as checkpointer:
        assert (await checkpointer.verify(saved)).intact
        statistics = checkpointer.statistics()

    assert statistics.leased == 0
    assert 0 < statistics.peak <= 1 << 20


@pytest.mark.anyio
async def test_cancelled_midway(saved: Path) -> None:
    store = FaultyStore(LocalStore())
    hang = store.hang_on("open_data_file", 1)
    async with penstock.Checkpointer(store=store) as checkpointer:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(checkpointer.verify, saved)
            await hang.wait_reached()
            tasks.cancel_scope.cancel()
            hang.release()

        assert checkpointer.statistics().leased == 0

    assert store.open_files == 0


def test_a_failure_is_one_of_ours(tmp_path: Path) -> None:
    with pytest.raises(PenstockError):
        penstock.sync.verify(tmp_path)
