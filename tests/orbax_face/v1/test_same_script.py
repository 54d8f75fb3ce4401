"""What a script sees, and what it leaves on disk, is the same with both libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as _orbax_v1
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock.orbax.v1 as penstock_v1

orbax_v1: Any = _orbax_v1  # it has no types

# Orbax warns of shardings that it reads from files, and forgets coroutines when it fails.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
Same = Callable[[Any, Any], None]


def test_a_tree_comes_back_as_it_was_saved(ocp: Any, tree: Any, same: Same, tmp_path: Path) -> None:
    assert ocp.save(tmp_path / "a", tree) is None

    same(ocp.load(tmp_path / "a"), tree)
    same(ocp.load(tmp_path / "a", tree), tree)


def test_each_library_reads_a_tree_that_the_other_wrote(
    writer_and_reader: Any, tree: Any, same: Same, tmp_path: Path
) -> None:
    writer, reader = writer_and_reader
    writer.save(tmp_path / "a", tree, custom_metadata={"note": [1, 2]})

    same(reader.load(tmp_path / "a"), tree)
    same(reader.load(tmp_path / "a", tree), tree)
    assert reader.metadata(tmp_path / "a").custom_metadata == {"note": [1, 2]}
    assert reader.is_orbax_checkpoint(tmp_path / "a")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("zarr3", [True, False])
@pytest.mark.parametrize("compression", [True, False])
def test_each_library_reads_each_format_of_the_other(
    writer_and_reader: Any, ocdbt: bool, zarr3: bool, compression: bool, tree: Any, same: Same, tmp_path: Path
) -> None:
    writer, reader = writer_and_reader
    context = writer.Context()
    context.array.saving.use_ocdbt = ocdbt
    context.array.saving.use_zarr3 = zarr3
    context.array.saving.use_compression = compression
    with context:
        writer.save(tmp_path / "a", tree)

    same(reader.load(tmp_path / "a"), tree)
    recorded = json.loads((tmp_path / "a" / "state" / "_METADATA").read_text())
    assert (recorded["use_ocdbt"], recorded["use_zarr3"]) == (ocdbt, zarr3)


def test_each_library_reads_items_of_the_other(
    writer_and_reader: Any, tree: Any, same: Same, tmp_path: Path
) -> None:
    writer, reader = writer_and_reader
    registry = writer.handlers.local_registry()
    registry.add(writer.handlers.JsonHandler, checkpointable_name="config")
    context = writer.Context()
    context.checkpointables.registry = registry
    with context:
        writer.save_checkpointables(tmp_path / "a", {"model": tree, "config": {"lr": [1, None, "x"]}})

    loaded = reader.load_checkpointables(tmp_path / "a")
    assert loaded.keys() == {"model", "config"}
    assert loaded["config"] == {"lr": [1, None, "x"]}
    same(loaded["model"], tree)
    same(reader.load(tmp_path / "a"), tree)


def test_both_libraries_write_the_same_files(
    tree: Any, files: Callable[[Path], set[str]], tmp_path: Path
) -> None:
    for library in (orbax_v1, penstock_v1):
        library.save_checkpointables(tmp_path / library.__name__, {"state": tree, "other": {"a": 1}})

    ours, theirs = tmp_path / penstock_v1.__name__, tmp_path / orbax_v1.__name__
    assert files(ours) == files(theirs)
    documents = [json.loads((path / "_CHECKPOINT_METADATA").read_text()) for path in (ours, theirs)]
    for document in documents:
        assert document.pop("init_timestamp_nsecs") < document.pop("commit_timestamp_nsecs")

    assert documents[0] == documents[1]
    for item in ("state", "other"):
        first, second = (json.loads((path / item / "_METADATA").read_text()) for path in (ours, theirs))
        assert first == second


def test_both_libraries_return_the_same_metadata(tree: Any, tmp_path: Path) -> None:
    orbax_v1.save(tmp_path / "a", tree)
    ours, theirs = penstock_v1.metadata(tmp_path / "a"), orbax_v1.metadata(tmp_path / "a")

    structures: list[Any] = [jax.tree.structure(about.metadata) for about in (ours, theirs)]
    assert structures[0] == structures[1]
    for one, other in zip(jax.tree.leaves(ours.metadata), jax.tree.leaves(theirs.metadata), strict=True):
        if isinstance(other, int | float | str):
            assert one == other
            continue

        assert type(one).__name__ == type(other).__name__
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.storage_metadata.chunk_shape == other.storage_metadata.chunk_shape
        assert one.storage_metadata.write_shape == other.storage_metadata.write_shape
        assert getattr(one, "sharding", None) == getattr(other, "sharding", None)

    for name in (
        "path",
        "init_timestamp_nsecs",
        "commit_timestamp_nsecs",
        "init_timestamp",
        "custom_metadata",
    ):
        assert getattr(ours, name) == getattr(theirs, name)


def test_metadata_can_be_loaded_with(ocp: Any, tree: Any, same: Same, tmp_path: Path) -> None:
    ocp.save_checkpointables(tmp_path / "a", {"state": tree, "x": {"b": 2}})

    same(ocp.load(tmp_path / "a", ocp.metadata(tmp_path / "a")), tree)
    same(ocp.load(tmp_path / "a", ocp.metadata(tmp_path / "a").metadata), tree)
    same(
        ocp.load_checkpointables(tmp_path / "a", ocp.checkpointables_metadata(tmp_path / "a"))["state"], tree
    )


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("abstract", "expected"),
    [
        (jax.ShapeDtypeStruct((4,), jnp.float32), jnp.arange(4, dtype=jnp.float32)),  # type: ignore[no-untyped-call]
        (jax.ShapeDtypeStruct((4,), jnp.float16), jnp.arange(4, dtype=jnp.float16)),  # type: ignore[no-untyped-call]
        (np.zeros(4, np.int16), np.arange(4, dtype=np.int16)),
        (np.zeros((), np.int16), np.arange(4, dtype=np.int16)),
        (jax.Array, jnp.arange(4, dtype=jnp.float32)),
        (np.ndarray, np.arange(4, dtype=np.float32)),
        (..., ...),
    ],
)
def test_abstract_leaves_say_what_an_array_becomes(
    ocp: Any, abstract: Any, expected: Any, tmp_path: Path
) -> None:
    ocp.save(tmp_path / "a", {"x": jnp.arange(4, dtype=jnp.float32), "y": 1})
    found = ocp.load(tmp_path / "a", {"x": abstract, "y": int})["x"]

    assert isinstance(found, jax.Array) == isinstance(expected, jax.Array)
    if expected is ...:
        assert found is ...
    else:
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("abstract", "expected"), [(int, 2), (0, 2), (float, 2.0), (0.5, 2.0), (np.zeros(()), np.asarray(2.0))]
)
def test_abstract_leaves_say_what_a_number_becomes(
    ocp: Any, abstract: Any, expected: Any, tmp_path: Path
) -> None:
    ocp.save(tmp_path / "a", [2])
    (found,) = ocp.load(tmp_path / "a", [abstract])

    assert found == expected
    assert type(found) is type(expected)


def test_arrays_are_loaded_onto_other_shardings(ocp: Any, tmp_path: Path) -> None:
    devices: Any = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, ("x", "y"))
    spec: Any = PartitionSpec
    rows, columns = NamedSharding(mesh, spec("x")), NamedSharding(mesh, spec(None, "y"))
    value = jax.device_put(jnp.arange(32.0).reshape(8, 4), rows)
    ocp.save(tmp_path / "a", [value])

    (kept,) = ocp.load(tmp_path / "a")
    struct = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=columns)  # type: ignore[no-untyped-call]
    (moved,) = ocp.load(tmp_path / "a", [struct])
    assert (kept.sharding, moved.sharding) == (rows, columns)
    np.testing.assert_array_equal(moved, value)


def test_padding_and_truncation(ocp: Any, tmp_path: Path) -> None:
    ocp.save(tmp_path / "a", [jnp.arange(4.0)])
    struct = jax.ShapeDtypeStruct((6,), jnp.float32)  # type: ignore[no-untyped-call]
    context = ocp.Context()
    context.array.loading.enable_padding_and_truncation = True
    with context:
        (found,) = ocp.load(tmp_path / "a", [struct])

    np.testing.assert_array_equal(found, [0, 1, 2, 3, 0, 0])
    with pytest.raises(ValueError, match=r"Requested shape: \(6,\) is not compatible with the stored shape"):
        ocp.load(tmp_path / "a", [struct])


def test_leaves_are_cast_and_cut_as_the_options_say(ocp: Any, tmp_path: Path) -> None:
    def of_leaf(key: Any, value: Any) -> Any:
        small = "small" in jax.tree_util.keystr(key)
        return ocp.options.ArrayOptions.Saving.StorageOptions(dtype=np.float16) if small else None

    context = ocp.Context()
    context.array.saving.storage_options.dtype = np.float32
    context.array.saving.storage_options.chunk_byte_size = 16
    context.array.saving.scoped_storage_options_creator = of_leaf
    with context:
        ocp.save(tmp_path / "a", {"small": np.arange(8), "other": np.arange(8)})

    loaded, about = ocp.load(tmp_path / "a"), ocp.metadata(tmp_path / "a").metadata
    assert (loaded["small"].dtype, loaded["other"].dtype) == (np.float16, np.float32)
    assert about["small"].storage_metadata.chunk_shape == (8,)
    assert about["other"].storage_metadata.chunk_shape == (4,)


def test_part_of_a_tree_is_loaded(ocp: Any, tree: Any, same: Same, tmp_path: Path) -> None:
    ocp.save(tmp_path / "a", tree)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        same(ocp.load(tmp_path / "a", {"list": tree["list"]}), {"list": tree["list"]})

    with pytest.raises(ValueError, match="User-provided restore item"):
        ocp.load(tmp_path / "a", {"list": tree["list"]})


def test_a_partial_load_keeps_what_is_not_stored(ocp: Any, tmp_path: Path) -> None:
    ocp.save(tmp_path / "a", {"a": np.arange(4), "list": [1], "dict": {"x": 1}})
    struct = jax.ShapeDtypeStruct((4,), jnp.float32)  # type: ignore[no-untyped-call]
    asked = {"a": np.zeros(4, int), "c": struct, "d": 5, "dict": {"y": {"z": struct}}, "e": {}, "n": None}
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        found = ocp.load(tmp_path / "a", asked)
        for clashing in ({"a": {"b": 1}}, {"list": [1, 2]}, {"dict": 7}):
            with pytest.raises((ValueError, TypeError)):
                ocp.load(tmp_path / "a", clashing)

    np.testing.assert_array_equal(found.pop("a"), np.arange(4))
    assert found == {"c": struct, "d": 5, "dict": {"y": {"z": struct}}, "e": {}, "n": None}
    assert found["c"] is struct


def test_placeholders_are_restored_as_placeholders(ocp: Any, tree: Any, tmp_path: Path) -> None:
    ocp.save(tmp_path / "a", tree)
    asked = {**tree, "array": ocp.PLACEHOLDER, "new": ocp.PLACEHOLDER}
    found = ocp.load(tmp_path / "a", asked)

    assert found["array"] is ...
    assert found["new"] is ...
    np.testing.assert_array_equal(found["large"], tree["large"])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("value", [np.arange(8), 2, 2.5, "words", np.asarray(3.5), True])
def test_a_single_leaf_is_a_tree(ocp: Any, value: Any, tmp_path: Path) -> None:
    ocp.save(tmp_path / "a", value, checkpointable_name="leaf")

    np.testing.assert_array_equal(ocp.load(tmp_path / "a", checkpointable_name="leaf"), value)
    np.testing.assert_array_equal(ocp.load_checkpointables(tmp_path / "a")["leaf"], value)


def test_a_checkpoint_is_replaced_when_asked(ocp: Any, tmp_path: Path) -> None:
    ocp.save(tmp_path / "a", {"a": 1})
    with pytest.raises(ValueError, match="exists"):
        ocp.save(tmp_path / "a", {"a": 2})

    ocp.save(tmp_path / "a", {"a": 2}, overwrite=True)
    assert ocp.load(tmp_path / "a") == {"a": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_responses(ocp: Any, tmp_path: Path) -> None:
    done: list[Any] = []
    response = ocp.save_async(tmp_path / "a", {"a": 1})
    assert response.result() is None
    response.on_complete(done.append)

    assert done == [None]
    assert ocp.save_checkpointables_async(tmp_path / "b", {"x": {"a": 1}}).result(timeout=30) is None
    assert ocp.load_checkpointables(tmp_path / "b") == {"x": {"a": 1}}


def test_older_names_warn(ocp: Any, tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="Use `save` instead"):
        ocp.save_pytree(tmp_path / "a", {"a": 1})
    with pytest.warns(DeprecationWarning, match="Use `save_async` instead"):
        ocp.save_pytree_async(tmp_path / "b", {"a": 1}).result()
    with pytest.warns(DeprecationWarning, match="Use `load` instead"):
        assert ocp.load_pytree(tmp_path / "b") == {"a": 1}
    with pytest.warns(DeprecationWarning, match="Use `metadata` instead"):
        assert ocp.pytree_metadata(tmp_path / "a").metadata == {"a": 0}


def test_parts_are_put_together(ocp: Any, same: Same, tmp_path: Path) -> None:
    path = tmp_path / "a"
    ocp.partial.save(path, {"params": {"a": jnp.arange(4.0)}, "step": 1}, custom_metadata={"x": 1, "y": 1})
    ocp.partial.save_async(path, {"params": {"b": np.ones(3)}}, custom_metadata={"y": 2}).result()
    assert not path.exists()

    ocp.partial.finalize(path)
    same(ocp.load(path), {"params": {"a": jnp.arange(4.0), "b": np.ones(3)}, "step": 1})
    assert ocp.metadata(path).custom_metadata == {"x": 1, "y": 2}
    assert [found.name for found in tmp_path.iterdir()] == ["a"]
    with pytest.raises(FileExistsError):
        ocp.partial.save(path, {"c": 1})
    with pytest.raises(FileExistsError):
        ocp.partial.finalize(path)
    with pytest.raises(FileNotFoundError):
        ocp.partial.finalize(tmp_path / "b")


@pytest.mark.parametrize("second", [{"a": {"b": 2}}, {"a": 2}, {"a": {"b": {"c": 1}}}])
def test_parts_do_not_replace_each_other(ocp: Any, second: Any, tmp_path: Path) -> None:
    ocp.partial.save(tmp_path / "a", {"a": {"b": 1}})
    with pytest.raises(Exception, match="REPLACEMENT") as caught:
        ocp.partial.save(tmp_path / "a", second)

    assert type(caught.value).__name__ == "PartialSaveReplacementError"


def test_safetensors_are_read_as_a_flat_tree(ocp: Any, tmp_path: Path) -> None:
    import safetensors.numpy

    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a.b": np.arange(3, dtype=np.float32)}, path, metadata={"k": "v"})
    for layout in ("safetensors", "auto"):
        context = ocp.Context()
        context.checkpoint_layout = layout
        with context:
            loaded, about = ocp.load(path), ocp.metadata(path)

        np.testing.assert_array_equal(loaded["a.b"], np.arange(3))
        assert about.metadata["a.b"].shape == (3,)
        assert about.custom_metadata == {"k": "v"}
        assert about.commit_timestamp_nsecs is not None


def test_safetensors_are_read_in_chunks_of_the_size_that_is_asked_for(ocp: Any, tmp_path: Path) -> None:
    import safetensors.numpy

    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.arange(1000, dtype=np.float32)}, path)
    for size in (64, 0):
        options = ocp.options.SafetensorsOptions(read_chunk_bytes=size, max_over_read_ratio=1.0)
        with ocp.Context(safetensors_options=options, checkpoint_layout="safetensors"):
            if size:
                np.testing.assert_array_equal(ocp.load(path)["a"], np.arange(1000))
            else:
                with pytest.raises(ValueError, match="read_chunk_bytes"):
                    ocp.load(path)


def test_a_checkpoint_or_an_item_is_deleted(ocp: Any, tmp_path: Path) -> None:
    path = tmp_path / "a"
    ocp.save_checkpointables(path, {"x": {"a": 1}, "y": {"b": 2}})

    assert ocp.delete(path, checkpointable_name="y") is True
    assert ocp.load_checkpointables(path) == {"x": {"a": 1}}
    with pytest.raises(KeyError):
        ocp.load_checkpointables(path, {"y": None})
    with pytest.raises(ValueError, match="delete the whole checkpoint"):
        ocp.delete(path, checkpointable_name="x")
    with pytest.raises(FileNotFoundError):
        ocp.delete(path, checkpointable_name="y")
    assert ocp.delete(path, checkpointable_name="y", missing_ok=True) is False
    with pytest.raises(ValueError, match=r"heckpoint"):
        ocp.delete(tmp_path)

    assert ocp.delete_async(path).result() is True
    assert list(tmp_path.iterdir()) == []
    assert ocp.delete(path, missing_ok=True) is False
    with pytest.raises(FileNotFoundError):
        ocp.delete(path)
