"""Items, replicas and rich types of penstock, read by Orbax 0.12.8; and Orbax's items by penstock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions
from orbax.checkpoint.experimental import v1 as ocp_v1

import penstock
from penstock import SaveFormat
from penstock.handlers import Composite
from penstock.items import Array, Json, NumpyRandomKey, Proto, PyTree, RandomKey

Compare = Callable[[Any, Any], None]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning:orbax"),
]

FORMATS = {
    "ocdbt": SaveFormat(),
    "directories": SaveFormat(ocdbt=False),
    "zarr3 zstd": SaveFormat(zarr=3, codec="zstd", ocdbt_target_data_file_size=5000),
}
Struct: Any = pytest.importorskip("google.protobuf.struct_pb2").Struct


class Pair(NamedTuple):
    left: Any
    right: Any


class Nothing(NamedTuple):
    pass


def message() -> Any:
    made = Struct()
    made.update({"a": 1})
    return made


def legacy_state() -> Any:
    return np.random.RandomState(3).get_state()


STATE = {"a": np.arange(4.0), "b": [np.ones((30, 300)), 3], "s": "x"}


@pytest.fixture(scope="module", params=FORMATS)
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of steps with one, of every kind of item."""
    path = tmp_path_factory.mktemp("items")
    items = Composite(
        state=PyTree(STATE, custom_metadata={"x": 1}),
        config=Json({"a": [1, None]}),
        arr=Array(np.arange(3)),
        jarr=Array(jnp.arange(3)),
        number=Array(5),
        key=RandomKey(jax.random.key(1)),
        raw=RandomKey(jax.random.PRNGKey(1)),
        legacy=NumpyRandomKey(legacy_state()),
        proto=Proto(message()),
        metrics=Json({"loss": 1.0}),
    )
    with penstock.sync.Checkpointer(save_format=FORMATS[request.param]) as checkpointer:
        checkpointer.save(path / "7", items, custom_metadata={"step": 7}).result()

    return path


ARGS: dict[str, tuple[Any, Any]] = {
    "state": (ocp.args.PyTreeRestore(), STATE),
    "config": (ocp.args.JsonRestore(), {"a": [1, None]}),
    "arr": (ocp.args.ArrayRestore(), np.arange(3)),
    "number": (ocp.args.ArrayRestore(), 5),
    "legacy": (ocp.args.NumpyRandomKeyRestore(), None),
    "proto": (ocp.args.ProtoRestore(Struct), message()),
}


def test_orbax_v0_reads_items_with_args(root: Path, compare: Compare) -> None:
    def composite(name: str, args: Any) -> Any:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(root / "7", args=ocp.args.Composite(**{name: args}))[name]

    for name, (args, expected) in ARGS.items():
        if name == "proto":
            assert composite(name, args) == expected
        elif name == "legacy":
            assert all(
                np.array_equal(*pair) for pair in zip(composite(name, args), legacy_state(), strict=True)
            )
        else:
            compare(composite(name, args), expected)

    compare(composite("jarr", ocp.args.ArrayRestore()), jnp.arange(3))
    compare(composite("key", ocp.args.JaxRandomKeyRestore()), jax.random.key(1))
    compare(composite("raw", ocp.args.JaxRandomKeyRestore()), jax.random.PRNGKey(1))


def test_orbax_s_manager_reads_items(root: Path, tmp_path: Path, compare: Compare) -> None:
    with ocp.CheckpointManager(root) as manager:
        found = manager.restore(7, args=ocp.args.Composite(state=ocp.args.PyTreeRestore(), metrics=None))
        compare(found["state"], STATE)
        assert manager.metadata(7).custom_metadata == {"step": 7}
        assert manager.item_metadata(7)["state"].custom_metadata == {"x": 1}

    penstock.sync.save(tmp_path / "7", Composite(default=STATE, metrics=Json({"loss": 1.0})))
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 7
        compare(manager.restore(7), STATE)


def test_orbax_v1_reads_items(root: Path, compare: Compare) -> None:
    compare(ocp_v1.load(str(root / "7")), STATE)
    found = ocp_v1.load_checkpointables(str(root / "7"), {"state": None, "config": None})
    compare(found, {"state": STATE, "config": {"a": [1, None]}})
    with ocp_v1.training.Checkpointer(str(root)) as checkpointer:
        compare(checkpointer.load(7), STATE)


def test_v1_without_naming_the_items(tmp_path: Path, compare: Compare) -> None:
    penstock.sync.save(tmp_path / "a", Composite(state=STATE, ema={"x": np.ones(2)}))
    compare(ocp_v1.load_checkpointables(str(tmp_path / "a")), {"state": STATE, "ema": {"x": np.ones(2)}})


