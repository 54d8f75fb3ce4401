"""Trees, transformations, metadata and restore args: the same calls to both libraries."""

from __future__ import annotations

import dataclasses
import json
import unittest
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint._src.metadata import sharding as orbax_sharding
from orbax.checkpoint._src.metadata import tree as orbax_tree_metadata

import penstock.orbax as face
from penstock.orbax import checkpoint_utils, metadata, test_utils, transform_utils, tree, utils
from penstock.orbax import value_metadata as penstock_sharding
from penstock.orbax.metadata import TreeMetadata, build_default_tree_metadata
from penstock.orbax.value_metadata import ZarrMetadata

orbax: Any = ocp
P: Any = PartitionSpec


class Pair(NamedTuple):
    left: Any
    right: Any


@flax.struct.dataclass
class State:
    step: Any
    params: Any


TREES: dict[str, Any] = {
    "nested": {"b": 1, "a": [2, (3, {"c": 4})]},
    "named": Pair(1, [State(2, {"w": 3})]),
    "empties": {"a": {}, "b": [], "c": (), "d": None, "e": 1},
    "numbers": {3: 1, 1: 2},
    "ordered": OrderedDict([("z", 1), ("a", (2,))]),
    "list": [1, [2], 3],
    "leaf": 5,
}
BY_NAME = pytest.mark.parametrize("value", list(TREES.values()), ids=list(TREES))


@BY_NAME
@pytest.mark.parametrize("keep", [False, True])
def test_trees_become_dicts_and_lists_and_back(value: Any, keep: bool) -> None:
    mine = utils.serialize_tree(value, keep_empty_nodes=keep)
    assert mine == orbax.utils.serialize_tree(value, keep_empty_nodes=keep)
    back = utils.deserialize_tree(mine, value, keep_empty_nodes=keep)
    assert back == orbax.utils.deserialize_tree(mine, value, keep_empty_nodes=keep) == value


@BY_NAME
@pytest.mark.parametrize("sep", [None, "/"])
@pytest.mark.parametrize("keep", [False, True])
def test_trees_become_flat_and_back(value: Any, sep: str | None, keep: bool) -> None:
    mine = tree.to_flat_dict(value, sep, keep)
    assert mine == orbax.tree.to_flat_dict(value, sep, keep)
    if not keep:
        assert tree.from_flat_dict(dict(mine), value, sep) == value
    if sep is None or value != 5:
        assert tree.from_flat_dict(dict(mine), sep=sep) == orbax.tree.from_flat_dict(dict(mine), sep=sep)

    taken = dict(mine)
    if not keep:
        tree.from_flat_dict(taken, value, sep, inplace=True)
        assert taken == {}


@BY_NAME
def test_names_are_orbax_s(value: Any) -> None:
    for include in (True, False):
        mine = tree.get_param_names(value, include_empty_nodes=include)
        assert mine == orbax.tree.get_param_names(value, include_empty_nodes=include)

    for node in [value, *jax.tree.leaves(value), None, {}, ()]:
        assert utils.is_empty_node(node) == orbax.utils.is_empty_node(node)
        assert utils.is_empty_or_leaf(node) == orbax.utils.is_empty_or_leaf(node)
        assert tree.is_flat_dict(node) == orbax.tree.is_flat_dict(node)


@BY_NAME
def test_keys_are_orbax_s(value: Any) -> None:
    for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]:
        assert utils.tuple_path_from_keypath(path) == orbax.utils.tuple_path_from_keypath(path)
        for key in path:
            assert utils.get_key_name(key) == orbax.utils.get_key_name(key)
            assert utils.is_dict_key(key) == orbax.utils.is_dict_key(key)
            assert utils.is_sequence_key(key) == orbax.utils.is_sequence_key(key)

    for library in (utils, orbax.utils):
        with pytest.raises(ValueError, match="key"):
            library.get_key_name("key")


