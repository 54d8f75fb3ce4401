"""What `metadata` reports about how leaves are stored."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from tests.unsealed import unseal

import penstock
from penstock import SaveFormat
from penstock.handlers import Composite
from penstock.handlers.formats.orbax.stored_checkpoint import codec_of
from penstock.handlers.formats.zarr import decode, encode_v2, encode_v3
from penstock.items import Array, Json, RandomKey

_ts: Any = ts
NOISE = np.random.default_rng(0).integers(0, 2**32, (64, 96), np.uint32)  # of which no codec leaves less


def save(path: Path, tree: Any, **form: Any) -> Any:
    with penstock.sync.Checkpointer(save_format=SaveFormat(**form)) as checkpointer:
        checkpointer.save(path, tree).result()
        return checkpointer.metadata(path)


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("zarr", [2, 3])
def test_codecs_and_the_bytes_that_chunks_take(tmp_path: Path, ocdbt: bool, zarr: int) -> None:
    tree = {"big": np.zeros((64, 96)), "noise": NOISE, "small": jnp.ones(3), "s": "text", "none": None}
    found = save(tmp_path / "a", tree, ocdbt=ocdbt, zarr=zarr, codec="auto", chunk_byte_size=9000)

    big, noise, small = (found.tree[name] for name in ("big", "noise", "small"))
    assert (big.codec, noise.codec, small.codec) == ("zstd:1", None, None)
    assert noise.stored_nbytes == noise.nbytes == NOISE.nbytes
    assert 0 < big.stored_nbytes < big.nbytes == 64 * 96 * 8
    assert (found.tree["s"].codec, found.tree["s"].stored_nbytes) == (None, 0)
    assert found.stored_nbytes == big.stored_nbytes + noise.stored_nbytes + small.nbytes
    if not ocdbt:
        files = [file for file in (tmp_path / "a" / "big").rglob("*") if file.is_file()]
        chunks = [file.stat().st_size for file in files if file.name not in (".zarray", "zarr.json")]
        assert (sum(chunks), len(chunks)) == (big.stored_nbytes, 64 * 96 * 8 // np.prod(big.chunk_shape) // 8)


def test_the_description_has_the_time_of_the_save(tmp_path: Path) -> None:
    before = time.time_ns()
    found = save(tmp_path / "a", {"a": 1})
    assert before <= found.started_at_ns <= found.committed_at_ns <= time.time_ns()


def test_items_of_every_kind_are_described(tmp_path: Path) -> None:
    items = Composite(
        array=Array(NOISE), json=Json({"a": [1, "x"]}), key=RandomKey(jax.random.key(0)), tree={"a": NOISE}
    )
    penstock.sync.save(tmp_path / "a", items)

    described = {name: penstock.sync.metadata(tmp_path / "a", item=name) for name in items}
    assert {name: found.stored_nbytes for name, found in described.items()} == {
        "array": NOISE.nbytes,
        "json": 8,
        "key": 8,
        "tree": NOISE.nbytes,
    }
    assert all(found.started_at_ns is not None for found in described.values())


def test_safetensors_are_described(tmp_path: Path) -> None:
    penstock.sync.export_safetensors({"a": NOISE, "s": "text"}, tmp_path / "a.safetensors")
    found = penstock.sync.metadata(tmp_path / "a.safetensors")
    assert (found.stored_nbytes, found.started_at_ns, found.leaves[0].codec) == (NOISE.nbytes, None, None)


def test_a_description_needs_neither_the_devices_nor_the_data(tmp_path: Path) -> None:
    """A sharding is reported as it was recorded, whatever the local devices. No data file is opened."""
    found = save(tmp_path / "a", {"a": jax.device_put(NOISE, jax.devices()[3])})
    assert found.tree["a"].sharding == {"sharding_type": "SingleDeviceSharding", "device_str": "cpu:3"}

    unseal(tmp_path / "a")
    text = (tmp_path / "a" / "_sharding").read_text().replace("cpu:3", "TPU_7(process=1,(0,0,0,0))")
    (tmp_path / "a" / "_sharding").write_text(text)
    assert "TPU_7" in penstock.sync.metadata(tmp_path / "a").tree["a"].sharding["device_str"]


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CHAINS: list[tuple[list[Any], str | None]] = [
    ([LITTLE], None),
    ([{"name": "bytes", "configuration": {"endian": "big"}}], None),
    ([LITTLE, {"name": "zstd", "configuration": {"level": 3}}], "zstd:3"),
    ([LITTLE, {"name": "gzip", "configuration": {"level": 5}}, {"name": "crc32c"}], "gzip:5+crc32c"),
    (
        [LITTLE, {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 4, "shuffle": "shuffle"}}],
        "blosc:lz4:4",
    ),
    ([{"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE], "transpose"),
    (
        [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [2, 2],
                    "codecs": [LITTLE, {"name": "zstd", "configuration": {"level": 1}}],
                    "index_codecs": [LITTLE, {"name": "crc32c"}],
                },
            }
        ],
        "zstd:1",
    ),
]


@pytest.mark.parametrize(("codecs", "text"), CHAINS)
def test_chains_of_zarr_v3(tmp_path: Path, codecs: list[Any], text: str | None) -> None:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/"},
        "metadata": {"data_type": "float32", "shape": [4, 4], "codecs": codecs},
        "create": True,
    }
    _ts.open(spec).result()
    assert codec_of(decode("zarr.json", (tmp_path / "zarr.json").read_bytes())) == text


@pytest.mark.parametrize(
    ("compressor", "filters", "text"),
    [
        (None, None, None),
        ({"id": "zstd", "level": 2}, None, "zstd:2"),
        ({"id": "blosc", "cname": "zstd", "clevel": 9, "shuffle": 1}, [], "blosc:zstd:9"),
        ({"id": "zlib", "level": 6}, [{"id": "shuffle", "elementsize": 4}], "shuffle+zlib:6"),
        ({"id": "bz2", "level": [1]}, None, "bz2"),
        ("zstd", 3, None),
    ],
)
def test_compressors_of_zarr_v2(compressor: Any, filters: Any, text: str | None) -> None:
    document = dict(decode(".zarray", encode_v2((4,), "float32", (4,))).metadata)
    assert codec_of(decode_v2({**document, "compressor": compressor, "filters": filters})) == text


def decode_v2(document: dict[str, Any]) -> Any:
    return decode(".zarray", json.dumps(document).encode())


def test_what_is_written_is_told_as_it_was_asked_for() -> None:
    assert codec_of(decode(".zarray", encode_v2((4,), "float32", (4,), "zstd:7"))) == "zstd:7"
    assert codec_of(decode("zarr.json", encode_v3((4,), "float32", (4,), "zstd:7"))) == "zstd:7"


def test_a_grid_larger_than_the_index_is_not_walked(tmp_path: Path) -> None:
    """A document may declare more chunks than could ever be counted."""
    save(tmp_path / "a", {"a": NOISE, "b": np.ones(4)}, ocdbt=False)
    unseal(tmp_path / "a")
    file = tmp_path / "a" / "a" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shape": [2**36, 2**8], "chunks": [1, 1]}))

    (leaf, _) = penstock.sync.metadata(tmp_path / "a").leaves
    assert leaf.stored_nbytes == NOISE.nbytes  # the only chunk file that exists
