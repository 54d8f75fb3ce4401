"""Both directions with the safetensors package, bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import TensorSpec, deserialize, safe_open, serialize_file
from safetensors.numpy import load_file, save_file

import penstock
from penstock.errors import (
    CorruptCheckpointError,
    DuplicateNameError,
    InvalidLeafError,
    SpecError,
    StructureMismatchError,
    TruncatedDataError,
)
from penstock.handlers.formats.safetensors.header import NAMES

Compare = Callable[[Any, Any], None]


# Neither says what its parameters are.
_deserialize: Any = deserialize
_Spec: Any = PartitionSpec
_Struct: Any = jax.ShapeDtypeStruct


def dtype_of(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def noise(name: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Any bits at all, NaNs of every payload among them."""
    dtype = dtype_of(name)
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return (bits & 1 if name == "bool" else bits).view(dtype).reshape(shape)


def raw(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What the package finds in a file, of types that its numpy face does not know, too."""
    return {
        name: (about["dtype"], tuple(about["shape"]), bytes(about["data"]))
        for name, about in _deserialize(path.read_bytes())
    }


@pytest.mark.parametrize("code", NAMES)
def test_every_element_type_both_ways(tmp_path: Path, code: str) -> None:
    array = noise(NAMES[code], (2, 3))
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"

    penstock.sync.export_safetensors({"x": array}, ours)
    assert raw(ours) == {"x": (code, (2, 3), array.tobytes())}

    spec = TensorSpec(dtype=NAMES[code], shape=[2, 3], data_ptr=array.ctypes.data, data_len=array.nbytes)
    serialize_file({"x": spec}, theirs, None)
    found = penstock.sync.restore(theirs)["x"]
    assert (type(found), found.dtype, found.tobytes()) == (np.ndarray, array.dtype, array.tobytes())


def test_a_flat_dict_a_tree_and_a_target(tmp_path: Path, compare: Compare) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {
        "layers.0.w": noise("float32", (4, 3)),
        "layers.1.w": noise("float32", (4, 3)),
        "b": noise("float16", (3,)),
    }
    save_file(tensors, path, {"format": "np"})

    compare(penstock.sync.restore(path), tensors)
    compare(penstock.sync.restore(tmp_path), tensors)
    nested = {
        "layers": {"0": {"w": tensors["layers.0.w"]}, "1": {"w": tensors["layers.1.w"]}},
        "b": tensors["b"],
    }
    compare(penstock.sync.restore(path, split="."), nested)
    like = {
        "layers": [{"w": jnp.zeros((4, 3))}, {"w": np.zeros((4, 3), np.float32)}],
        "b": np.ndarray,
        "none": None,
    }
    found = penstock.sync.restore(path, like=like)
    assert isinstance(found["layers"], list)
    assert isinstance(found["layers"][0]["w"], jax.Array)
    assert found["none"] is None
    assert np.asarray(found["layers"][0]["w"]).tobytes() == tensors["layers.0.w"].tobytes()
    assert penstock.sync.metadata(path).custom_metadata == {"format": "np"}
    assert {leaf.name for leaf in penstock.sync.metadata(path).leaves} == set(tensors)


def test_a_target_that_does_not_fit_lists_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a.b": np.zeros(3), "c": np.zeros(3)}, path)

    with pytest.raises(StructureMismatchError) as raised:
        penstock.sync.restore(path, like={"a": {"b": np.zeros(4)}, "d": np.zeros(3)})

    assert {(found.kind, found.key_path) for found in raised.value.differences} == {
        ("shape", "['a']['b']"),
        ("missing", "['d']"),
        ("unexpected", "['c']"),
    }


def test_tensors_are_restored_onto_a_mesh(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    array = noise("float32", (16, 24))
    save_file({"w": array}, path)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    for spec in (_Spec("x", "y"), _Spec("y"), _Spec(None, "x"), _Spec()):
        sharding = NamedSharding(mesh, spec)
        found = penstock.sync.restore(path, like={"w": _Struct((16, 24), np.float32, sharding=sharding)})["w"]

        assert found.sharding == sharding
        assert np.asarray(found).tobytes() == array.tobytes()


@pytest.mark.parametrize("spec", [("x", "y"), ("y", "x"), (None, "y"), ("x",), (("x", "y"),), ()])
def test_a_sharded_array_is_one_tensor(tmp_path: Path, spec: tuple[Any, ...]) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    array = noise("float32", (16, 24, 3))
    sharding = NamedSharding(mesh, _Spec(*spec))
    path = tmp_path / "w.safetensors"

    penstock.sync.export_safetensors({"w": jax.device_put(array, sharding)}, path)

    assert load_file(path)["w"].tobytes() == array.tobytes()


def test_everything_that_a_tree_may_hold_comes_back(tmp_path: Path, tree: Any, compare: Compare) -> None:
    """What is no tensor is noted; the tree without shardings, and without types that the format lacks."""
    known = set(NAMES.values())
    kept = {
        **tree,
        "device": {name: value for name, value in tree["device"].items() if name in known},
        "host": {name: value for name, value in tree["host"].items() if name in known},
        "sharded": [],
    }
    path = tmp_path / "tree.safetensors"

    penstock.sync.export_safetensors(kept, path, custom_metadata={"lr": 0.5, "who": "me"})

    expected = jax.tree.map(lambda leaf: leaf, kept)
    compare(penstock.sync.restore(path, like=expected), expected)
    assert penstock.sync.metadata(path).custom_metadata == {"lr": 0.5, "who": "me"}
    with safe_open(path, "np") as file:
        assert file.metadata()["who"] == "me"
        assert file.metadata()["format"] == "pt", "transformers refuses a file that does not say"
        assert "opt.1.0.mu.kernel" in file.keys()  # noqa: SIM118  # it is no dict


def test_a_tree_comes_back_without_a_target(tmp_path: Path, compare: Compare) -> None:
    tree = {
        "a": [np.ones(2), {"b.c": np.zeros(1), "d": None}],
        "e": (),
        "s": "text",
        "n": 3,
        "k": jax.random.key(1),
    }
    penstock.sync.export_safetensors(tree, tmp_path / "t.safetensors")

    compare(penstock.sync.restore(tmp_path / "t.safetensors", split="."), tree)
    flat = penstock.sync.restore(tmp_path / "t.safetensors")
    assert set(flat) == {"a.0", "a.1.b.c", "a.1.d", "e", "k", "n", "s"}


def test_a_bare_leaf(tmp_path: Path, compare: Compare) -> None:
    path = tmp_path / "bare.safetensors"
    penstock.sync.export_safetensors(np.arange(3), path)

    assert load_file(path)[""].tolist() == [0, 1, 2]
    compare(penstock.sync.restore(path, split="."), np.arange(3))
    compare(penstock.sync.restore(path, like=np.arange(3)), np.arange(3))
    compare(penstock.sync.restore(path), {"": np.arange(3)})


@pytest.mark.parametrize("dtype", ["int4", "complex128", "float8_e3m4"])
def test_types_that_the_format_lacks_are_refused(tmp_path: Path, dtype: str) -> None:
    value = np.zeros(2, dtype_of(dtype))

    with pytest.raises(InvalidLeafError, match=dtype) as raised:
        penstock.sync.export_safetensors({"fine": np.ones(2), "x": [value]}, tmp_path / "x.safetensors")

    assert raised.value.key_path == "['x'][0]"
    assert list(tmp_path.iterdir()) == []


def test_names_that_collide_are_refused_with_both(tmp_path: Path) -> None:
    with pytest.raises(DuplicateNameError) as raised:
        penstock.sync.export_safetensors(
            {"a.b": np.ones(1), "a": {"b": np.ones(1)}}, tmp_path / "x.safetensors"
        )

    assert {raised.value.first, raised.value.second} == {"['a.b']", "['a']['b']"}


@pytest.mark.parametrize(
    ("tree", "custom", "error"),
    [
        ({"__metadata__": np.ones(1)}, None, InvalidLeafError),
        ({"a": np.ones(1)}, {"penstock": "mine"}, SpecError),
        ({"a": np.ones(1)}, {"x": object()}, SpecError),
    ],
)
def test_names_that_are_taken(tmp_path: Path, tree: Any, custom: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        penstock.sync.export_safetensors(tree, tmp_path / "x.safetensors", custom_metadata=custom)

    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_shards(tmp_path: Path, compare: Compare) -> None:
    tree = {f"l{at}": noise("float32", (100,), at) for at in range(5)} | {
        "big": noise("int8", (2000,)),
        "s": "x",
    }

    penstock.sync.export_safetensors(tree, tmp_path / "m", max_shard_bytes=900, custom_metadata={"who": "me"})

    files = sorted(path.name for path in (tmp_path / "m").iterdir())
    shards = [f"model-{at:05}-of-00004.safetensors" for at in range(1, 5)]
    assert files == [*shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4000
    found: dict[str, Any] = {}
    for name in shards:
        part = load_file(tmp_path / "m" / name)
        assert sum(array.nbytes for array in part.values()) <= 900 or len(part) == 1
        assert {index["weight_map"][tensor] for tensor in part} == {name}
        with safe_open(tmp_path / "m" / name, "np") as file:
            assert file.metadata()["who"] == "me"
        found |= part

    assert set(found) == set(index["weight_map"])
    compare(penstock.sync.restore(tmp_path / "m", like=tree), tree)
    assert penstock.sync.metadata(tmp_path / "m").custom_metadata == {"who": "me"}


def test_each_tensor_begins_at_a_multiple_of_its_element(tmp_path: Path) -> None:
    tree = [noise(name, (3,)) for name in ("int8", "float64", "float16", "bool", "float32", "int16")]
    path = tmp_path / "x.safetensors"
    penstock.sync.export_safetensors(tree, path)

    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    begins = [8 + length + header[str(at)]["data_offsets"][0] for at in range(len(tree))]
    assert length % 8 == 0
    assert all(begin % array.itemsize == 0 for begin, array in zip(begins, tree, strict=True))
    assert [name for name in header if name != "__metadata__"] == list("012345")


def test_a_safetensors_checkpoint_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    penstock.sync.export_safetensors({"a": np.ones(1)}, path)
    with pytest.raises(FileExistsError):
        penstock.sync.export_safetensors({"a": np.zeros(1)}, path)
    penstock.sync.export_safetensors({"a": np.zeros(1)}, path, overwrite=True)
    assert load_file(path)["a"].tolist() == [0]

    penstock.sync.export_safetensors({"a": np.ones(1)}, tmp_path / "folder")
    penstock.sync.export_safetensors({"a": np.zeros(1)}, tmp_path / "folder", overwrite=True)
    assert load_file(tmp_path / "folder" / "model.safetensors")["a"].tolist() == [0]

    (tmp_path / "folder" / "config.json").touch()
    (tmp_path / "notes").write_text("precious")
    (tmp_path / "d.safetensors").mkdir()
    for other in ("folder", "notes", "d.safetensors"):
        with pytest.raises(SpecError):
            penstock.sync.export_safetensors({"a": np.ones(1)}, tmp_path / other, overwrite=True)

    left = {"x.safetensors", "folder", "notes", "d.safetensors"}
    assert {entry.name for entry in tmp_path.iterdir()} == left


def test_a_file_cut_short_or_changed_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.ones(100)}, path)
    whole = path.read_bytes()
    with penstock.sync.Checkpointer() as checkpointer:
        for length in reversed(range(len(whole))):
            os.truncate(path, length)
            with pytest.raises(TruncatedDataError):
                checkpointer.metadata(path)

    path.write_bytes(whole + b"x")
    with pytest.raises(CorruptCheckpointError, match="belong to no tensor"):
        penstock.sync.restore(path)


names = st.text(st.characters(codec="utf-8"), max_size=6).filter(lambda name: name != "__metadata__")
arrays = st.builds(
    noise,
    st.sampled_from(sorted(NAMES.values())),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 99),
)
many = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(tensors=st.dictionaries(names, arrays, max_size=6))
def test_penstock_reads_whatever_safetensors_saves(
    tmp_path_factory: pytest.TempPathFactory, ours: Any, tensors: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("theirs") / "x.safetensors"
    keep = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=array.dtype.name,
            shape=list(tensors[name].shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in keep.items()
    }
    serialize_file(specs, path, None)

    found = ours.restore(path)

    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in found.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in tensors.items()
    }


leaves = st.one_of(arrays, st.none(), st.text(st.characters(codec="utf-8"), max_size=4), st.integers(-9, 9))
keys = st.text("ab.0", min_size=1, max_size=3)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(st.dictionaries(keys, inner, max_size=3), st.lists(inner, max_size=3)),
    max_leaves=6,
)


@many
@given(tree=st.dictionaries(keys, trees, max_size=3), shard=st.sampled_from([None, 10]))
def test_safetensors_and_penstock_read_whatever_penstock_writes(
    tmp_path_factory: pytest.TempPathFactory, ours: Any, assert_same: Compare, tree: Any, shard: int | None
) -> None:
    folder = tmp_path_factory.mktemp("ours") / "x"
    try:
        penstock.sync.export_safetensors(tree, folder, max_shard_bytes=shard)
    except DuplicateNameError:
        return

    loaded = {name: bytes_ for path in folder.glob("*.safetensors") for name, bytes_ in raw(path).items()}
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    expected = {
        ".".join(str(getattr(key, "key", getattr(key, "idx", ""))) for key in path): np.asarray(leaf)
        for path, leaf in flat
        if not isinstance(leaf, str)
    }
    assert {name: (shape, data) for name, (_, shape, data) in loaded.items()} == {
        name: (array.shape, array.tobytes()) for name, array in expected.items()
    }
    assert_same(ours.restore(folder, split="."), tree)
    assert_same(ours.restore(folder, like=tree), tree)
