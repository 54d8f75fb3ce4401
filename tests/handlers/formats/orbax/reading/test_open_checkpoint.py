"""Checkpoints that Orbax wrote, of every kind that differs for a reader."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint.experimental import v1 as ocp_v1

from penstock.errors import CorruptCheckpointError
from penstock.handlers import LocalStore, OrbaxLayout
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint
from penstock.handlers.ocdbt.index import Index
from penstock.kernel import KeyKind

pytestmark = pytest.mark.anyio

BIG = np.arange(96 * 40, dtype=np.float32).reshape(96, 40)
SMALL = np.arange(3, dtype=np.int32)
B16 = np.array([[1.5, -2], [3, 4]], ml_dtypes.bfloat16)


def tree() -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    sharding = NamedSharding(mesh, PartitionSpec("x", "y"))  # type: ignore[no-untyped-call]  # jax's
    return {
        "a": {"b16": jnp.asarray(B16), "none": None, "list": [jnp.asarray(SMALL), {}]},
        "big": jax.device_put(BIG, sharding),
        "flag": True,
        "host": BIG.astype(np.float64),
        "int4": jnp.asarray(SMALL, jnp.int4),
        "key": jax.random.key(5),
        "step": 12,
        "text": "hello",
    }


def v0(path: Path, **options: Any) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, ocp.args.PyTreeSave(tree()), custom_metadata={"lr": 0.5})


def v0_manager(path: Path, **items: Any) -> None:
    with ocp.CheckpointManager(path.parent, item_names=tuple(items) or None) as manager:
        saved: Any = ocp.args.Composite(**items) if items else ocp.args.PyTreeSave(tree())
        manager.save(int(path.name), args=saved, custom_metadata={"lr": 0.5})


def v1(path: Path) -> None:
    ocp_v1.save(str(path), tree(), custom_metadata={"lr": 0.5})


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "v0": ("", v0),
    "v0 plain": ("", lambda path: v0(path, use_compression=False)),
    "v0 zarr3": ("", lambda path: v0(path, use_zarr3=True)),
    "v0 zarr3 plain": ("", lambda path: v0(path, use_zarr3=True, use_compression=False)),
    "v0 directories": ("", lambda path: v0(path, use_ocdbt=False)),
    "v0 directories plain": ("", lambda path: v0(path, use_ocdbt=False, use_compression=False)),
    "v0 directories zarr3": ("", lambda path: v0(path, use_ocdbt=False, use_zarr3=True)),
    "v0 manager": ("default", v0_manager),
    "v0 manager, one tree of two items": (
        "train",
        lambda path: v0_manager(path, train=ocp.args.PyTreeSave(tree()), cfg=ocp.args.JsonSave({"a": 1})),
    ),
    "v1": ("state", v1),
}


@pytest.fixture(scope="module", params=WRITERS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OrbaxCheckpoint:
    path = tmp_path_factory.mktemp("root") / "3"
    item, write = WRITERS[request.param]
    write(path)
    found = OrbaxLayout().open(LocalStore(), str(path))
    assert found.path == str(path)
    assert found.directory == str(path / item).rstrip("/")
    return found


def test_leaves_are_listed_in_flatten_order_with_types_shapes_and_dtypes(checkpoint: OrbaxCheckpoint) -> None:
    found = [
        (leaf.info.key_path, leaf.spec.typestr, leaf.spec.shape, leaf.spec.dtype)
        for leaf in checkpoint.leaves
    ]

    assert found == [
        ("['a']['b16']", "jax.Array", (2, 2), "bfloat16"),
        ("['a']['list'][0]", "jax.Array", (3,), "int32"),
        ("['a']['list'][1]", "Dict", None, ""),
        ("['a']['none']", "None", None, ""),
        ("['big']", "jax.Array", (96, 40), "float32"),
        ("['flag']", "scalar", (), "bool"),
        ("['host']", "np.ndarray", (96, 40), "float64"),
        ("['int4']", "jax.Array", (3,), "int4"),
        ("['key']", "jax.Array", (2,), "uint32"),
        ("['step']", "scalar", (), "int64"),
        ("['text']", "string", None, ""),
    ]


def test_the_rest_of_what_is_recorded_is_found(checkpoint: OrbaxCheckpoint) -> None:
    leaves = {leaf.info.name: leaf for leaf in checkpoint.leaves}

    assert leaves["text"].spec.text == "hello"
    assert leaves["key"].spec.extended_dtype == "threefry2x32"
    assert leaves["a.b16"].spec.extended_dtype is None
    assert leaves["big"].spec.chunk_shape == leaves["big"].spec.write_shape == (24, 20)
    assert '"partition_spec": ["x", "y"]' in (leaves["big"].spec.sharding or "")
    assert leaves["host"].spec.sharding is None
    assert leaves["a.list.0"].info.kinds == (KeyKind.MAPPING, KeyKind.MAPPING, KeyKind.SEQUENCE)
    assert leaves["big"].info.directory == checkpoint.directory
    assert checkpoint.custom_metadata == {"lr": 0.5}
    assert (checkpoint.committed_at_ns or 0) > 1_700_000_000 * 10**9
    assert not checkpoint.has_checksums


async def test_whole_arrays_are_read(checkpoint: OrbaxCheckpoint, read_part: Any) -> None:
    expected = {
        "a.b16": B16,
        "a.list.0": SMALL,
        "big": BIG,
        "flag": np.array(True),
        "host": BIG.astype(np.float64),
        "int4": SMALL.astype(ml_dtypes.int4),
        "key": jax.random.key_data(jax.random.key(5)),
        "step": np.array(12),
    }
    arrays = {leaf.info.name: leaf for leaf in checkpoint.leaves if leaf.spec.shape is not None}

    assert arrays.keys() == expected.keys()
    for name, leaf in arrays.items():
        np.testing.assert_array_equal(await read_part(checkpoint, leaf), expected[name])


@pytest.mark.thinned(4)
@pytest.mark.parametrize("piece_bytes", [4, 1000, 1 << 20])
@pytest.mark.parametrize(
    "bounds", [((0, 96), (7, 8)), ((5, 6), (0, 40)), ((23, 49), (19, 21)), ((0, 0), (0, 40))]
)
async def test_parts_that_cross_chunks_are_read(
    bounds: tuple[tuple[int, int], ...], piece_bytes: int, checkpoint: OrbaxCheckpoint, read_part: Any
) -> None:
    (big,) = [leaf for leaf in checkpoint.leaves if leaf.info.name == "big"]

    found = await read_part(checkpoint, big, bounds, piece_bytes)

    np.testing.assert_array_equal(found, BIG[tuple(slice(*bound) for bound in bounds)])


def test_an_item_can_be_opened_by_itself(tmp_path: Path) -> None:
    v1(tmp_path / "ckpt")

    found = OrbaxLayout().open(LocalStore(), str(tmp_path / "ckpt" / "state"))

    assert len(found.leaves) == 11
    assert found.custom_metadata is None


def test_a_bare_leaf_has_the_empty_key_path(tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "ckpt", ocp.args.PyTreeSave(jnp.asarray(SMALL)))

    (leaf,) = OrbaxLayout().open(LocalStore(), str(tmp_path / "ckpt")).leaves

    assert (leaf.info.keys, leaf.info.key_path, leaf.spec.shape) == ((), "", (3,))


def test_a_tree_of_strings_and_empties_has_no_index(tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "ckpt", ocp.args.PyTreeSave({"s": "x", "n": None}))

    found = OrbaxLayout().open(LocalStore(), str(tmp_path / "ckpt"))

    assert [(leaf.info.name, leaf.spec.typestr, leaf.spec.text) for leaf in found.leaves] == [
        ("n", "None", None),
        ("s", "string", "x"),
    ]


async def test_a_damaged_compressed_chunk_names_its_leaf(tmp_path: Path, read_part: Any) -> None:
    v0(tmp_path / "ckpt")
    checkpoint = OrbaxLayout().open(LocalStore(), str(tmp_path / "ckpt"))
    value: Any = checkpoint.index[b"big/0.0"]
    data = bytearray((tmp_path / "ckpt" / value.file).read_bytes())
    data[value.offset : value.offset + value.length] = bytes(value.length)
    (tmp_path / "ckpt" / value.file).write_bytes(data)
    (big,) = [leaf for leaf in checkpoint.leaves if leaf.info.name == "big"]

    with pytest.raises(CorruptCheckpointError, match=r"\(leaf \['big'\]\)"):
        await read_part(checkpoint, big)


async def test_a_missing_compressed_chunk_is_an_error_only_if_all_were_written(
    tmp_path: Path, read_part: Any
) -> None:
    v0(tmp_path / "ckpt")
    checkpoint = OrbaxLayout().open(LocalStore(), str(tmp_path / "ckpt"))
    (big,) = [leaf for leaf in checkpoint.leaves if leaf.info.name == "big"]
    fewer = Index.of({key: value for key, value in checkpoint.index.items() if key != b"big/1.1"})

    with pytest.raises(CorruptCheckpointError, match=r"chunk 'big/1\.1' is missing \(leaf \['big'\]\)"):
        await read_part(replace(checkpoint, index=fewer), big)
    await read_part(replace(checkpoint, index=fewer), big, ((0, 24), (0, 40)))
    await read_part(replace(checkpoint, index=fewer, all_chunks_written=False), big)


@pytest.mark.process
def test_reading_documents_touches_no_jax(tmp_path: Path) -> None:
    v0(tmp_path / "ckpt", use_zarr3=True)
    program = f"""
import subprocess
import sys
from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
from penstock.handlers.stores.local import LocalStore
print(len(OrbaxLayout().open(LocalStore(), {str(tmp_path / "ckpt")!r}).leaves), "jax" in sys.modules)
"""
    source = str(Path(__file__).parents[5] / "src")
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        text=True,
        env={"PYTHONPATH": source},
    )

    assert run.stdout.split() == ["11", "False"]