def test_what_orbax_loses_in_silence_is_refused() -> None:
    with pytest.raises(ValueError, match="two leaves"):
        tree.to_flat_dict({"x": {"y": 1}, "x/y": 2}, sep="/")
    with pytest.raises(ValueError, match="indices"):
        tree.from_flattened_with_keypath([((jax.tree_util.SequenceKey(1),), "b")])
    with pytest.raises(ValueError, match="without leaves"):
        tree.from_flattened_with_keypath([])
    with pytest.raises(ValueError, match="leaf"):
        tree.from_flat_dict({("a",): 1, ("a", "b"): 2})
    with pytest.raises(ValueError, match="beginning"):
        tree.from_flat_dict({("a", "b"): 2, ("a",): 1})
    with pytest.raises(KeyError):
        utils.deserialize_tree({"a": 1}, {"b": 2})


def test_trees_are_merged_and_intersected() -> None:
    first, second = {"a": 1, "b": {"c": 2}}, {"b": {"c": 3, "d": 4}}
    for name in ("merge_trees", "intersect_trees"):
        mine = getattr(transform_utils, name)(first, second)
        assert mine == getattr(orbax.transform_utils, name)(first, second)


T, OT = transform_utils.Transform, orbax.transform_utils.Transform


def rules(library: Any) -> dict[str, dict[str, Any]]:
    make = library.Transform
    return {
        "renamed": {"a1": make(original_key="a")},
        "pattern": {r"x(\d.*)": make(original_key=r"b\1")},
        "value": {"a": make(value_fn=lambda value: value * 10)},
        "several": {
            "y": make(multi_value_fn=lambda key, whole: f"{key} {whole['a']}"),
            "x1": {"c": make(multi_value_fn=lambda _, whole: whole["b1"]["c"])},
        },
        "fallback": {"a": make(use_fallback=True)},
        "order": {"a": make(original_key="f"), "a|zz": make(value_fn=lambda value: -value)},
        "none": {},
    }


@pytest.mark.parametrize("name", list(rules(transform_utils)))
@pytest.mark.parametrize("to_original", [True, False])
def test_transformations_give_what_orbax_gives(name: str, to_original: bool) -> None:
    original = {"a": 1, "b": {"c": 5}, "f": 2, "b1": {"c": 2}, "b2": {"c": 3}}
    new = {"a": 100, "a1": 0, "f": 7, "g": 8, "x1": {"c": 0}, "x2": {"c": 0}, "y": 0, "b": {"c": 9}}
    found = [
        library.apply_transformations(original, rules(library)[name], new, to_original)
        for library in (transform_utils, orbax.transform_utils)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("to_original", [True, False])
def test_a_transformation_without_its_leaf_is_refused(to_original: bool) -> None:
    for library in (transform_utils, orbax.transform_utils):
        given = {"a": library.Transform(original_key="z")}
        with pytest.raises(ValueError, match=r"not found|does not have"):
            library.apply_transformations({"a": 1}, given, {"a": 0}, to_original)
        assert library.apply_transformations({"a": 1}, {}, {}) == {}


def test_an_original_key_may_be_a_tuple() -> None:
    given = {"x": T(original_key=("a", "b"))}
    assert transform_utils.apply_transformations({"a": {"b": 3}}, given, {"x": 0}) == {"x": 3}


@pytest.mark.parametrize(
    "fields",
    [
        {"original_key": "a", "use_fallback": True},
        {"original_key": "a", "multi_value_fn": print},
        {"value_fn": print, "multi_value_fn": print},
        {"value_fn": print, "use_fallback": True},
        {"use_fallback": True, "multi_value_fn": print},
    ],
)
def test_rules_that_contradict_themselves_are_refused(fields: dict[str, Any]) -> None:
    for kind in ("Transform", "RestoreTransform"):
        for library in (transform_utils, orbax.transform_utils):
            with pytest.raises(AssertionError):
                getattr(library, kind)(**fields)

    for library in (transform_utils, orbax.transform_utils):
        with pytest.raises(AssertionError):
            library.RestoreTransform(multi_value_fn_input_args={})
        library.RestoreTransform(multi_value_fn=print, multi_value_fn_input_args={"a": 1})


# Metadata


def shardings() -> list[Any]:
    devices: Any = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, ("x", "y"))
    specs: list[Any] = [
        P("x", "y"),
        P(("x", "y"), None),
        P(None, "x"),
        P(),
    ]
    return [
        SingleDeviceSharding(jax.devices()[3]),
        *[NamedSharding(mesh, spec) for spec in specs],
        NamedSharding(Mesh(devices[:, ::-1], ("a", "b")), P("b")),
    ]


