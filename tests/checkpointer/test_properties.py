"""Any tree comes back from a restore as it was saved."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from hypothesis.strategies import SearchStrategy

import penstock
from penstock import Checkpointer, SaveFormat
from penstock.errors import InvalidLeafError

AssertSame = Callable[[Any, Any], None]

DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16", "int2", "int4"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
IN_JAX = tuple(name for name in DTYPES if name not in {"int64", "uint64", "float64", "complex128"})
FEWER_BITS = {"int2": 2, "int4": 4, "float4_e2m1fn": 4}

SHAPES = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7)


@st.composite
def host_arrays(draw: st.DrawFn, names: tuple[str, ...] = DTYPES) -> Any:
    """Draw an array of random bits, with NaNs of any payload, in any memory order."""
    name = draw(st.sampled_from(names))
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    shape = draw(SHAPES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if name == "bool":
        bits &= 1
    elif name in FEWER_BITS:
        array = rng.integers(0, 2 ** FEWER_BITS[name], shape).astype(np.uint8)
        return _narrow(array, name, dtype)

    array = bits.view(dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


def _narrow(codes: Any, name: str, dtype: Any) -> Any:
    if name == "float4_e2m1fn":
        return codes.view(dtype)

    half = 2 ** (FEWER_BITS[name] - 1)
    return np.asarray(codes.astype(np.int8) - half).astype(dtype)  # arithmetic makes 0-d arrays scalars


def on_device(array: Any) -> Any:
    return jnp.asarray(np.ascontiguousarray(array).reshape(array.shape))


KEYS = st.builds(
    lambda seed, impl, n: jax.random.split(jax.random.key(seed, impl=impl), n),
    st.integers(0, 2**31),
    st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"]),
    st.integers(1, 3),
)
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.complex_numbers(),
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
LEAVES = st.one_of(
    host_arrays(),
    host_arrays(IN_JAX).map(on_device),
    KEYS,
    SCALARS,
    TEXT,
    st.sampled_from([None, {}, [], ()]),
)
# Exclude what can make two names equal: '.' joins keys; in names of strings, '/' nests and '~' escapes.
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="./~"), max_size=6)


def containers(children: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(NAMES, children, max_size=4),
        st.lists(children, max_size=4),
        st.lists(children, max_size=3).map(tuple),
    )


TREES = st.recursive(LEAVES, containers, max_leaves=12)
FORMATS = st.builds(
    SaveFormat,
    ocdbt=st.booleans(),
    zarr=st.sampled_from([2, 3]),
    codec=st.sampled_from(["none", "zstd", "auto"]),
    chunk_byte_size=st.none() | st.integers(4000, 20_000),
    ocdbt_target_data_file_size=st.none() | st.integers(0, 300),
)
# Arrays from 16 KiB on may have a codec.
LARGE = st.builds(
    lambda seed, top: np.random.default_rng(seed).integers(0, top, (60, 70)),
    st.integers(0, 9),
    st.sampled_from([1, 2**40]),
)


def plain(tree: Any) -> Any:
    """Convert a tree as a restore without a target does: non-empty tuples become lists."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and tree:
        return [plain(value) for value in tree]

    return tree


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("backend", "n"),
    [
        ("asyncio", 20),
        pytest.param("asyncio", 60, marks=pytest.mark.slow),
        pytest.param("trio", 60, marks=pytest.mark.slow),
    ],
)
def test_what_comes_back_is_what_went_in(backend: str, n: int, folder: Path, assert_same: AssertSame) -> None:
    @settings(max_examples=n, suppress_health_check=[HealthCheck.too_slow])
    @given(tree=TREES, budget=st.sampled_from(["1KiB", "1MiB"]))
    def check(tree: Any, budget: str) -> None:
        async def trip() -> None:
            async with Checkpointer(memory_limit=budget) as checkpointer:
                report = await (await checkpointer.save(path, tree))
                assert_same(await checkpointer.restore(path), plain(tree))
                assert_same(await checkpointer.restore(path, like=tree), tree)
                assert checkpointer.statistics().leased == 0
                described = await checkpointer.metadata(path)
                assert len(described.leaves) == report.n_leaves
                assert described.nbytes == report.nbytes

        path = Path(tempfile.mkdtemp(dir=folder)) / "a"
        try:
            anyio.run(trip, backend=backend)
        finally:
            shutil.rmtree(path.parent)

    folder.mkdir()
    check()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("n", [10, pytest.param(30, marks=pytest.mark.slow)])
def test_whatever_the_format(n: int, folder: Path, assert_same: AssertSame) -> None:
    @settings(max_examples=n, suppress_health_check=[HealthCheck.too_slow])
    @given(tree=TREES, large=LARGE, form=FORMATS)
    def check(tree: Any, large: Any, form: SaveFormat) -> None:
        both = {"tree": tree, "large array": large}
        path = Path(tempfile.mkdtemp(dir=folder)) / "a"
        with penstock.sync.Checkpointer(memory_limit="1MiB", save_format=form) as checkpointer:
            try:
                report = checkpointer.save(path, both).result()
            except InvalidLeafError:
                assert not form.ocdbt  # some names are not valid for a directory
                reject()
            assert_same(checkpointer.restore(path), plain(both))
            assert_same(checkpointer.restore(path, like=both), both)
            assert checkpointer.metadata(path).stored_nbytes == report.nbytes
        shutil.rmtree(path.parent)

    folder.mkdir()
    check()
