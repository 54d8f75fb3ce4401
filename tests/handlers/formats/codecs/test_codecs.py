"""Codecs of other distributions: one file and an entry point of the group `penstock.codecs`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import penstock
from penstock import SaveFormat
from penstock.errors import ConfigError, CorruptCheckpointError
from penstock.handlers import OrbaxLayout
from penstock.handlers.formats.codecs import blosc
from penstock.handlers.formats.codecs.tensorstore_codecs import encode_with_tensorstore
from penstock.handlers.formats.orbax import storage_choice
from penstock.handlers.formats.orbax.tensorstore_reads import decode_into
from penstock.handlers.formats.region_reads import StoredChunk
from penstock.handlers.formats.zarr import decode, encode_v2
from penstock.handlers.leaves.blocks import HostRegion
from penstock.kernel import LeafSpec
from penstock.kernel.codecs import codec_of

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "docs" / "examples" / "plugin"

Array = np.ndarray[Any, np.dtype[Any]]

# A codec that TensorStore lacks and numcodecs has.
LZMA = """
import lzma
from dataclasses import dataclass

@dataclass(frozen=True)
class Lzma:
    preset: int = 1
    in_tensorstore = False

    @property
    def text(self):
        return f"lzma:{self.preset}"

    def zarr2(self, itemsize):
        return {"format": 1, "check": -1, "preset": self.preset, "filters": None}

    def zarr3(self, itemsize):
        return {"preset": self.preset}

    def encode(self, chunks, itemsize):
        return [lzma.compress(chunk, preset=self.preset) for chunk in chunks]

    def decode(self, stored, memory):
        memory[:] = lzma.decompress(stored)

class Kind:
    usage = "lzma:<0 to 9>"

    def parse(self, options):
        return Lzma(int(options or 1))

    def from_zarr(self, options):
        return Lzma(options["preset"])

LZMA = Kind()
"""


def install(folder: Path, distribution: str, points: dict[str, str]) -> None:
    info = folder / f"{distribution}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    lines = [f"{name} = {place}" for name, place in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[penstock.codecs]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path` with a codec that TensorStore lacks, beside the example's with one it has."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "lzma_code.py").write_text(LZMA)
    install(folder, "small", {"lzma": "lzma_code:LZMA"})
    install(folder, "penstock-example", {"gzip": "penstock_example.gzip:GZIP"})
    monkeypatch.syspath_prepend(folder)
    monkeypatch.syspath_prepend(EXAMPLE / "src")
    yield folder
    for module in ("lzma_code", "penstock_example", "penstock_example.gzip"):
        sys.modules.pop(module, None)


@pytest.fixture(params=["numcodecs", "TensorStore"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Blosc as one of the two does it."""
    blosc.numcodecs_blosc.cache_clear()
    if request.param == "TensorStore":
        monkeypatch.setitem(sys.modules, "numcodecs.blosc", None)  # as if it were not installed
    else:
        pytest.importorskip("numcodecs.blosc")
    yield request.param
    blosc.numcodecs_blosc.cache_clear()


def weights() -> dict[str, Array]:
    """Numbers that vary little, of several widths."""
    steps = np.arange(40_000)
    return {
        "a": (1 + steps % 7 / 1000).astype(np.float32).reshape(200, 200),
        "b": (1j * steps).astype(np.complex128),
        "c": (steps % 11).astype(np.int8),
        "d": np.linspace(0, 1, 40_000).astype(np.float16),
    }


def save(path: Path, form: SaveFormat) -> dict[str, Array]:
    tree = weights()
    with penstock.sync.Checkpointer(layout=OrbaxLayout(form)) as checkpointer:
        checkpointer.save(path, tree).result()

    return tree


def check(found: Any, tree: dict[str, Array]) -> None:
    assert found.keys() == tree.keys()
    for name, value in tree.items():
        np.testing.assert_array_equal(np.asarray(found[name]), value)


@pytest.mark.thinned(3)
@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("zarr", [2, 3])
@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("codec", ["blosc", "blosc:zstd:3:shuffle", "floats:archive", "gzip:9", "lzma:2"])
def test_a_leaf_saved_with_a_codec_is_restored(tmp_path: Path, codec: str, ocdbt: bool, zarr: Any) -> None:
    tree = save(tmp_path / "a", SaveFormat(ocdbt, zarr, codec, 20_000))

    with penstock.sync.Checkpointer() as checkpointer:
        check(checkpointer.restore(tmp_path / "a"), tree)
        like = {name: np.empty_like(value) for name, value in tree.items()}
        check(checkpointer.restore(tmp_path / "a", like=like), tree)