@pytest.mark.parametrize("number", range(6))
def test_shardings_are_recorded_and_read_as_orbax_does(number: int) -> None:
    sharding = shardings()[number]
    mine = penstock_sharding.from_jax_sharding(sharding)
    his: Any = orbax_sharding.from_jax_sharding(sharding)
    assert mine is not None
    text = mine.to_serialized_string()
    assert text == his.to_serialized_string()
    back = penstock_sharding.from_serialized_string(text)
    assert back == mine
    assert back.to_jax_sharding() == mine.to_jax_sharding() == sharding
    others = [penstock_sharding.from_jax_sharding(s) for at, s in enumerate(shardings()) if at != number]
    assert mine not in others


def test_old_names_of_devices_are_known() -> None:
    kind = metadata.SingleDeviceShardingMetadata
    assert kind(device_str="TFRT_CPU_1") == kind(device_str="cpu:1")
    assert kind(device_str="TFRT_CPU_1").to_jax_sharding() == SingleDeviceSharding(jax.devices()[1])


def test_shardings_of_devices_that_are_not_here_are_refused() -> None:
    text = penstock_sharding.from_jax_sharding(shardings()[1])
    assert text is not None
    fields = json.loads(text.to_serialized_string())
    fields["device_mesh"]["mesh"][0][0]["id"] = 77
    for library in (penstock_sharding, orbax_sharding):
        with pytest.raises(ValueError, match="device"):
            library.from_serialized_string(json.dumps(fields)).to_jax_sharding()
        with pytest.raises(ValueError, match=r"cpu:77"):
            library.SingleDeviceShardingMetadata(device_str="cpu:77").to_jax_sharding()
        with pytest.raises(ValueError, match=r"[Ss]harding"):
            library.from_serialized_string('{"sharding_type": "NamedSharding"}')
        with pytest.raises(ValueError, match="evice"):
            library.from_serialized_string('{"sharding_type": "SingleDeviceSharding"}')
        with pytest.raises(ValueError, match="Positional"):
            library.from_serialized_string('{"sharding_type": "PositionalSharding"}')
        with pytest.raises(NotImplementedError):
            library.from_serialized_string('{"sharding_type": "Other"}')


def test_metadata_is_equal_if_it_says_the_same() -> None:
    for library in (metadata, orbax.metadata):
        array = library.ArrayMetadata("a", None, (2,), None, np.dtype(np.int8))
        assert array == dataclasses.replace(array, name="b", directory="elsewhere")
        assert array != dataclasses.replace(array, shape=(3,))
        assert array != dataclasses.replace(array, storage=library.StorageMetadata((2,)))
        assert array != library.StringMetadata("a", None)
        assert library.StringMetadata("a", None) == library.StringMetadata("b", None)
        number = library.ScalarMetadata("a", None, dtype=np.dtype(np.int8))
        assert number == dataclasses.replace(number, name="b")
        assert number != dataclasses.replace(number, dtype=np.dtype(np.int16))
        struct = jax.ShapeDtypeStruct((2,), np.int8)  # type: ignore[no-untyped-call]  # jax's
        assert library.ArrayMetadata.from_shape_dtype_struct(struct, "a") == array


def test_the_metadata_of_arrays_is_read_from_either_version() -> None:
    assert ZarrMetadata.from_json(None) is None
    assert ZarrMetadata.from_json({"zarr_format": 4}) is None
    two = ZarrMetadata.from_json(
        {
            "zarr_format": 2,
            "shape": [4],
            "dtype": "<f4",
            "chunks": [2],
            "compressor": {"id": "zstd", "level": 1},
        }
    )
    assert two is not None
    assert (two.shape, two.dtype, two.chunk_shape, repr(two.compression)) == ((4,), "<f4", (2,), "zstd:1")


def custom_tree(library: Any, value: Any, **fields: Any) -> Any:
    return library.build_default_tree_metadata(value, **fields)