def test_items_of_orbax(tmp_path: Path, compare: Compare) -> None:
    args = ocp.args
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        items = args.Composite(
            s=args.StandardSave({"a": np.ones(2)}),
            j=args.JsonSave({"b": 1}),
            a=args.ArraySave(np.arange(3)),
            k=args.JaxRandomKeySave(jax.random.key(0)),
            n=args.NumpyRandomKeySave(legacy_state()),
            p=args.ProtoSave(message()),
        )
        checkpointer.save(tmp_path / "v0", args=items)

    found = penstock.sync.restore_items(tmp_path / "v0", like={"p": Struct})
    assert found.pop("p") == message()
    assert all(np.array_equal(*pair) for pair in zip(found.pop("n"), legacy_state(), strict=True))
    compare(found, {"a": np.arange(3), "j": {"b": 1}, "k": jax.random.key(0), "s": {"a": np.ones(2)}})

    ocp_v1.save_checkpointables(str(tmp_path / "v1"), {"state": {"a": np.ones(2)}, "x": {"b": jnp.ones(2)}})
    compare(
        penstock.sync.restore_items(tmp_path / "v1"), {"state": {"a": np.ones(2)}, "x": {"b": jnp.ones(2)}}
    )


# Replicas


def place(value: Any, mesh: tuple[int, ...], *axes: Any) -> Any:
    devices: Any = np.array(jax.devices()).reshape(mesh)
    sharding = NamedSharding(Mesh(devices, ("x", "y")[: len(mesh)]), PartitionSpec(*axes))  # type: ignore[no-untyped-call]  # jax's
    return jax.device_put(value, sharding)


def replicated() -> dict[str, Any]:
    def numbers(*shape: int) -> Any:
        return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)

    return {
        "both": place(numbers(8, 12), (2, 4), "x", "y"),
        "columns": place(numbers(6, 8), (2, 4), None, "y"),
        "everywhere": place(numbers(8, 12), (2, 4)),
        "neither": place(numbers(3, 5), (2, 4)),
        "rows": place(numbers(8, 12), (2, 4), "x"),
        "scalar": place(numbers(), (8,)),
        "second axis": place(numbers(7, 8), (2, 4)),
    }


@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "directories"])
def test_replicas_write_what_those_of_orbax_would(tmp_path: Path, compare: Compare, ocdbt: bool) -> None:
    value = replicated()
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "theirs", args=ocp.args.PyTreeSave(value))
    form = SaveFormat(ocdbt, replica_parallel=True, replica_parallel_min_bytes=0)
    with penstock.sync.Checkpointer(save_format=form) as ours:
        ours.save(tmp_path / "ours", value).result()
        shapes = [
            {leaf.name: leaf.chunk_shape for leaf in ours.metadata(tmp_path / name).leaves}
            for name in ("ours", "theirs")
        ]

    assert shapes[0] == shapes[1]
    with ocp.PyTreeCheckpointer() as checkpointer:
        compare(checkpointer.restore(tmp_path / "ours"), value)
    compare(ocp_v1.load(str(tmp_path / "ours")), value)
    compare(penstock.sync.restore(tmp_path / "ours"), value)


# Rich types


@pytest.fixture
def rich() -> Iterator[Any]:
    options = PyTreeMetadataOptions(support_rich_types=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(pytree_metadata_options=options)) as checkpointer:
        yield checkpointer


def test_rich_types_are_recorded_as_orbax_does(tmp_path: Path, rich: Any, compare: Compare) -> None:
    value = {
        "dict": {"x": (1,), "y": np.ones(1)},
        "empties": [(), {}, [], None, Nothing()],
        "list": [1, (2, "text"), [3, (4, (5,))]],
        "pair": Pair(jnp.ones(3), Pair((1, 2), [])),
    }
    rich.save(tmp_path / "theirs", args=ocp.args.PyTreeSave(value))
    with penstock.sync.Checkpointer(save_format=SaveFormat(rich_types=True)) as ours:
        ours.save(tmp_path / "ours", value).result()
        ours.save(tmp_path / "items", Composite(state=value)).result()

    recorded = [
        json.loads((tmp_path / name / "_METADATA").read_bytes()) for name in ("theirs", "ours", "items/state")
    ]
    for name in ("tree_metadata", "value_metadata_tree"):
        texts = [one[name] if name == "tree_metadata" else json.loads(one[name]) for one in recorded]
        assert texts[0] == texts[1] == texts[2]

    found, theirs = rich.restore(tmp_path / "ours"), rich.restore(tmp_path / "theirs")
    assert found["list"] == value["list"]
    assert type(found["pair"]).__name__ == type(theirs["pair"]).__name__
    assert found["pair"]._fields == ("left", "right")
    compare(ocp_v1.load(str(tmp_path / "ours")), ocp_v1.load(str(tmp_path / "theirs")))
    with ocp.PyTreeCheckpointer() as checkpointer:
        compare(checkpointer.restore(tmp_path / "ours"), checkpointer.restore(tmp_path / "theirs"))
