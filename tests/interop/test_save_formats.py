"""Every way to store arrays, read by Orbax 0.12.8 (v0 and v1), by TensorStore and by penstock."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax.checkpoint._src.arrays import subchunking
from orbax.checkpoint.experimental import v1 as ocp_v1

import penstock
from penstock import SaveArgs, SaveFormat
from penstock.handlers.formats.orbax.storage_choice import orbax_chunk_shape, roughly_equal_chunks

Compare = Callable[[Any, Any], None]
ToPlain = Callable[[Any], Any]

pytestmark = [
    # Orbax warns whenever it takes shardings from the file, which is what is tried here.
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning:orbax"),
]

ZARRS: tuple[Literal[2, 3], ...] = (2, 3)
FORMATS: dict[str, SaveFormat] = {
    f"{'ocdbt' if ocdbt else 'directories'} zarr{zarr} {codec}": SaveFormat(ocdbt, zarr, codec)
    for ocdbt, zarr, codec in itertools.product((True, False), ZARRS, ("none", "zstd:3", "auto"))
} | {
    "floats": SaveFormat(codec="floats", chunk_byte_size=5000),
    "floats zarr3 in directories": SaveFormat(ocdbt=False, zarr=3, codec="floats:archive"),
    "chunks": SaveFormat(chunk_byte_size=16),
    "chunks zarr3": SaveFormat(zarr=3, chunk_byte_size=100),
    "chunks zstd": SaveFormat(codec="zstd", chunk_byte_size=2000),
    "chunks in directories": SaveFormat(ocdbt=False, zarr=3, codec="zstd", chunk_byte_size=1500),
    "small files": SaveFormat(ocdbt_target_data_file_size=1000),
    "small files zstd": SaveFormat(codec="zstd", zarr=3, ocdbt_target_data_file_size=1000),
    "one file": SaveFormat(ocdbt_target_data_file_size=0),
}


def v0_pytree(path: Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def v0_standard(path: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def v1(path: Path) -> Any:
    return ocp_v1.load(str(path))


READERS: dict[str, Callable[[Path], Any]] = {
    "v0 PyTree": v0_pytree,
    "v0 Standard": v0_standard,
    "v1 load": v1,
    "penstock": penstock.sync.restore,
}


@pytest.fixture(scope="module")
def mixed_tree(tree: Any) -> Any:
    """The common tree, with arrays that are worth a codec, and no name that is another one's file."""
    noise = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    names = {name: value for name, value in tree["names"].items() if name != "a/b/0"}
    square = jax.tree.map(lambda leaf: leaf, tree["sharded"][0])
    spread = jax.device_put(noise.reshape(16, 384), square.sharding)
    return {**tree, "names": names, "zeros": jnp.zeros((64, 96)), "noise": noise, "spread": spread}


@pytest.fixture(scope="module", params=FORMATS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, mixed_tree: Any) -> Any:
    path = tmp_path_factory.mktemp("formats") / "ckpt"
    with penstock.sync.Checkpointer(save_format=FORMATS[request.param]) as checkpointer:
        checkpointer.save(path, mixed_tree).result()

    return FORMATS[request.param], path


class TestFormats:
    @pytest.mark.thinned(3)
    def test_without_a_target(self, saved: Any, mixed_tree: Any, compare: Compare, to_plain: ToPlain) -> None:
        compare(penstock.sync.restore(saved[1]), to_plain(mixed_tree))

    @pytest.mark.thinned(3)
    def test_with_a_target(self, saved: Any, mixed_tree: Any, compare: Compare) -> None:
        compare(penstock.sync.restore(saved[1], like=mixed_tree), mixed_tree)

    def test_tensorstore_reads_each_array(self, saved: Any, mixed_tree: Any) -> None:
        form, path = saved
        base: Any = {"driver": "file", "path": f"{path}/"}
        for name in ("noise", "zeros", "spread", "zero_d.1"):
            kvstore: Any = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
            if not form.ocdbt:
                kvstore = {"driver": "file", "path": f"{path}/{name}/"}
            driver = "zarr" if form.zarr == 2 else "zarr3"
            array = cast("Any", ts).open({"driver": driver, "kvstore": kvstore}).result()
            expected = mixed_tree["zero_d"][1] if name == "zero_d.1" else mixed_tree[name]
            np.testing.assert_array_equal(array.read().result(), np.asarray(expected))

    def test_what_is_recorded(self, saved: Any) -> None:
        form, path = saved
        recorded = json.loads((path / "_METADATA").read_bytes())
        assert (recorded["use_ocdbt"], recorded["use_zarr3"]) == (form.ocdbt, form.zarr == 3)
        assert (path / "manifest.ocdbt").exists() == form.ocdbt
        if not form.ocdbt:
            metadata = ".zarray" if form.zarr == 2 else "zarr.json"
            documents = {name: (path / name / metadata).read_bytes() for name in ("noise", "zeros")}
            coded = {name: b"zstd" in text or b"blosc" in text for name, text in documents.items()}
            assert coded == dict.fromkeys(documents, form.codec != "none")