@pytest.mark.parametrize("name", ["nested", "named", "list", "leaf", "ordered"])
def test_the_metadata_of_a_tree_is_a_tree(name: str) -> None:
    value = TREES[name]
    mine = build_default_tree_metadata(value, custom_metadata={"a": [1]}, use_zarr3=True)
    his: Any = orbax_tree_metadata.build_default_tree_metadata(
        value, custom_metadata={"a": [1]}, use_zarr3=True
    )
    assert isinstance(mine, TreeMetadata)
    assert isinstance(his, TreeMetadata)
    assert jax.tree.leaves(mine) == jax.tree.leaves(his)
    keys = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(mine)[0]]
    assert keys == [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(his)[0]]

    doubled = jax.tree.map(lambda leaf: leaf * 2, mine)
    assert doubled.tree == jax.tree.map(lambda leaf: leaf * 2, value)
    assert (doubled.custom_metadata, doubled.use_zarr3) == ({"a": [1]}, True)
    assert jax.tree.map(lambda a, b: a + b, mine, doubled).tree == jax.tree.map(lambda leaf: leaf * 3, value)


def test_the_metadata_of_a_tree_is_indexed_as_its_outermost_container() -> None:
    mine = build_default_tree_metadata({"a": [1, 2], "b": 3})
    assert (mine["a"], mine.get("z"), mine.get("z", 4), len(mine), list(mine)) == (
        [1, 2],
        None,
        4,
        2,
        ["a", "b"],
    )
    assert "a" in mine
    assert (list(mine.keys()), list(mine.values())) == (["a", "b"], [[1, 2], 3])
    assert dict(mine.items()) == mine.tree
    assert build_default_tree_metadata([1, 2])[1] == 2
    for value in (None, {1, 2}.__class__):
        if value is None:
            with pytest.raises(ValueError, match="TreeMetadata"):
                build_default_tree_metadata(value)


# Restore args


def target() -> dict[str, Any]:
    sharding = shardings()[1]
    struct: Any = jax.ShapeDtypeStruct
    return {
        "jax": jax.device_put(jnp.zeros((4, 8)), sharding),
        "key": jax.random.key(1),
        "numpy": np.zeros(3, np.int16),
        "int": 1,
        "float": 1.5,
        "bool": True,
        "str": "x",
        "struct": struct((4, 8), np.float32, sharding=sharding),
        "plain": struct((4, 8), np.float32),
        "skipped": ...,
    }


def as_dict(args: Any) -> tuple[str, dict[str, Any]]:
    return type(args).__name__, {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}


@pytest.mark.parametrize(
    "options",
    [{}, {"set_global_shape": False}, {"strict": False}, {"support_layout": True}],
)
def test_restore_args_are_those_that_orbax_constructs(options: dict[str, Any]) -> None:
    mine = checkpoint_utils.construct_restore_args(target(), **options)
    his = orbax.checkpoint_utils.construct_restore_args(target(), **options)
    assert mine.keys() == his.keys()
    for name, args in mine.items():
        assert as_dict(args) == as_dict(his[name]), name


def test_restore_args_take_another_sharding() -> None:
    value = {"a": target()["struct"], "b": target()["jax"]}
    places = {"a": shardings()[4], "b": shardings()[0]}
    mine = utils.construct_restore_args(value, places)
    his = orbax.checkpoint_utils.construct_restore_args(value, places)
    for name, args in mine.items():
        assert as_dict(args) == as_dict(his[name])
        assert args.sharding == places[name]


def described(library: Any) -> Any:
    sharding = library.SingleDeviceShardingMetadata("cpu:0")
    return {
        "array": library.ArrayMetadata("a", None, (2,), sharding, np.dtype(np.int8)),
        "host": library.ArrayMetadata("h", None, (2,), None, np.dtype(np.int8)),
        "int": library.ScalarMetadata("i", None, dtype=np.dtype(np.int64)),
        "float": library.ScalarMetadata("f", None, dtype=np.dtype(np.float32)),
        "bool": library.ScalarMetadata("b", None, dtype=np.dtype(np.bool_)),
        "str": library.StringMetadata("s", None),
    }


