"""The handlers of leaves, called directly: what they write, Orbax's read, and the reverse."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.orbax_face.leaf_round_trips import (
    LIBRARIES,
    STORES,
    array_leaves,
    files,
    handlers,
    infos,
    numpy_leaves,
    on,
    read,
    theirs,
    write,
)

from penstock.errors import DeletedLeafError, DuplicateNameError
from penstock.orbax import type_handlers as ours
from penstock.orbax.type_handlers import Store

BOTH = pytest.mark.parametrize("library", list(LIBRARIES))
# Orbax warns that it reads recorded shardings; absl's C++ side of it leaves sockets and loops.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided", "ignore::DeprecationWarning")

P: Any = PartitionSpec


def no_leaked_threads() -> None:
    assert [t.name for t in threading.enumerate() if t.name.startswith("penstock.orbax")] == []


@pytest.mark.thinned(2)
@pytest.mark.parametrize("database", [True, False], ids=["ocdbt", "directories"])
@pytest.mark.parametrize("zarr3", [False, True], ids=["zarr2", "zarr3"])
async def test_both_libraries_write_and_read_the_same(
    database: bool, zarr3: bool, tmp_path: Path, assert_same: Callable[[Any, Any], None]
) -> None:
    for library in LIBRARIES:
        (tmp_path / library).mkdir()
        await write(library, tmp_path / library, database=database, zarr3=zarr3)

    mine, his = files(tmp_path / "penstock"), files(tmp_path / "orbax")
    assert mine.keys() == his.keys()
    for name, content in mine.items():
        if content:
            assert json.loads(content) == json.loads(his[name]), name

    trips = [
        await read(reader, tmp_path / writer, database=database, zarr3=zarr3)
        for writer in LIBRARIES
        for reader in LIBRARIES
    ]
    for values, metadata in trips[:-1]:
        assert_same(values, trips[-1][0])
        for name, found in metadata.items():
            wanted = trips[-1][1][name]
            assert type(found).__name__ == type(wanted).__name__
            assert repr(getattr(found, "storage", None)) == repr(getattr(wanted, "storage", None))
            for field in ("name", "shape", "dtype"):
                assert getattr(found, field, None) == getattr(wanted, field, None), (name, field)

    saved = {name: value for _, values in handlers("penstock") for name, value in values.items()}
    for name, value in trips[0][0].items():
        wanted = saved[name]
        if jnp.issubdtype(getattr(wanted, "dtype", int), jax.dtypes.prng_key):
            value, wanted = jax.random.key_data(value), jax.random.key_data(wanted)
        assert np.array_equal(np.asarray(value), np.asarray(wanted)), name

    no_leaked_threads()


@BOTH
@pytest.mark.parametrize(
    ("args", "chunks"),
    [
        ({}, [1, 12]),
        ({"chunk_byte_size": 12}, [1, 6]),
        ({"shard_axes": (1,)}, [1, 1]),
        ({"dtype": np.dtype(np.int8)}, [1, 12]),
    ],
)
async def test_save_args_cut_and_cast(
    library: str, args: dict[str, Any], chunks: list[int], tmp_path: Path
) -> None:
    module = LIBRARIES[library]
    value = array_leaves()["replicated"]
    leaf = infos(library, tmp_path, ["a"], is_ocdbt_checkpoint=False)
    for future in await module.ArrayHandler().serialize([value], leaf, [module.SaveArgs(**args)]):
        await asyncio.to_thread(future.result)

    form = json.loads((tmp_path / "a" / ".zarray").read_text())
    assert form["chunks"] == chunks
    assert form["dtype"] == ("|i1" if "dtype" in args else "bfloat16")
    (back,) = await ours.ArrayHandler().deserialize(
        infos("penstock", tmp_path, ["a"], is_ocdbt_checkpoint=False),
        [ours.ArrayRestoreArgs(sharding=value.sharding, dtype=np.dtype(np.float32))],
    )
    assert np.array_equal(back, np.asarray(value).astype(args.get("dtype", np.float32)).astype(np.float32))


@BOTH
@pytest.mark.parametrize(
    ("options", "write_shape"),
    [
        ({}, [1, 12]),
        ({"use_replica_parallel": False}, [8, 12]),
        ({"max_replicas_for_replica_parallel": 2}, [4, 12]),
        ({"max_replicas_for_replica_parallel": 1}, [8, 12]),
        ({"min_slice_bytes_for_replica_parallel": 25}, [8, 12]),
        ({"min_slice_bytes_for_replica_parallel": 24}, [1, 12]),
    ],
)
async def test_replicas_share_the_work(
    library: str, options: dict[str, Any], write_shape: list[int], tmp_path: Path
) -> None:
    handler = LIBRARIES[library].ArrayHandler(array_metadata_store=STORES[library](), **options)
    leaf = infos(library, tmp_path, ["a"], is_ocdbt_checkpoint=True)
    for future in await handler.serialize([array_leaves()["replicated"]], leaf):
        await asyncio.to_thread(future.result)

    (entry,) = json.loads((tmp_path / "array_metadatas" / "process_0").read_text())["array_metadatas"]
    assert entry["array_metadata"]["write_shape"] == write_shape


@BOTH
async def test_shardings_need_not_be_recorded(library: str, tmp_path: Path) -> None:
    module = LIBRARIES[library]
    handler = module.ArrayHandler(enable_write_sharding_file=False)
    leaves = infos(library, tmp_path, ["a"], is_ocdbt_checkpoint=False)
    for future in await handler.serialize([jnp.arange(3)], leaves):
        await asyncio.to_thread(future.result)

    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    (metadata,) = await handler.metadata(leaves)
    assert metadata.sharding is None
    with pytest.raises(ValueError, match="harding"):
        await handler.deserialize(leaves, [module.RestoreArgs()])


async def saved_square(directory: Path, **options: Any) -> tuple[Any, list[Any]]:
    """A square of numbers, saved without a database; and where it lies."""
    handler = ours.ArrayHandler(array_metadata_store=Store(), **options)
    leaves = infos("penstock", directory, ["a"], is_ocdbt_checkpoint=False)
    value = on(np.arange(96, dtype=np.float32).reshape(8, 12), (2, 4), "x", "y")
    for future in await handler.serialize([value], leaves):
        await asyncio.to_thread(future.result)

    return value, leaves


@BOTH
@pytest.mark.parametrize("shape", [(8, 12), (4, 12), (8, 16), (12, 8), (16, 24)])
async def test_shapes_are_padded_and_cut_off_if_that_is_asked_for(
    library: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    module = LIBRARIES[library]
    value, _ = await saved_square(tmp_path)
    leaves = infos(library, tmp_path, ["a"], is_ocdbt_checkpoint=False)
    args = module.ArrayRestoreArgs(sharding=value.sharding, global_shape=shape, strict=False)
    (back,) = await module.ArrayHandler().deserialize(leaves, [args])
    wanted = np.zeros(shape, np.float32)
    both = tuple(slice(0, min(a, b)) for a, b in zip(shape, value.shape, strict=True))
    wanted[both] = np.asarray(value)[both]
    assert np.array_equal(back, wanted)
    assert back.sharding == value.sharding

    if shape != value.shape:
        with pytest.raises(ValueError, match="strict"):
            await module.ArrayHandler().deserialize(
                leaves, [module.ArrayRestoreArgs(sharding=value.sharding, shape=shape)]
            )


@BOTH
async def test_shardings_are_asked_for_in_every_way(library: str, tmp_path: Path) -> None:
    module = LIBRARIES[library]
    value, _ = await saved_square(tmp_path)
    leaves = infos(library, tmp_path, ["a"], is_ocdbt_checkpoint=False)
    (metadata,) = await module.ArrayHandler().metadata(leaves)
    mesh = value.sharding.mesh
    asked = {
        "recorded": (module.RestoreArgs(), value.sharding),
        "metadata": (module.ArrayRestoreArgs(sharding=metadata.sharding), value.sharding),
        "mesh": (
            module.ArrayRestoreArgs(mesh=mesh, mesh_axes=P("y"), sharding=value.sharding),
            NamedSharding(mesh, P("y")),
        ),
        "format": (module.ArrayRestoreArgs(sharding=value.format), value.sharding),
        "device": (
            module.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[2])),
            jax.sharding.SingleDeviceSharding(jax.devices()[2]),
        ),
    }
    for name, (args, sharding) in asked.items():
        (back,) = await module.ArrayHandler().deserialize(leaves, [args])
        assert np.array_equal(back, value), name
        assert back.sharding == sharding, name

    with pytest.raises(ValueError, match="ArrayRestoreArgs"):
        await module.ArrayHandler().deserialize(leaves)


@BOTH
async def test_numbers_become_what_is_asked_for(library: str, tmp_path: Path) -> None:
    module = LIBRARIES[library]
    leaves = infos(library, tmp_path, ["i", "f"], is_ocdbt_checkpoint=True)
    handler = module.ScalarHandler()
    for future in await handler.serialize([7, 2.5], leaves):
        await asyncio.to_thread(future.result)

    await module.merge_ocdbt_per_process_files(leaves[0].parent_dir, leaves[0].ts_context, False)
    back = await handler.deserialize(
        leaves, [module.RestoreArgs(restore_type=float), module.RestoreArgs(restore_type=int)]
    )
    assert [(type(value), value) for value in back] == [(float, 7.0), (int, 2)]
    (metadata, _) = await handler.metadata(leaves)
    assert (type(metadata).__name__, metadata.dtype, metadata.shape) == ("ScalarMetadata", np.int64, ())


@BOTH
async def test_an_array_is_no_number(library: str, tmp_path: Path) -> None:
    module = LIBRARIES[library]
    leaves = infos(library, tmp_path, ["a"], is_ocdbt_checkpoint=False)
    for future in await module.NumpyHandler().serialize([np.arange(2)], leaves):
        await asyncio.to_thread(future.result)

    with pytest.raises(ValueError, match=r"scalar|number"):
        await module.ScalarHandler().deserialize(leaves)


@BOTH
async def test_arrays_may_change_once_serialize_returned(library: str, tmp_path: Path) -> None:
    module = LIBRARIES[library]
    leaves = infos(library, tmp_path, ["a"], is_ocdbt_checkpoint=False)
    array = np.arange(100_000.0)
    futures = await module.NumpyHandler().serialize([array], leaves)
    array[:] = -1
    for future in futures:
        await asyncio.to_thread(future.result)

    (back,) = await module.NumpyHandler().deserialize(leaves)
    assert np.array_equal(back, np.arange(100_000.0))


async def test_arrays_may_be_donated_once_serialize_returned(tmp_path: Path) -> None:
    leaves = infos("penstock", tmp_path, ["a"], is_ocdbt_checkpoint=False)
    array = jnp.arange(100_000.0)
    futures = await ours.ArrayHandler().serialize([array], leaves)
    array.delete()
    jnp.full(100_000, 7.0).block_until_ready()
    for future in futures:
        await asyncio.to_thread(future.result)

    (back,) = await ours.ArrayHandler().deserialize(leaves, [ours.RestoreArgs()])
    assert np.array_equal(back, np.arange(100_000.0))


async def test_the_futures_can_be_waited_for_in_the_very_loop(tmp_path: Path) -> None:
    leaves = infos("penstock", tmp_path, ["a"], is_ocdbt_checkpoint=True)
    (future,) = await ours.NumpyHandler().serialize([np.arange(3)], leaves)
    future.result(timeout=30)
    assert (tmp_path / "ocdbt.process_0" / "manifest.ocdbt").exists()


async def test_arrays_that_are_gone_are_refused(tmp_path: Path) -> None:
    leaves = infos("penstock", tmp_path, ["a"], is_ocdbt_checkpoint=True)
    array = jnp.arange(3)
    array.delete()
    with pytest.raises(DeletedLeafError, match=r"^a: "):
        await ours.ArrayHandler().serialize([array], leaves)

    assert list(tmp_path.iterdir()) == []


@BOTH
@pytest.mark.parametrize("value", [np.zeros((0, 3)), jnp.zeros(0)], ids=["numpy", "jax"])
async def test_arrays_without_elements_are_refused(library: str, value: Any, tmp_path: Path) -> None:
    module = LIBRARIES[library]
    handler = module.ArrayHandler() if isinstance(value, jax.Array) else module.NumpyHandler()
    with pytest.raises(ValueError, match=r"zero size|without elements"):
        await handler.serialize([value], infos(library, tmp_path, ["a"], is_ocdbt_checkpoint=True))


@pytest.mark.parametrize("handler", [ours.NumpyHandler(), ours.ScalarHandler(), ours.StringHandler()])
async def test_two_leaves_of_one_name_are_refused(handler: Any, tmp_path: Path) -> None:
    value = {"np.ndarray": np.ones(2), "scalar": 1, "string": "x"}[handler.typestr()]
    leaves = infos("penstock", tmp_path, ["a", "b", "a"], is_ocdbt_checkpoint=True)
    with pytest.raises(DuplicateNameError, match="'a'"):
        await handler.serialize([value] * 3, leaves)

    assert list(tmp_path.iterdir()) == []


async def test_strings_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    for names in (["a", "a/b"], ["a/b", "a"], ["~"]):
        leaves = infos("penstock", tmp_path, names, is_ocdbt_checkpoint=True)
        with pytest.raises(ValueError, match=r"collides|'~'"):
            await ours.StringHandler().serialize(["x"] * len(names), leaves)


async def test_databases_and_directories_are_not_mixed(tmp_path: Path) -> None:
    leaves = [
        *infos("penstock", tmp_path, ["a"], is_ocdbt_checkpoint=True),
        *infos("penstock", tmp_path, ["b"], is_ocdbt_checkpoint=False),
    ]
    with pytest.raises(ValueError, match="is_ocdbt_checkpoint"):
        await ours.NumpyHandler().serialize([np.ones(1)] * 2, leaves)


@BOTH
@pytest.mark.parametrize("database", [True, False], ids=["ocdbt", "directories"])
async def test_what_is_not_there_is_an_error_of_the_same_kind(
    library: str, database: bool, tmp_path: Path
) -> None:
    module = LIBRARIES[library]
    leaves = infos(library, tmp_path, ["a"], is_ocdbt_checkpoint=database)
    kind = ValueError if database else FileNotFoundError
    with pytest.raises(kind):
        await module.NumpyHandler().deserialize(leaves)
    with pytest.raises(kind):
        await module.ArrayHandler().deserialize(
            leaves, [module.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))]
        )
    with pytest.raises(ValueError):  # noqa: PT011  # TensorStore's own text
        await module.StringHandler().deserialize(leaves)


@BOTH
@pytest.mark.parametrize("strict", [True, False])
async def test_a_chunk_that_is_not_there_is_an_error_unless_zeros_will_do(
    library: str, strict: bool, tmp_path: Path
) -> None:
    await saved_square(tmp_path, use_replica_parallel=False)
    module = LIBRARIES[library]
    (tmp_path / "a" / "1.2").unlink()
    leaves = infos(library, tmp_path, ["a"], is_ocdbt_checkpoint=False, raise_array_data_missing_error=strict)
    if strict:
        with pytest.raises(Exception):  # noqa: B017, PT011  # Orbax raises a bare Exception
            await module.ArrayHandler().deserialize(leaves, [module.RestoreArgs()])
        return

    (back,) = await module.ArrayHandler().deserialize(leaves, [module.RestoreArgs()])
    assert (np.asarray(back) == 0).sum() == 13  # a chunk, and the number 0


@BOTH
async def test_one_replica_is_read_for_all(library: str, tmp_path: Path) -> None:
    module = LIBRARIES[library]
    handler = module.SingleReplicaArrayHandler(replica_axis_index=0)
    value = on(np.arange(96, dtype=np.float32).reshape(8, 12), (2, 4), None, "y")
    leaves = infos(library, tmp_path, ["a"], is_ocdbt_checkpoint=False)
    for future in await handler.serialize([value], leaves):
        await asyncio.to_thread(future.result)

    args = module.SingleReplicaArrayRestoreArgs(
        sharding=value.sharding, global_shape=value.shape, dtype=value.dtype
    )
    (back,) = await handler.deserialize(leaves, [args])
    assert np.array_equal(back, value)
    assert back.sharding.is_equivalent_to(value.sharding, 2)


def test_a_dispatcher_and_a_callback_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="dispatcher"):
        ours.ArrayHandler(dispatcher=object())
    with pytest.raises(NotImplementedError, match="events"):
        ours.ArrayHandler(callback=object())


def test_memory_is_told_for_writing_and_reading() -> None:
    assert ours.NumpyHandler().memory_size([np.ones(4), np.ones(2, np.int8)]) == [(32, 32), (2, 2)]
    assert ours.ScalarHandler().memory_size([1, np.float32(2)]) == [(8, 8), (4, 4)]
    assert ours.ArrayHandler().memory_size([jnp.ones(3, jnp.float32)]) == [(12, 12)]
    assert ours.StringHandler().memory_size(["hé"]) == [(3, 3)]


@pytest.mark.parametrize("zarr3", [False, True])
async def test_an_array_without_chunks_is_not_merged(zarr3: bool, tmp_path: Path) -> None:
    leaves = infos("penstock", tmp_path, ["a"], is_ocdbt_checkpoint=True, use_zarr3=zarr3)
    spec = ours.get_json_tspec_write(leaves[0], True, (2,), (2,), np.dtype(np.int32), 0)
    import tensorstore

    tensorstore.open(spec, create=True, open=True, context=leaves[0].ts_context).result()
    with pytest.raises(ValueError, match=r"without a chunk: \['a'\]"):
        await ours.merge_ocdbt_per_process_files(tmp_path, leaves[0].ts_context, zarr3)

    assert not ours.is_ocdbt_checkpoint(tmp_path)
    await ours.merge_ocdbt_per_process_files(tmp_path, leaves[0].ts_context, zarr3, enable_validation=False)
    assert ours.is_ocdbt_checkpoint(tmp_path)


async def test_without_process_directories_nothing_is_merged(tmp_path: Path) -> None:
    await ours.merge_ocdbt_per_process_files(tmp_path, ours.get_ts_context(), False)
    assert list(tmp_path.iterdir()) == []


async def test_a_handler_takes_the_infos_of_orbax(tmp_path: Path) -> None:
    """Duck-typed: who has Orbax's own objects at hand may pass them."""
    leaves = infos("orbax", tmp_path, list(numpy_leaves()), is_ocdbt_checkpoint=False)
    values = list(numpy_leaves().values())
    for future in await ours.NumpyHandler().serialize(values, leaves, [theirs.SaveArgs()] * 3):
        future.result()

    back = await ours.NumpyHandler().deserialize(leaves, [theirs.RestoreArgs()] * 3)
    assert all(np.array_equal(a, b) for a, b in zip(back, values, strict=True))