DTYPES = [
    "bool", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip


@pytest.mark.thinned(2)
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("zarr", [2, 3])
@pytest.mark.parametrize("codec", ["floats", "floats:archive"])
def test_orbax_restores_every_dtype_bit_for_bit(tmp_path: Path, codec: str, zarr: Any) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    normal = np.random.default_rng(0).standard_normal(40_000) * 3
    tree: dict[str, Any] = {dtype: normal.astype(jax.numpy.dtype(dtype)) for dtype in DTYPES}
    with penstock.sync.Checkpointer(layout=OrbaxLayout(SaveFormat(True, zarr, codec))) as checkpointer:
        checkpointer.save(tmp_path / "a", tree).result()

    found = ocp.PyTreeCheckpointer().restore(str(tmp_path / "a"))

    for dtype, value in tree.items():
        restored = np.asarray(found[dtype])
        assert restored.dtype == value.dtype
        assert restored.tobytes() == value.tobytes(), dtype


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("zarr", [2, 3])
def test_chunks_are_restored_in_part_and_onto_other_shardings(tmp_path: Path, zarr: Any) -> None:
    numbers = np.arange(240 * 64, dtype=np.float32).reshape(240, 64)
    layout = OrbaxLayout(SaveFormat(True, zarr, "floats", 25_000))
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    with penstock.sync.Checkpointer(layout=layout) as checkpointer:
        checkpointer.save(tmp_path / "a", {"a": numbers}).result()
        for axes in [("x", "y"), ("y",), (None, "y"), ()]:
            spec = PartitionSpec(*axes)  # type: ignore[no-untyped-call]  # jax's
            placed = jax.device_put(numbers, NamedSharding(mesh, spec))
            np.testing.assert_array_equal(
                checkpointer.restore(tmp_path / "a", like={"a": placed})["a"], numbers
            )


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("text", ["floats", "floats:archive", "blosc:zlib:1:noshuffle"])
def test_each_library_decodes_what_the_other_encoded(text: str, itemsize: int) -> None:
    pytest.importorskip("numcodecs.blosc")
    codec = codec_of(text)
    assert codec is not None
    data = np.random.default_rng(0).normal(size=4800).astype(np.float16).tobytes()
    compressor = {"id": "blosc", **codec.zarr2(min(itemsize, 8))}

    (ours,) = codec.encode([memoryview(data)], itemsize)
    (others,) = encode_with_tensorstore(compressor, [memoryview(data)], min(itemsize, 8))

    for made in (ours, others):
        memory = bytearray(len(data))
        codec.decode(memoryview(made), memoryview(memory))
        assert memory == data
        region = HostRegion(((0, len(data)),), np.dtype(np.uint8))
        form = decode(".zarray", encode_v2((len(data),), "uint8", (len(data),), text))
        chunk = StoredChunk("", 0, (0,), (len(data),), 1)
        decode_into(form, chunk, region, "", memoryview(made))
        assert bytes(region.view()) == data


@pytest.mark.parametrize(("place", "change"), [(4, 1), (4, -1), (7, 1), (12, 1), (12, -1), (15, 1)], ids=str)
def test_a_frame_with_a_wrong_length_is_refused_before_it_is_read(place: int, change: int) -> None:
    pytest.importorskip("numcodecs.blosc")
    codec = codec_of("floats")
    assert codec is not None
    (made,) = codec.encode([memoryview(bytes(1000))], 4)
    frame = bytearray(made)
    frame[place] = (frame[place] + change) % 256
    memory = bytearray(1000)

    for damaged in (frame, made[:15], made[:-1], made + b" "):
        with pytest.raises(ValueError, match=r"frame"):
            codec.decode(memoryview(damaged), memoryview(memory))
    assert memory == bytes(1000)


def test_a_level_for_archives_comes_near_the_entropy_of_bfloat16() -> None:
    weights = (np.random.default_rng(0).standard_normal(1 << 21) * 0.02).astype(ml_dtypes.bfloat16)
    halves = weights.view(np.uint8).reshape(-1, 2).T
    bits = sum(entropy(half) for half in halves)

    length = {codec: len(encoded(codec, weights)) for codec in ("zstd:1", "floats", "floats:archive")}

    assert length["floats:archive"] < 1.05 * len(weights) * bits / 8
    assert length["floats:archive"] < length["floats"] < length["zstd:1"]


def entropy(values: Array) -> float:
    """Bits of a byte, by the frequencies of its values."""
    counts = np.bincount(values, minlength=256)
    shares = counts[counts > 0] / len(values)
    return float(-(shares * np.log2(shares)).sum())


def encoded(text: str, values: Array) -> bytes:
    codec = codec_of(text)
    assert codec is not None
    (made,) = codec.encode([values.view(np.uint8).data], values.itemsize)
    return made


def test_a_chunk_is_never_longer_than_blosc_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_choice, "MOST_CODED", 100_000)
    spec = LeafSpec("np.ndarray", (1000, 1000), "float32", 4, (1000, 1000))

    found = storage_choice.fitted(spec, "['a']", SaveFormat(codec="floats", chunk_byte_size=2**40), None)

    assert found.chunk_nbytes <= 100_000
    assert found.codec == "blosc:lz4:9:bitshuffle:131072"


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("zarr", [2, 3])
@pytest.mark.parametrize("ocdbt", [True, False])
def test_orbax_reads_a_codec_that_tensorstore_has(tmp_path: Path, ocdbt: bool, zarr: Any) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    tree = save(tmp_path / "a", SaveFormat(ocdbt, zarr, "blosc:lz4:5:bitshuffle", 20_000))

    check(ocp.PyTreeCheckpointer().restore(str(tmp_path / "a")), tree)


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("version", "codec"),
    [(2, "floats"), (3, "floats"), (2, "floats:archive"), (3, "floats:archive"), (2, "gzip"), (2, "lzma:1")],
)
def test_zarr_reads_what_a_codec_of_penstock_wrote(tmp_path: Path, version: Any, codec: str) -> None:
    zarr = pytest.importorskip("zarr")
    tree = save(tmp_path / "a", SaveFormat(False, version, codec, 20_000))

    for name, value in tree.items():
        array = zarr.open_array(str(tmp_path / "a" / name), mode="r")
        np.testing.assert_array_equal(array[...], value)


