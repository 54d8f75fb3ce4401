"""Only the byte ranges that are needed are read. They are counted for every way to store an array."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.byte_counting import CountingStore
from tests.corpus.corpora import DOCUMENTS, unpacked_orbax

import penstock
from penstock import SaveFormat
from penstock.handlers import AutoLayout
from penstock.handlers.leaves import HostRegion
from penstock.kernel import DirectRead, ScatterRead
from penstock.kernel.protocols import ChecksummedCheckpoint

_ts: Any = ts
ROWS, COLUMNS = 64, 128
ARRAY = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
ROW = COLUMNS * 4


def on(shape: tuple[int, ...], *axes: str | None) -> Any:
    devices: Any = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return NamedSharding(Mesh(devices, ("x", "y")[: len(shape)]), PartitionSpec(*axes))  # type: ignore[no-untyped-call]  # jax's


class Restored:
    """The result of a restore, and the bytes that penstock and TensorStore read for it."""

    def __init__(self, path: Path, **options: Any) -> None:
        store: Any = CountingStore()
        before = driver_bytes()
        with penstock.sync.Checkpointer(store=store) as checkpointer:
            self.tree = checkpointer.restore(path, **options)
        self.direct, self.driver = store.nbytes, driver_bytes() - before


def driver_bytes() -> int:
    """Bytes that TensorStore has read from files so far."""
    found = _ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(int(value["value"]) for metric in found for value in metric["values"])


def save(path: Path, tree: Any, **form: Any) -> Path:
    with penstock.sync.Checkpointer(save_format=SaveFormat(**form)) as checkpointer:
        checkpointer.save(path, tree).result()
    return path


PLAIN = {
    "OCDBT": SaveFormat(),
    "OCDBT, zarr v3, small chunks": SaveFormat(zarr=3, chunk_byte_size=2048),
    "directories": SaveFormat(ocdbt=False),
    "directories, small chunks": SaveFormat(ocdbt=False, chunk_byte_size=2048),
}


@pytest.fixture(params=[*PLAIN, "safetensors"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An array sharded over rows, and other things beside it."""
    tree = {"a": jax.device_put(ARRAY, on((8,), "x")), "other": np.zeros(5000), "text": "x"}
    if request.param == "safetensors":
        penstock.sync.export_safetensors(tree, tmp_path / "a.safetensors")
        return tmp_path / "a.safetensors"

    with penstock.sync.Checkpointer(save_format=PLAIN[request.param]) as checkpointer:
        checkpointer.save(tmp_path / "a", tree).result()
    return tmp_path / "a"