def test_restore_args_are_made_of_metadata() -> None:
    mine = checkpoint_utils.construct_restore_args(
        build_default_tree_metadata(described(metadata), custom_metadata=7)
    )
    his = orbax.checkpoint_utils.construct_restore_args(
        orbax_tree_metadata.build_default_tree_metadata(described(orbax.metadata), custom_metadata=7)
    )
    assert mine.custom_metadata == his.custom_metadata == 7
    for name, args in mine.tree.items():
        (kind, fields), (other, wanted) = as_dict(args), as_dict(his.tree[name])
        places = fields.pop("sharding", None), wanted.pop("sharding", None)
        assert (kind, fields) == (other, wanted), name
        assert type(places[0]).__name__ == type(places[1]).__name__


def test_restore_args_of_what_nobody_restores_are_refused() -> None:
    for value in (object(), metadata.Metadata("a", None)):
        with pytest.raises(ValueError, match="cannot be restored"):
            checkpoint_utils.construct_restore_args({"a": value})


def test_structs_are_those_that_orbax_makes() -> None:
    for name, value in target().items():
        if name in {"str", "skipped"}:
            continue
        mine = utils.to_shape_dtype_struct(value)
        assert mine == orbax.utils.to_shape_dtype_struct(value), name
        assert utils.to_shape_dtype_struct(value, np.int8, float) == (
            orbax.utils.to_shape_dtype_struct(value, np.int8, float)
        )

    array = described(metadata)["array"]
    assert utils.to_shape_dtype_struct(array) == orbax.utils.to_shape_dtype_struct(
        described(orbax.metadata)["array"]
    )
    with pytest.raises(ValueError, match="no shape"):
        utils.to_shape_dtype_struct("text")


# What is left of utils


@pytest.mark.parametrize(
    "name",
    [
        *(
            "0",
            "12",
            "step_3",
            "a_b_7",
            "step_",
            "x",
            "1.orbax-checkpoint-tmp",
            "1.orbax-checkpoint-tmp-55",
            "_191",
            "_191.orbax-checkpoint-tmp-1",
            "-1",
        )
    ],
)
def test_steps_are_known_by_name_as_orbax_knows_them(name: str) -> None:
    def step_of(library: Any) -> object:
        try:
            return library.step_from_checkpoint_name(name)
        except ValueError:
            return ValueError

    assert step_of(utils) == step_of(orbax.utils)


