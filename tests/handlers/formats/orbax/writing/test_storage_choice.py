"""How a leaf is stored, of what its handler described and what was asked for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import SaveArgs, SaveFormat
from penstock.handlers.formats.codecs.tensorstore_codecs import TOGETHER_BELOW
from penstock.handlers.formats.orbax.storage_choice import CODED_FROM, fitted, replica_shape
from penstock.kernel import LeafSpec, Replicas
from penstock.kernel.codecs import codec_of


def spec_of(
    *shape: int, shard: tuple[int, ...] | None = None, n_replicas: int = 1, dtype: str = "uint8"
) -> LeafSpec:
    part = shape if shard is None else shard
    itemsize = np.dtype(dtype).itemsize
    return LeafSpec("jax.Array", shape, dtype, itemsize, part, part, replicas=Replicas(n_replicas))


def fit(spec: LeafSpec, args: SaveArgs | None = None, coded_chunk: int = 1 << 20, **form: Any) -> LeafSpec:
    return fitted(spec, "['x']", SaveFormat(**form), args, coded_chunk)


def test_default_options_make_no_chunks_and_no_codec() -> None:
    spec = spec_of(100_000)
    assert fit(spec) is spec
    assert fit(spec, SaveArgs()) is spec
    assert fit(spec_of(8), codec="zstd") == spec_of(8)


@pytest.mark.parametrize(("nbytes", "codec"), [(CODED_FROM, "zstd:4"), (CODED_FROM - 1, None)])
def test_small_leaves_have_no_codec(nbytes: int, codec: str | None) -> None:
    assert fit(spec_of(nbytes), codec="zstd:4").codec == codec


@pytest.mark.parametrize(("nbytes", "codec"), [(CODED_FROM, "zstd:4"), (CODED_FROM // 2, None)])
def test_leaves_in_small_shards_have_no_codec(nbytes: int, codec: str | None) -> None:
    assert fit(spec_of(8 * nbytes, shard=(nbytes,)), codec="zstd:4").codec == codec


def test_chunks_with_a_codec_are_of_about_a_size() -> None:
    assert fit(spec_of(8 << 20), codec="zstd").chunk_shape == (1 << 20,)
    assert fit(spec_of(8 << 20), coded_chunk=1 << 21, codec="auto").chunk_shape == (1 << 21,)
    assert fit(spec_of(8 << 20)).chunk_shape == (8 << 20,)


def test_what_was_asked_for_outranks_that_size() -> None:
    size = 4 << 20
    assert fit(spec_of(8 << 20), codec="zstd", chunk_byte_size=size).chunk_shape == (size,)
    assert fit(spec_of(8 << 20), SaveArgs(chunk_byte_size=size), codec="zstd").chunk_shape == (size,)


def test_cut_axes_or_small_files_alone_do_not_make_chunks_too_large_to_be_held() -> None:
    """A chunk with a codec is in memory as a whole, twice."""
    spec = spec_of(2, 8 << 20)
    assert fit(spec, SaveArgs(shard_axes=(0,)), codec="zstd").chunk_shape == (1, 1 << 20)
    assert fit(spec, codec="zstd", ocdbt_target_data_file_size=5 << 20).chunk_nbytes == 1 << 20


@pytest.mark.parametrize(
    ("size", "chunk"), [(100, (5, 20)), (1, (1, 1)), (0, (20, 20)), (400, (20, 20)), (399, (10, 20))]
)
def test_a_chunk_fits_a_data_file(size: int, chunk: tuple[int, ...]) -> None:
    found = fit(spec_of(20, 20), ocdbt_target_data_file_size=size).chunk_shape
    assert math.prod(found) == math.prod(chunk)


def test_data_files_do_not_matter_where_there_are_none() -> None:
    spec = spec_of(20, 20)
    assert fit(spec, ocdbt=False, ocdbt_target_data_file_size=10) is spec


def test_chunks_divide_the_shard_and_not_only_the_array() -> None:
    found = fit(spec_of(64, 64, shard=(32, 64), dtype="float32"), chunk_byte_size=1024)
    assert (found.chunk_shape, found.write_shape) == ((4, 64), (32, 64))


# Replicas


@pytest.mark.parametrize(
    ("shard", "n_replicas", "part"),
    [
        ((4, 12), 4, (1, 12)),
        ((3, 5), 8, None),
        ((7, 8), 8, (7, 1)),
        ((16, 8), 8, (2, 8)),
        ((), 8, None),
        ((0, 8), 8, None),
        ((6, 2), 2, (3, 2)),
    ],
)
def test_the_part_of_a_replica(shard: tuple[int, ...], n_replicas: int, part: tuple[int, ...] | None) -> None:
    assert replica_shape(shard, n_replicas) == part


def test_replicas_write_a_part_each_if_that_is_asked_for_and_worth_it() -> None:
    spec = spec_of(16, 64, n_replicas=4)
    assert fit(spec) is spec
    assert fit(spec, replica_parallel=True) is spec, "parts of 256 bytes are not worth it"

    found = fit(spec, replica_parallel=True, replica_parallel_min_bytes=256)
    assert (found.write_shape, found.chunk_shape) == ((4, 64), (4, 64))
    assert fit(spec, replica_parallel=True, replica_parallel_min_bytes=257) is spec


def test_parts_are_cut_into_chunks_and_weighed_as_they_are_stored() -> None:
    spec = spec_of(16, 64, n_replicas=4)
    form = {"replica_parallel": True, "replica_parallel_min_bytes": 512}
    assert fit(spec, SaveArgs(dtype="float32", chunk_byte_size=256), **form).chunk_shape == (1, 64)
    assert fit(spec, SaveArgs(dtype="float32", chunk_byte_size=256), **form).write_shape == (4, 64)
    assert fit(spec, SaveArgs(chunk_byte_size=256), **form).write_shape == (16, 64)


# Codecs


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def encode(text: str, chunks: list[memoryview]) -> list[bytes]:
    codec = codec_of(text)
    assert codec is not None
    return list(codec.encode(chunks, 1))


@given(
    st.lists(st.sampled_from([1, 2, 100, 4096]), min_size=1, max_size=6),
    st.sampled_from(["zstd:1", "zstd:3", "zstd:22"]),
)
def test_each_chunk_is_a_frame_of_its_own_in_its_place(lengths: list[int], codec: str) -> None:
    chunks = [noise(length, seed) for seed, length in enumerate(lengths)]
    made = encode(codec, [memoryview(chunk) for chunk in chunks])
    assert made == [encode(codec, [memoryview(chunk)])[0] for chunk in chunks]
    assert all(data.startswith(b"\x28\xb5\x2f\xfd") for data in made), "the magic number of zstd"


def test_large_chunks_and_the_fill_value_are_encoded_too() -> None:
    chunks = [bytes(TOGETHER_BELOW), noise(TOGETHER_BELOW + 1), bytes(TOGETHER_BELOW)]
    made = encode("zstd:1", [memoryview(chunk) for chunk in chunks])
    assert made[0] == made[2]
    assert len(made[0]) < 1000 < TOGETHER_BELOW < len(made[1])


def test_the_level_of_a_codec_is_used() -> None:
    text = b"".join(b"%d %d\n" % (n, n * n) for n in range(20_000))
    fast, slow = (len(encode(codec, [memoryview(text)])[0]) for codec in ("zstd:1", "zstd:19"))
    assert slow < 0.9 * fast