def header_bytes(path: Path) -> int:
    """Return the bytes of a safetensors file that every restore reads: its header."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little") if path.is_file() else 0


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "sharding",
    [on((8,), "x"), on((8,)), on((2, 4), "y", "x"), on((4,), None, "x"), on((1,))],
    ids=["as saved", "replicated", "two axes", "columns", "one device"],
)
def test_an_array_is_read_once_whatever_its_sharding(path: Path, sharding: Any) -> None:
    like = {"a": jax.ShapeDtypeStruct(ARRAY.shape, ARRAY.dtype, sharding=sharding)}  # type: ignore[no-untyped-call]  # jax's
    found = Restored(path, like=like, on_unexpected="skip")
    assert np.asarray(found.tree["a"]).tobytes() == ARRAY.tobytes()
    # Each shard of columns may read the bytes between its columns, too, but only once.
    in_columns = len(sharding.spec) > 1 and sharding.spec[1] is not None
    shards = sharding.mesh.shape["x"] if in_columns else 1
    assert ARRAY.nbytes <= found.direct - header_bytes(path) <= ARRAY.nbytes * shards
    assert in_columns or found.direct - header_bytes(path) == ARRAY.nbytes
    assert found.driver == 0


def test_a_subset_reads_nothing_else(path: Path) -> None:
    found = Restored(path, like={"other": np.zeros(5000)}, on_unexpected="skip")
    assert found.direct - header_bytes(path) == 5000 * 8
    assert Restored(path, like={"text": ""}, on_unexpected="skip").direct == header_bytes(path)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("rows", [(0, 1), (3, 5), (7, 41), (63, 64), (0, 64)], ids=str)
def test_rows_of_one_process_are_read_by_their_ranges(path: Path, rows: tuple[int, int]) -> None:
    """The reads that `plan` would make for the rows on the devices of one process."""
    data, nbytes = read_region(path, (rows, (0, COLUMNS)))
    assert data.tobytes() == ARRAY[slice(*rows)].tobytes()
    assert nbytes == (rows[1] - rows[0]) * ROW


@pytest.mark.thinned(3)
@pytest.mark.parametrize("columns", [(0, 1), (17, 90), (127, 128)], ids=str)
def test_columns_are_read_with_no_more_than_lies_between_them(path: Path, columns: tuple[int, int]) -> None:
    data, nbytes = read_region(path, ((8, 24), columns))
    assert data.tobytes() == ARRAY[8:24, slice(*columns)].tobytes()
    assert nbytes <= 16 * ROW


def read_region(path: Path, bounds: tuple[tuple[int, int], ...]) -> tuple[Any, int]:
    """Read a region of the array. Returns the region and the number of bytes read."""
    store: Any = CountingStore()
    checkpoint = AutoLayout().open(store, str(path))
    if isinstance(checkpoint, ChecksummedCheckpoint):
        checkpoint = checkpoint.without_checksums()
    store.ranges.clear()
    (leaf,) = [leaf for leaf in checkpoint.leaves if leaf.info.name == "a"]
    region = HostRegion(bounds, np.dtype(np.float32))
    for read in checkpoint.reads(0, leaf, region, 1 << 20):
        assert isinstance(read, DirectRead | ScatterRead)
        file = store.open_data_file(read.file)
        try:
            if isinstance(read, DirectRead):
                file.read_at(read.offset, [read.into()])
            else:
                data = bytearray(read.nbytes)
                file.read_at(read.offset, [memoryview(data)])
                read.scatter(memoryview(data))
        finally:
            file.close()
    return region.array(), store.nbytes


class TestCodedChunks:
    """Whole chunks are read and compared before TensorStore decodes them; unverified ones it reads itself."""

    @pytest.fixture(params=[True, False], ids=["OCDBT", "directories"])
    def path(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        tree = {"a": ARRAY, "b": ARRAY + 1}
        return save(tmp_path / "a", tree, ocdbt=request.param, codec="zstd", chunk_byte_size=8 * ROW)

    def test_a_subset_of_coded_chunks_is_read_by_their_ranges(self, path: Path) -> None:
        stored = {leaf.name: leaf.stored_nbytes for leaf in penstock.sync.metadata(path).leaves}
        found = Restored(path, like={"a": ARRAY}, on_unexpected="skip")
        assert found.tree["a"].tobytes() == ARRAY.tobytes()
        nbytes = stored["a"]
        assert nbytes is not None
        assert (found.direct, found.driver) == (nbytes, 0)

        found = Restored(path, like={"a": ARRAY}, on_unexpected="skip", verify=False)
        assert found.direct == 0
        assert nbytes <= found.driver < nbytes + index_bytes(path)

    def test_only_the_chunks_that_a_cut_leaf_keeps_are_read(self, path: Path) -> None:
        leaf = penstock.sync.metadata(path).tree["b"]
        found = Restored(path, like={"b": ARRAY[:17]}, on_unexpected="skip", strict=False)
        assert found.tree["b"].tobytes() == (ARRAY + 1)[:17].tobytes()
        rows = -(-17 // leaf.chunk_shape[0]) * leaf.chunk_shape[0]
        assert rows < ROWS
        assert 0 < found.direct <= leaf.stored_nbytes * (rows + 1) // ROWS
        assert found.driver == 0


def index_bytes(path: Path) -> int:
    """Return an upper bound for the bytes of the index that every restore reads."""
    return 2 * 8192 if (path / "manifest.ocdbt").exists() else 1


class TestCutOff:
    def test_long_rows_are_read_as_far_as_they_remain(self, tmp_path: Path) -> None:
        array = np.arange(4 * 150_000, dtype=np.float32).reshape(4, 150_000)
        like = np.zeros((3, 70_000), np.float32)
        found = Restored(save(tmp_path / "a", [array]), like=[like], strict=False, verify=False)
        assert found.tree[0].tobytes() == array[:3, :70_000].tobytes()
        assert found.direct == like.nbytes

    def test_padding_reads_what_there_is_once(self, tmp_path: Path) -> None:
        like = jax.ShapeDtypeStruct((128, 128), np.float32, sharding=on((8,), "x"))  # type: ignore[no-untyped-call]  # jax's
        found = Restored(save(tmp_path / "a", [ARRAY]), like=[like], strict=False)
        assert np.asarray(found.tree[0][:64]).tobytes() == ARRAY.tobytes()
        assert not found.tree[0][64:].any()
        assert found.direct == ARRAY.nbytes

    def test_a_cast_reads_no_more(self, tmp_path: Path) -> None:
        found = Restored(
            save(tmp_path / "a", [ARRAY]),
            like=[jnp.zeros((8, 128))],
            strict=False,
            dtype="like",
            verify=False,
        )
        assert found.direct == 8 * ROW


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked_orbax(tmp_path_factory) / "corpus"


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("case", "path"),
    [(name, tree["path"]) for name, case in DOCUMENTS.items() for tree in case["checkpoints"]],
)
def test_metadata_reads_no_arrays(case: str, path: str, corpus: Path) -> None:
    """Except for documents inside data files: a header, array metadata, a window of a msgpack file."""
    store: Any = CountingStore()
    with penstock.sync.Checkpointer(store=store) as checkpointer:
        found = checkpointer.metadata(corpus / case / path)

    old = "0_2_7" in case or "0_4_4" in case or case in {"safetensors", "legacy_handmade_msgpack"}
    assert found.leaves
    assert old or not store.ranges
    assert all(nbytes < 300 for _, nbytes in store.ranges if "agg" not in case and "msgpack" not in case)