@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "directories"])
@pytest.mark.parametrize("zarr", ZARRS)
def test_orbax_reads_every_type_of_element(
    tmp_path: Path, mixed_tree: Any, compare: Compare, to_plain: ToPlain, ocdbt: bool, zarr: Literal[2, 3]
) -> None:
    """And the other formats, with fewer types, in test_matrix.py."""
    with penstock.sync.Checkpointer(save_format=SaveFormat(ocdbt, zarr)) as checkpointer:
        checkpointer.save(tmp_path / "a", mixed_tree).result()
    for name in ("v0 PyTree", "v0 Standard", "v1 load"):
        compare(READERS[name](tmp_path / "a"), to_plain(mixed_tree))


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 4)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4, 8]),
    st.one_of(st.none(), st.integers(8, 5000)),
    st.sets(st.integers(0, 3), max_size=2),
)
def test_chunks_are_those_orbax_would_choose(
    axes: list[tuple[int, int]], itemsize: int, size: int | None, shard_axes: set[int]
) -> None:
    shape = tuple(part * count for part, count in axes)
    write_shape = tuple(part for part, _ in axes)
    cut = tuple(sorted(axis for axis in shard_axes if axis < len(axes)))
    theirs = subchunking.choose_chunk_shape(
        shape, write_shape, np.dtype(f"V{itemsize}"), size, shard_axes=cut
    )
    assert orbax_chunk_shape(shape, write_shape, itemsize, size, cut) == theirs


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=3), st.sampled_from([1, 4]), st.integers(64, 10**6)
)
def test_rough_chunks_divide_the_shard_and_are_near_to_their_size(
    shape: list[int], itemsize: int, size: int
) -> None:
    chunk = roughly_equal_chunks(shape, itemsize, size)
    assert all(whole % part == 0 for whole, part in zip(shape, chunk, strict=True))
    nbytes = int(np.prod(chunk)) * itemsize
    assert chunk == tuple(shape) or nbytes >= size // 16 - itemsize


class TestSaveArgs:
    def test_the_stored_dtype(self, tmp_path: Path, compare: Compare) -> None:
        value = np.random.default_rng(1).standard_normal((7, 5)).astype(np.float32)
        tree = {
            "a": jnp.asarray(value),
            "b": [value, 2.7, np.float32(1.5)],
            "c": jnp.asarray(value),
            "s": "x",
        }
        asked = {"a": SaveArgs(dtype=jnp.bfloat16), "b": SaveArgs(dtype="int16"), "c": None}
        penstock.sync.save(tmp_path / "a", tree, save_args=asked)
        expected = {
            "a": jnp.asarray(value, jnp.bfloat16),
            "b": [value.astype(np.int16), 2, 1],
            "c": tree["c"],
            "s": "x",
        }
        for reader in ("v0 PyTree", "v1 load", "penstock"):
            compare(READERS[reader](tmp_path / "a"), expected)

    @pytest.mark.parametrize(
        "to", ["bfloat16", "float16", "int8", "uint8", "int4", "float64", "float8_e4m3fn"]
    )
    def test_casts_are_those_of_tensorstore(self, tmp_path: Path, to: str) -> None:
        value = np.array([0.0, 0.49, 1.5, 2.5, -3.7, 6.9, -0.0, 1e-3], np.float32)
        if to == "uint8":
            value = np.abs(value)
        penstock.sync.save(tmp_path / "a", {"x": value}, save_args=SaveArgs(dtype=to))
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            args = {"x": ocp.SaveArgs(dtype=jnp.dtype(to))}
            checkpointer.save(tmp_path / "b", args=ocp.args.PyTreeSave({"x": value}, save_args=args))
        ours, theirs = penstock.sync.restore(tmp_path / "a")["x"], penstock.sync.restore(tmp_path / "b")["x"]
        assert ours.dtype == theirs.dtype
        # Two patterns of one int4 differ in bits that mean nothing.
        bits = [array.astype(np.int32) if to == "int4" else array for array in (ours, theirs)]
        assert bits[0].tobytes() == bits[1].tobytes()

    @pytest.mark.parametrize("codec", ["none", "zstd"])
    def test_axes_and_sizes_by_key_path(
        self, tmp_path: Path, tree: Any, compare: Compare, to_plain: ToPlain, codec: str
    ) -> None:
        def asked(keys: tuple[str, ...]) -> SaveArgs | None:
            match keys[0]:
                case "sharded":
                    return SaveArgs(chunk_byte_size=20, shard_axes=(1,))
                case "host":
                    return SaveArgs(shard_axes=(0, 2))
                case _:
                    return None

        with penstock.sync.Checkpointer(save_format=SaveFormat(codec=codec)) as checkpointer:
            checkpointer.save(tmp_path / "a", tree, save_args=asked).result()
            found = {leaf.name: leaf.chunk_shape for leaf in checkpointer.metadata(tmp_path / "a").leaves}
        assert found["host.int8"] == (1, 3, 1)
        assert found["sharded.6"] == (4, 1)
        for reader in ("v0 PyTree", "v1 load", "penstock"):
            compare(READERS[reader](tmp_path / "a"), to_plain(tree))
