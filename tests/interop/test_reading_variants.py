"""What Orbax, TensorStore, flax can write beyond their defaults, or early Orbax did, is read bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions
from orbax.checkpoint.experimental import v1 as ocp_v1

from penstock.errors import CorruptCheckpointError, IncompleteCheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning"),
]

RNG = np.random.default_rng(0)
WIDE = RNG.integers(0, 9, (24, 16)).astype(np.float32)


class Point(NamedTuple):
    x: Any
    y: Any


class Nothing(NamedTuple):
    pass


def on(mesh: Any, *axes: str | None) -> Any:
    """A sharding over a mesh."""
    return NamedSharding(mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]  # jax's


def struct(shape: Any, dtype: Any, sharding: Any = None) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]  # jax's


@pytest.mark.thinned(2)
@pytest.mark.parametrize("use_ocdbt", [True, False], ids=["ocdbt", "directories"])
@pytest.mark.parametrize("use_zarr3", [True, False], ids=["zarr3", "zarr2"])
@pytest.mark.parametrize("use_compression", [True, False], ids=["zstd", "plain"])
@pytest.mark.parametrize(
    "save_args",
    [
        ocp.SaveArgs(),
        ocp.SaveArgs(chunk_byte_size=200),
        ocp.SaveArgs(chunk_byte_size=100, shard_axes=(1,)),
        ocp.SaveArgs(dtype=np.dtype(jnp.bfloat16)),
    ],
    ids=["whole", "chunks", "axis 1", "bfloat16"],
)
def test_every_way_in_which_orbax_stores_an_array(
    use_ocdbt: bool,
    use_zarr3: bool,
    use_compression: bool,
    save_args: Any,
    tmp_path: Path,
    ours: Any,
    compare: Any,
) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    sharding, other = on(mesh, "x", "y"), on(mesh, "y")
    tree = {"device": jax.device_put(WIDE, sharding), "host": WIDE, "zero": np.zeros((6, 4), np.float32)}
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=use_ocdbt, use_zarr3=use_zarr3, use_compression=use_compression
    )
    with ocp.Checkpointer(handler) as checkpointer:
        args = ocp.args.PyTreeSave(tree, save_args=jax.tree.map(lambda _: save_args, tree))
        checkpointer.save(tmp_path / "a", args)

    dtype = save_args.dtype or np.float32
    expected = jax.tree.map(lambda array: array.astype(dtype), tree)
    compare(ours.restore(tmp_path / "a"), expected)
    compare(ours.restore(tmp_path / "a", like=expected), expected)
    shards = expected | {"device": struct((24, 16), dtype, other)}
    found = ours.restore(tmp_path / "a", like=shards)["device"]
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected["device"]))


V2 = {
    "none": None,
    "zstd": {"id": "zstd", "level": 3},
    "gzip": {"id": "gzip", "level": 5},
    "zlib": {"id": "zlib", "level": 5},
    "bz2": {"id": "bz2", "level": 1},
    "blosc": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
}
LITTLE: Any = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD: Any = {"name": "zstd", "configuration": {"level": 1}}
V3: dict[str, Any] = {
    "none": [LITTLE],
    "big endian": [{"name": "bytes", "configuration": {"endian": "big"}}],
    "zstd": [LITTLE, ZSTD],
    "gzip": [LITTLE, {"name": "gzip", "configuration": {"level": 5}}],
    "blosc": [
        LITTLE,
        {"name": "blosc", "configuration": {"cname": "zstd", "clevel": 3, "shuffle": "shuffle"}},
    ],
    "crc32c": [LITTLE, {"name": "crc32c"}],
    "transpose": [{"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE],
    "subchunks": [
        {"name": "sharding_indexed", "configuration": {"chunk_shape": [4, 2], "codecs": [LITTLE, ZSTD]}}
    ],
    "plain subchunks": [
        {
            "name": "sharding_indexed",
            "configuration": {"chunk_shape": [4, 2], "codecs": [LITTLE], "index_location": "start"},
        }
    ],
}
FORMATS = [*[("zarr", name) for name in V2], *[("zarr3", name) for name in V3]]


def write_array(folder: Path, name: str, array: Any, driver: str, codec: str, *, ocdbt: bool) -> None:
    base = f"file://{folder}/"
    kvstore: Any = {"driver": "ocdbt", "base": base, "path": f"{name}/"} if ocdbt else f"{base}{name}/"
    metadata: Any = (
        {"compressor": V2[codec], "chunks": [8, 8], "dtype": "<f4", "fill_value": 0.0}
        if driver == "zarr"
        else {
            "codecs": V3[codec],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8, 8]}},
        }
    )
    spec = {"driver": driver, "kvstore": kvstore, "metadata": metadata, "create": True}
    options: Any = {"dtype": array.dtype, "shape": array.shape}
    ts.open(spec, **options).result().write(array).result()


@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "directories"])
@pytest.mark.parametrize(("driver", "codec"), FORMATS)
def test_every_codec_and_chunks_that_were_never_written(
    driver: str, codec: str, ocdbt: bool, tmp_path: Path, ours: Any
) -> None:
    """TensorStore, unless told otherwise, writes no chunk that is all zeros."""
    sparse = WIDE.copy()
    sparse[8:, :8] = 0
    for name, array in {"a.0": WIDE, "a.1": sparse}.items():
        write_array(tmp_path, name, array, driver, codec, ocdbt=ocdbt)
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    entries = {
        f"('a', '{at}')": {
            "key_metadata": [{"key": "a", "key_type": 2}, {"key": str(at), "key_type": 1}],
            "value_metadata": value,
        }
        for at in range(2)
    }
    document = {"tree_metadata": entries, "use_ocdbt": ocdbt, "use_zarr3": driver == "zarr3"}
    (tmp_path / "_METADATA").write_text(json.dumps(document))

    for tree in ours.restore(tmp_path), ours.restore(tmp_path, like={"a": [WIDE, WIDE]}):
        np.testing.assert_array_equal(tree["a"], [WIDE, sparse])

    (tmp_path / "_METADATA").write_text(json.dumps(document | {"store_array_data_equal_to_fill_value": True}))
    with pytest.raises(CorruptCheckpointError, match=r"chunk 'a.1/.*' is missing \(leaf \['a'\]\[1\]\)"):
        ours.restore(tmp_path)


def test_without_any_document_names_tell_the_structure(tmp_path: Path, ours: Any) -> None:
    for name in ("params.w", "params.b.0", "step"):
        write_array(tmp_path, name, WIDE, "zarr", "zstd", ocdbt=False)

    found = ours.restore(tmp_path)
    np.testing.assert_array_equal(found["params"]["b"]["0"], WIDE)
    assert {leaf.name for leaf in ours.metadata(tmp_path).leaves} == {"params.w", "params.b.0", "step"}
    like = {"params": {"w": jnp.asarray(WIDE), "b": [WIDE]}, "step": WIDE}
    found = ours.restore(tmp_path, like=like)
    assert isinstance(found["params"]["b"], list)
    np.testing.assert_array_equal(found["params"]["w"], WIDE)


def test_tuples_come_back_where_they_were_recorded(tmp_path: Path, ours: Any, compare: Any) -> None:
    leaf = jnp.ones(2)
    tree = {
        "dict": {"0": 1, "t": (leaf, [np.arange(2), (3.5,)], ())},
        "empty": Nothing(),
        "list": [(1,), {}],
        "named": Point(leaf, {"q": (1, "text")}),
    }
    options = PyTreeMetadataOptions(support_rich_types=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(pytree_metadata_options=options)) as checkpointer:
        checkpointer.save(tmp_path / "a", ocp.args.PyTreeSave(tree))
        checkpointer.save(tmp_path / "b", ocp.args.PyTreeSave((leaf, [leaf])))

    expected = {
        "dict": {"0": 1, "t": (leaf, [np.arange(2), (3.5,)], ())},
        "empty": None,
        "list": [(1,), {}],
        "named": {"x": leaf, "y": {"q": (1, "text")}},
    }
    compare(ours.restore(tmp_path / "a"), expected)
    compare(ours.restore(tmp_path / "a", like=tree), tree)
    compare(ours.restore(tmp_path / "b"), (leaf, [leaf]))
    described = ours.metadata(tmp_path / "a").tree
    assert type(described["dict"]["t"]) is tuple
    assert type(described["dict"]["t"][1]) is list
    assert described["dict"]["t"][1][1][0].key_path == "['dict']['t'][1][1][0]"


PACKED = {
    "array": WIDE,
    "bf": np.asarray(jnp.arange(3, dtype=jnp.bfloat16)),
    "complex": 1 - 2j,
    "empties": {"d": {}, "l": [], "n": None, "zero": np.zeros((0, 3), np.int16)},
    "f": 2.5,
    "i": [0, -1, 127, 128, -33, 2**16, -(2**40), 2**63 - 1],
    "s": ["", "text", "ü" * 300],
    "scalar": np.float32(1.5),
    "yes": True,
}


def test_a_msgpack_file_of_everything(tmp_path: Path, ours: Any, compare: Any) -> None:
    (tmp_path / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(PACKED))

    compare(ours.restore(tmp_path), PACKED | {"scalar": 1.5})
    compare(ours.restore(tmp_path, like=PACKED), PACKED)
    like: Any = PACKED | {"array": jnp.zeros((24, 16)), "bf": struct((3,), jnp.bfloat16), "f": np.zeros(())}
    compare(ours.restore(tmp_path, like=like)["array"], jnp.asarray(WIDE))


@pytest.mark.parametrize("chunk_bytes", [4, 20, 256, 1000])
def test_arrays_cut_into_chunks(
    chunk_bytes: int, tmp_path: Path, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", chunk_bytes)
    cube = RNG.integers(0, 99, (5, 6, 8)).astype(np.int16)
    (tmp_path / "checkpoint").write_bytes(flax.serialization.msgpack_serialize({"a": {"b": cube}, "c": 1}))

    assert ours.restore(tmp_path)["c"] == 1
    np.testing.assert_array_equal(ours.restore(tmp_path)["a"]["b"], cube)
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    for axes in ((None, "x", "y"), (None, "x"), (None, None, "y")):
        wanted = struct(cube.shape, cube.dtype, on(mesh, *axes))
        found = ours.restore(tmp_path, like={"a": {"b": wanted}, "c": 0})["a"]["b"]
        np.testing.assert_array_equal(np.asarray(found), cube)
    (leaf, _) = ours.metadata(tmp_path).leaves
    assert (leaf.kind, leaf.shape, leaf.dtype) == ("np.ndarray", cube.shape, "int16")


NAMES = ["plain", "a/b", "a~0b", "t~1", "x//y", " ", "1", "ü"]


def test_strings_under_any_name(tmp_path: Path, ours: Any) -> None:
    tree = {"n": {name: f"value of {name}" for name in NAMES}, "l": ["x", {"": "empty"}]}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", tree)

    assert ours.restore(tmp_path / "a") == ours.restore(tmp_path / "a", like=tree) == tree


class TestSteps:
    @pytest.mark.parametrize("prefix", [None, "step"])
    @pytest.mark.parametrize("length", [None, 6])
    def test_the_latest_of_a_manager(
        self, prefix: str | None, length: int | None, tmp_path: Path, ours: Any
    ) -> None:
        options = ocp.CheckpointManagerOptions(step_prefix=prefix, step_format_fixed_length=length)
        with ocp.CheckpointManager(tmp_path, options=options, metadata={"m": 1}) as manager:
            for step in (1, 9, 10):
                manager.save(step, args=ocp.args.StandardSave({"a": np.full(2, step)}))

        np.testing.assert_array_equal(ours.restore(tmp_path)["a"], [10, 10])
        np.testing.assert_array_equal(ours.restore(tmp_path, item="default")["a"], [10, 10])
        assert ours.metadata(tmp_path).root_custom_metadata == {"m": 1}

    def test_of_several_items_the_tree_is_meant(self, tmp_path: Path, ours: Any) -> None:
        with ocp.CheckpointManager(tmp_path, item_names=("cfg", "train")) as manager:
            args = ocp.args.Composite(
                cfg=ocp.args.JsonSave({"a": [1, None]}), train=ocp.args.PyTreeSave({"w": np.arange(2)})
            )
            manager.save(3, args=args)

        np.testing.assert_array_equal(ours.restore(tmp_path)["w"], [0, 1])
        assert ours.restore(tmp_path, item="cfg") == ours.restore(tmp_path / "3" / "cfg") == {"a": [1, None]}

    def test_v1_training(self, tmp_path: Path, ours: Any) -> None:
        with ocp_v1.training.Checkpointer(str(tmp_path)) as checkpointer:
            for step in (2, 11):
                checkpointer.save(step, {"a": np.full(2, step)})

        np.testing.assert_array_equal(ours.restore(tmp_path)["a"], [11, 11])

    def test_a_step_that_orbax_never_finished_is_not_taken(self, tmp_path: Path, ours: Any) -> None:
        """With a commit file instead of a rename, as on object stores."""
        mode = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
        options = ocp.CheckpointManagerOptions(atomicity_options=mode)
        with ocp.CheckpointManager(tmp_path, options=options) as manager:
            for step in (1, 2):
                manager.save(step, args=ocp.args.StandardSave({"a": np.full(2, step)}))
        np.testing.assert_array_equal(ours.restore(tmp_path)["a"], [2, 2])

        (tmp_path / "2" / "commit_success.txt").unlink()
        document = json.loads((tmp_path / "2" / "_CHECKPOINT_METADATA").read_text())
        document["commit_timestamp_nsecs"] = None
        (tmp_path / "2" / "_CHECKPOINT_METADATA").write_text(json.dumps(document))

        np.testing.assert_array_equal(ours.restore(tmp_path)["a"], [1, 1])
        with pytest.raises(IncompleteCheckpointError, match="2: a save was interrupted here"):
            ours.restore(tmp_path / "2")


def test_partial_saves_once_they_are_finalized(tmp_path: Path, ours: Any, compare: Any) -> None:
    path = str(tmp_path / "a")
    ocp_v1.partial.save(path, {"a": jnp.arange(4.0), "s": "text"})
    ocp_v1.partial.save(path, {"b": np.arange(3), "l": {"c": jnp.ones(2)}})

    with pytest.raises(IncompleteCheckpointError, match=r"there is only 'a\.partial_save'"):
        ours.restore(path)
    pending = next((tmp_path / "a.partial_save").iterdir())
    for unfinished in (tmp_path / "a.partial_save", pending, pending / "state"):
        with pytest.raises(IncompleteCheckpointError, match="its name says so"):
            ours.restore(unfinished)

    ocp_v1.partial.finalize(path)
    expected = {"a": jnp.arange(4.0), "b": np.arange(3), "l": {"c": jnp.ones(2)}, "s": "text"}
    compare(ours.restore(path), expected)


@pytest.mark.parametrize("legacy", [True, False])
def test_random_keys_of_items(legacy: bool, tmp_path: Path, ours: Any, compare: Any) -> None:
    generator: Any = np.random.RandomState(5)  # what Orbax saves
    state = generator.get_state(legacy=legacy)
    keys = {"k": jax.random.key(3), "raw": jax.random.PRNGKey(3)}
    with ocp.CheckpointManager(tmp_path) as manager:
        args = ocp.args.Composite(
            n=ocp.args.NumpyRandomKeySave(state),
            **{name: ocp.args.JaxRandomKeySave(key) for name, key in keys.items()},
        )
        manager.save(0, args=args)

    for name, key in keys.items():
        compare(ours.restore(tmp_path, item=name), key)
    found = ours.restore(tmp_path, item="n")
    assert type(found) is (tuple if legacy else dict)
    again = np.random.RandomState(0)
    again.set_state(found)
    assert again.random_sample() == np.random.RandomState(5).random_sample()