@pytest.mark.usefixtures("site")
def test_the_metadata_says_what_was_asked_for(tmp_path: Path) -> None:
    save(tmp_path / "two", SaveFormat(False, 2, "blosc:lz4hc:9:bitshuffle"))
    save(tmp_path / "three", SaveFormat(False, 3, "blosc:lz4hc:9:bitshuffle"))

    two = json.loads((tmp_path / "two" / "a" / ".zarray").read_text())["compressor"]
    assert two == {"id": "blosc", "cname": "lz4hc", "clevel": 9, "shuffle": 2, "blocksize": 0}
    three = json.loads((tmp_path / "three" / "d" / "zarr.json").read_text())["codecs"][-1]
    assert three["name"] == "blosc"
    assert three["configuration"]["shuffle"] == "bitshuffle"
    assert three["configuration"]["typesize"] == 2


@pytest.mark.usefixtures("site")
def test_shuffled_bits_take_less_room_than_zstd_alone(tmp_path: Path) -> None:
    save(tmp_path / "blosc", SaveFormat(codec="blosc:zstd:1:bitshuffle"))
    save(tmp_path / "zstd", SaveFormat(codec="zstd:1"))

    def size(path: Path) -> int:
        return sum(file.stat().st_size for file in path.rglob("d/*"))

    assert size(tmp_path / "blosc") < size(tmp_path / "zstd")


@pytest.mark.thinned(2)
@pytest.mark.usefixtures("site", "library")
@pytest.mark.parametrize("codec", ["floats", "floats:archive", "zstd", "lzma"])
def test_a_damaged_chunk_is_an_error_that_names_the_leaf(tmp_path: Path, codec: str) -> None:
    save(tmp_path / "a", SaveFormat(False, 2, codec))
    chunk = tmp_path / "a" / "a" / "0.0"
    chunk.write_bytes(bytes(chunk.stat().st_size))

    with penstock.sync.Checkpointer() as checkpointer, pytest.raises(CorruptCheckpointError) as caught:
        checkpointer.restore(tmp_path / "a")
    assert caught.value.key_path == "['a']"


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    "codec",
    ["blosc:lz4", "blosc:lz5:1:shuffle", "blosc:lz4:10:shuffle", "blosc:", "lz5", "floats:fast", "floats:"],
)
def test_unknown_options_of_a_codec_are_refused_with_the_known_ones(codec: str) -> None:
    with pytest.raises(
        ConfigError, match=r"codec: must be .*'blosc:<compressor>.* or 'zstd:<1 to 22>' or 'gzip"
    ):
        SaveFormat(codec=codec)


def test_two_distributions_that_claim_a_codec_are_both_named(site: Path) -> None:
    install(site, "other", {"lzma": "lzma_code:LZMA"})

    with pytest.raises(ConfigError, match=r"'lzma' is claimed by other 1\.2 and small 1\.2"):
        SaveFormat(codec="lzma")


def test_a_broken_codec_is_named_and_no_hindrance_to_others(site: Path) -> None:
    install(site, "broken", {"lost": "no_such_module:LOST"})

    with pytest.raises(ConfigError, match=r"entry point 'lost' of broken 1\.2 is broken"):
        SaveFormat(codec="lost")
    with pytest.raises(ConfigError, match=r"or 'lost'"):
        SaveFormat(codec="lz5")
    assert SaveFormat(codec="lzma").leaf_codec == "lzma:1"


def test_nothing_is_imported_for_a_codec_that_is_not_asked_for(site: Path) -> None:
    assert SaveFormat(codec="zstd").leaf_codec == "zstd:1"
    assert "lzma_code" not in sys.modules
    assert "penstock_example.gzip" not in sys.modules
