"""A part of a piece is read by the blocks that it lies in, and compared like all that is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from tests.byte_counting import CountingStore

import penstock
from penstock import SaveFormat
from penstock.errors import ChecksumError
from penstock.handlers.formats.orbax import INTEGRITY
from penstock.stages.write import BLOCK_BYTES, block_bytes_for

ROWS, COLUMNS = 24, 2 * BLOCK_BYTES // 4  # a row is two blocks
ROW = COLUMNS * 4
VALUES = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


@pytest.fixture(params=[True, False], ids=["OCDBT", "directories"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(tmp_path / "c", {"a": VALUES, "small": np.arange(9)}, ocdbt=request.param)


def save(path: Path, tree: Any, base: Path | None = None, **form: Any) -> Path:
    with penstock.sync.Checkpointer(save_format=SaveFormat(**form)) as checkpointer:
        checkpointer.save(path, tree, base=base).result()
    return path


def restored(path: Path, shape: tuple[int, int], **options: Any) -> tuple[Any, int]:
    """Restore the corner of an array. Returns it, and the bytes that were read of data files."""
    store: Any = CountingStore()
    with penstock.sync.Checkpointer(store=store) as checkpointer:
        like = {"a": np.zeros(shape, np.float32)}
        found = checkpointer.restore(path, like=like, strict=False, on_unexpected="skip", **options)
    return found["a"], store.nbytes


def data_file(path: Path) -> Path:
    return max((each for each in path.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)


def flip(path: Path, row: int, byte: int) -> None:
    """Flip a bit of the array."""
    file = data_file(path)
    data = bytearray(file.read_bytes())
    data[data.index(VALUES[0].tobytes()) + row * ROW + byte] ^= 1
    file.write_bytes(data)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((ROWS, COLUMNS), VALUES.nbytes),
        ((5, COLUMNS), 5 * ROW),
        ((1, 3), BLOCK_BYTES),  # a block, for a few bytes of it
        ((ROWS, COLUMNS // 2), VALUES.nbytes // 2),  # every other block
        ((ROWS, COLUMNS // 4), VALUES.nbytes - BLOCK_BYTES),  # short rows, with all that is between them
    ],
)
def test_the_blocks_that_are_needed_are_read(path: Path, shape: tuple[int, int], expected: int) -> None:
    found, nbytes = restored(path, shape)

    np.testing.assert_array_equal(found, VALUES[: shape[0], : shape[1]])
    assert nbytes == expected


@pytest.mark.parametrize("verify", [None, False])
def test_a_flipped_bit_counts_where_it_is_read(path: Path, verify: bool | None) -> None:
    flip(path, 7, BLOCK_BYTES + 5)

    restored(path, (7, COLUMNS))
    restored(path, (ROWS, COLUMNS // 2))
    if verify is False:
        restored(path, (8, COLUMNS), verify=False)
        return

    with pytest.raises(ChecksumError) as raised:
        restored(path, (8, COLUMNS))

    assert raised.value.key_path == "['a']"


def test_a_reader_that_knows_nothing_of_blocks_compares_whole_pieces(path: Path) -> None:
    record = path / INTEGRITY
    document = msgpack.unpackb(record.read_bytes())
    columns = [columns for columns in document["files"].values() if columns.pop("running", None)]
    for each in columns:
        each.pop("block_bytes")  # as such a reader sees it, and as earlier versions wrote it

    record.write_bytes(msgpack.packb(document))
    (path / "commit_success.txt").unlink()  # it has the digest of the record

    found, nbytes = restored(path, (5, COLUMNS))

    assert len(columns) == 1
    np.testing.assert_array_equal(found, VALUES[:5])
    assert nbytes == VALUES.nbytes
    flip(path, 20, 0)
    with pytest.raises(ChecksumError):
        restored(path, (5, COLUMNS))


def test_what_is_linked_keeps_what_is_known_of_its_blocks(tmp_path: Path) -> None:
    tree = {"a": jnp.asarray(VALUES), "b": jnp.arange(3)}
    with penstock.sync.Checkpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", tree).result()
        checkpointer.save(tmp_path / "2", {**tree, "b": jnp.zeros(3)}, base=tmp_path / "1").result()

    assert data_file(tmp_path / "1").stat().st_ino == data_file(tmp_path / "2").stat().st_ino
    _, nbytes = restored(tmp_path / "2", (5, COLUMNS))
    assert nbytes == 5 * ROW


def test_a_large_checkpoint_has_larger_blocks() -> None:
    assert block_bytes_for(2**38) == BLOCK_BYTES
    assert block_bytes_for(2**38 + 1) == 2 * BLOCK_BYTES
    assert block_bytes_for(10**16) * 2**22 >= 10**16