def test_complete_steps_are_found(tmp_path: Path) -> None:
    for name in ("3", "step_5", "x", "7.orbax-checkpoint-tmp", "9.orbax-checkpoint-tmp-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "11").touch()
    for directory in (tmp_path, tmp_path / "nothing"):
        his = epath.Path(directory)
        assert sorted(utils.checkpoint_steps(directory)) == sorted(orbax.utils.checkpoint_steps(his))
        mine = [path.name for path in utils.checkpoint_steps_paths(directory)]
        assert sorted(mine) == sorted(path.name for path in orbax.utils.checkpoint_steps_paths(his))
        temporary = {path.get().name for path in orbax.utils.tmp_checkpoints(his)}
        assert set(utils.tmp_checkpoints(directory)) == temporary

    assert utils.any_checkpoint_step(tmp_path) in {3, 5}
    for name in ("3", "7.orbax-checkpoint-tmp", "11", "absent", "absent.orbax-checkpoint-tmp"):
        path = epath.Path(tmp_path / name)
        assert utils.is_checkpoint_finalized(path) == orbax.utils.is_checkpoint_finalized(path), name
        assert utils.is_tmp_checkpoint(path) == orbax.utils.is_tmp_checkpoint(path), name


def test_placeholders_of_old_files_are_known() -> None:
    for leaf in ("PLACEHOLDER://a.b", "AGGREGATED://a", "other", 1):
        assert utils.leaf_is_placeholder(leaf) == orbax.utils.leaf_is_placeholder(leaf)
    assert utils.leaf_placeholder("a") == orbax.utils.leaf_placeholder("a")
    assert utils.name_from_leaf_placeholder("AGGREGATED://a") == "a"
    assert utils.all_leaves_are_placeholders({"a": "PLACEHOLDER://a"})
    for library in (utils, orbax.utils):
        with pytest.raises(ValueError, match="laceholder"):
            library.name_from_leaf_placeholder("a")


def test_a_structure_is_guessed_by_names(tmp_path: Path) -> None:
    for name in ("a.b", "a.c", "d", "_METADATA", "_sharding"):
        (tmp_path / name).mkdir()
    assert utils.pytree_structure(tmp_path) == orbax.utils.pytree_structure(tmp_path)


def test_one_process_is_the_whole_job() -> None:
    utils.sync_global_processes("here")
    assert utils.is_primary_host(0)
    assert utils.is_primary_host(None)
    assert not utils.is_primary_host(1)
    assert utils.is_scalar(np.float32(1)) is orbax.utils.is_scalar(np.float32(1)) is True
    assert utils.is_gcs_path("gs://bucket/x")
    assert not utils.is_gcs_path(Path("/x"))


def test_a_local_array_becomes_a_global_one() -> None:
    devices: Any = np.array(jax.devices())
    everywhere = NamedSharding(Mesh(devices, ("x",)), P())
    array = jax.device_put(jnp.arange(4), everywhere)
    mine = utils.fully_replicated_host_local_array_to_global_array(array)
    his = orbax.utils.fully_replicated_host_local_array_to_global_array(array)
    assert np.array_equal(mine, his)
    assert mine.sharding.is_equivalent_to(his.sharding, 1)


class Case(unittest.TestCase):
    """What the assertions of test_utils are handed."""


def test_test_utils_make_and_compare_trees(tmp_path: Path, assert_same: Callable[[Any, Any], None]) -> None:
    case = Case()
    numpy = test_utils.setup_pytree(1)
    assert_same(numpy, orbax.test_utils.setup_pytree(1))
    mesh = Mesh(np.array(jax.devices()), ("x",))
    mine = jax.tree.map(lambda array: test_utils.create_sharded_array(array, mesh, P()), numpy)
    his = jax.tree.map(lambda array: orbax.test_utils.create_sharded_array(array, mesh, P()), numpy)
    assert_same(mine, his)
    test_utils.assert_tree_equal(case, mine, his)
    with pytest.raises(AssertionError):
        test_utils.assert_tree_equal(case, mine, numpy)
    with pytest.raises(AssertionError):
        test_utils.assert_tree_equal(case, numpy, test_utils.setup_pytree(2))

    tripled = test_utils.apply_function(mine, lambda array: array * 3)
    assert np.array_equal(tripled["a"], numpy["a"] * 3)
    (test_utils.erase_and_create_empty(tmp_path / "d") / "x").mkdir()
    test_utils.print_directory(tmp_path)
    test_utils.erase_and_create_empty(tmp_path / "d")
    assert list((tmp_path / "d").iterdir()) == []


def test_test_utils_make_what_an_interrupted_save_leaves(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for name, library in {"ours": face, "theirs": orbax}.items():
        final = epath.Path(tmp_path / name / "5")
        at = library.path.atomicity._get_tmp_directory(final)
        store = library.metadata.metadata_store(enable_write=True, blocking_write=True)
        (at / "old").mkdir(parents=True)
        library.test_utils.create_tmp_directory(at, final, path_permission_mode=0o700, metadata_store=store)
        begun = store.read(at / "_CHECKPOINT_METADATA")["init_timestamp_nsecs"]
        finished = library.utils.is_tmp_checkpoint(at), begun > 0, at.stat().mode & 0o777
        final.mkdir()
        with pytest.raises(FileExistsError):
            library.test_utils.create_tmp_directory(final, final)
        found[name] = at.name, sorted(one.name for one in at.iterdir()), finished
    assert found["ours"] == found["theirs"]


def test_test_utils_give_the_handlers_back_that_were_registered_before() -> None:
    types: list[Any] = [int, np.ndarray, jax.Array]
    before = [face.type_handlers.get_type_handler(ty) for ty in types]
    with test_utils.ocdbt_checkpoint_context(use_ocdbt=True, ts_context=None):
        assert not {*map(id, before)} & {id(face.type_handlers.get_type_handler(ty)) for ty in types}
    assert [face.type_handlers.get_type_handler(ty) for ty in types] == before
