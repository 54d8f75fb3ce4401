"""A restore returns exactly what the target asks for, or raises one error with every difference."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax.core import freeze
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from tests.byte_counting import files_of_arrays
from tests.xla_settings import xla_flags

import penstock
from penstock import Checkpointer
from penstock.errors import StructureMismatchError
from penstock.handlers import LocalStore
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

AssertSame = Callable[[Any, Any], None]
RoundTrip = Callable[..., Any]
T = TypeVar("T")


def sharding(shape: tuple[int, ...], *axes: Any, first: int = 0) -> NamedSharding:
    """Make a sharding over as many devices as `shape` has, starting with the device of this number."""
    count = int(np.prod(shape))
    devices: Any = np.array(jax.devices()[first : first + count])
    mesh = Mesh(devices.reshape(shape), ("x", "y")[: len(shape)])
    return NamedSharding(mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]  # jax's


def struct(shape: tuple[int, ...], dtype: Any, **options: Any) -> Any:
    make: Any = jax.ShapeDtypeStruct  # its constructor is untyped
    return make(shape, dtype, **options)


class Pair(NamedTuple):
    left: Any
    right: Any


class Nothing(NamedTuple):
    pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    weight: Any
    step: Any
    name: str = dataclasses.field(default="model", metadata={"static": True})


@flax.struct.dataclass
class TrainState:
    params: Any
    opt: Any
    label: str = flax.struct.field(pytree_node=False, default="flax")  # type: ignore[no-untyped-call]  # flax's


class Module(eqx.Module):
    layers: list[Any]
    scale: Any
    activation: Callable[..., Any] = eqx.field(static=True, default=jnp.tanh)


class Boxed(Generic[T]):
    """Registered without key paths."""

    def __init__(self, value: T, extra: Any) -> None:
        self.value = value
        self.extra = extra


class Keyed(Boxed[T]):
    """Registered with key paths."""


jax.tree_util.register_pytree_node(
    Boxed, lambda box: ((box.value, box.extra), None), lambda _, children: Boxed(*children)
)
jax.tree_util.register_pytree_with_keys(
    Keyed,
    lambda box: (
        ((jax.tree_util.GetAttrKey("value"), box.value), (jax.tree_util.DictKey("extra"), box.extra)),
        None,
    ),
    lambda _, children: Keyed(*children),
)


@functools.cache
def adam() -> Any:
    params = {"b": jnp.zeros(3), "w": jnp.ones((2, 3))}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.ema(0.9))
    state = optimizer.init(params)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes float and int32
        updates, state = optimizer.update(params, state, params)
    return {"params": optax.apply_updates(params, updates), "opt": state}


@functools.cache
def linear() -> Any:
    key = jax.random.key(0)
    module = Module([eqx.nn.Linear(2, 3, key=key), eqx.nn.MLP(2, 1, 4, 1, key=key)], jnp.float32(2))
    return eqx.filter(module, eqx.is_array)


TREES: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"b": jnp.arange(3), "a": {"c": np.arange(2.0)}},
    "int keys": lambda: {1: jnp.arange(3), 10: 1.5, 2: "two"},
    "ordered dict": lambda: collections.OrderedDict(z=jnp.arange(3), a=1),
    "default dict": lambda: collections.defaultdict(list, {"a": 1}),
    "list": lambda: [jnp.arange(3), [np.arange(2)], 1, *range(12)],
    "tuple": lambda: (jnp.arange(3), (1, 2.5), (True,)),
    "namedtuple": lambda: Pair(Pair(1, jnp.ones(2)), {"deep": Pair("a", 2)}),
    "dataclass": lambda: State(jnp.ones((2, 2)), 7),
    "flax struct": lambda: TrainState({"w": jnp.ones(2)}, (Nothing(), jnp.int32(3))),
    "flax frozen dict": lambda: freeze({"w": {"kernel": jnp.ones(2)}}),
    "optax": adam,
    "equinox": linear,
    "without keys": lambda: Boxed(jnp.ones(2), Boxed(1, 2)),
    "with keys": lambda: Keyed(jnp.ones(2), Keyed(1, [2])),
    "bare array": lambda: jnp.arange(6).reshape(2, 3),
    "bare int": lambda: 5,
    "bare str": lambda: "text",
    "bare none": lambda: None,
    "bare empty": dict,
    "no leaves": lambda: TrainState({}, ()),
    "nothing at all": lambda: freeze({}),
    "empties": lambda: {"d": {}, "l": [], "n": None, "nt": Nothing(), "t": (), "x": [None, {}, [(), 1]]},
    "keys": lambda: {"key": jax.random.key(1), "keys": jax.random.split(jax.random.key(2, impl="rbg"), 3)},
    "scalars": lambda: [True, False, 0, -(2**63), 2**63 - 1, 1.5, -0.0, float("inf"), 1 + 2j, np.float16(1)],
    "small types": lambda: [
        jnp.arange(5).astype(jnp.int4),
        np.arange(3).astype(ml_dtypes.float8_e4m3fn),
        jnp.ones(2, jnp.bfloat16),
        np.zeros((0, 3), np.int8),
        jnp.zeros((2, 0)),
        np.array(3, np.uint16),
    ],
}


@pytest.fixture
def round_trip(tmp_path: Path) -> RoundTrip:
    """Save a tree, and restore it, with `like` if it is given."""

    async def save_and_restore(tree: Any, **options: Any) -> Any:
        async with Checkpointer() as checkpointer:
            await (await checkpointer.save(tmp_path / "ckpt", tree))
            return await checkpointer.restore(tmp_path / "ckpt", **options)

    return save_and_restore


def abstract(tree: Any, *, placed: bool) -> Any:
    def abstract_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return type(leaf)
        return struct(leaf.shape, leaf.dtype, sharding=leaf.sharding if placed else None)

    return jax.tree.map(abstract_leaf, tree)


class TestNodes:
    @pytest.mark.thinned(3)
    @pytest.mark.parametrize("name", TREES)
    async def test_a_target_gives_its_own_nodes_whatever_its_leaves_are(
        self, tmp_path: Path, assert_same: AssertSame, name: str
    ) -> None:
        tree = TREES[name]()
        types = jax.tree.map(lambda leaf: jax.Array if isinstance(leaf, jax.Array) else type(leaf), tree)
        committed = jax.tree.map(
            lambda leaf: jax.device_put(leaf, leaf.sharding) if isinstance(leaf, jax.Array) else leaf, tree
        )
        async with Checkpointer() as checkpointer:
            await (await checkpointer.save(tmp_path / "a", tree))
            restore = checkpointer.restore
            assert_same(await restore(tmp_path / "a", like=tree), tree)
            assert_same(await restore(tmp_path / "a", like=types), tree)
            assert_same(await restore(tmp_path / "a", like=abstract(tree, placed=False)), tree)
            # A target that names a sharding gets committed arrays.
            assert_same(await restore(tmp_path / "a", like=abstract(tree, placed=True)), committed)

    async def test_nodes_are_matched_by_name_and_not_by_kind(
        self, round_trip: RoundTrip, assert_same: AssertSame
    ) -> None:
        like = State((int, float), Pair([0, 0], None), name="other")
        saved = {"weight": [1, 2.5], "step": {"left": (1, 2), "right": None}}
        expected = State((1, 2.5), Pair([1, 2], None), name="other")
        assert_same(await round_trip(saved, like=like), expected)

    async def test_the_target_is_left_as_it_was(self, round_trip: RoundTrip) -> None:
        like: dict[str, Any] = {"a": np.zeros(3), "b": jnp.zeros(3), "e": {}}
        found = await round_trip({"a": np.ones(3), "b": jnp.ones(3), "e": {}}, like=like)
        assert like["a"].tolist() == [0, 0, 0]
        found["a"][0] = 5
        found["e"]["new"] = 1
        assert like == {"a": like["a"], "b": like["b"], "e": {}}

    async def test_a_donated_target_is_good_enough(
        self, round_trip: RoundTrip, assert_same: AssertSame
    ) -> None:
        tree, like = {"w": jnp.arange(3)}, {"w": jnp.zeros(3, jnp.int32)}
        like["w"].delete()
        assert_same(await round_trip(tree, like=like), tree)

    async def test_without_a_target_there_are_dicts_and_lists(
        self, round_trip: RoundTrip, assert_same: AssertSame
    ) -> None:
        tree = {
            "boxed": Boxed(1, Boxed(2, 3)),
            "keyed": Keyed(1, 2),
            "nt": Pair(1, {0: Nothing(), 1: ()}),
            "state": State(jnp.ones(2), np.arange(3)),
            "t": (1, (2.5, "x"), [], {}, None),
        }
        expected = {
            "boxed": [1, [2, 3]],
            "keyed": {"value": 1, "extra": 2},
            "nt": {"left": 1, "right": {"0": None, "1": ()}},
            "state": {"weight": jnp.ones(2), "step": np.arange(3)},
            "t": [1, [2.5, "x"], [], {}, None],
        }
        assert_same(await round_trip(tree), expected)


async def test_the_target_chooses_among_types_of_the_same_bits(
    round_trip: RoundTrip, assert_same: AssertSame
) -> None:
    three = np.arange(3, dtype=np.int32)
    cases: list[tuple[Any, Any, Any]] = [  # saved, wanted, found
        (jnp.arange(3), np.ndarray, three),
        (jnp.arange(3), np.zeros(3, np.int32), three),
        (three, jax.Array, jnp.arange(3)),
        (three, jnp.zeros(3, jnp.int32), jnp.arange(3)),
        (jnp.int32(3), int, 3),
        (jnp.float32(1.5), float, 1.5),
        (np.array(True), bool, True),
        (3, np.int64, np.int64(3)),
        (3, np.zeros((), np.int64), np.array(3)),
        (7, 0, 7),
        (True, bool, True),
        (np.float32(2), jnp.float32(0), jnp.float32(2)),
        (np.float32(2), np.float32, np.float32(2)),
        (np.int8(2), int, 2),
        ("text", "another", "text"),
        ("text", str, "text"),
        (jax.random.key(3), np.ndarray, np.array([0, 3], np.uint32)),
        (jax.random.key(3), jnp.zeros(2, jnp.uint32), jax.random.key_data(jax.random.key(3))),
    ]
    saved, like, expected = map(list, zip(*cases, strict=True))
    assert_same(await round_trip(saved, like=like), expected)


async def test_nothing_is_cast(round_trip: RoundTrip) -> None:
    cases: list[tuple[Any, Any, str]] = [  # saved, wanted, what differs
        (2.5, int, "dtype"),
        (2, float, "dtype"),
        (True, int, "dtype"),
        (1, bool, "dtype"),
        (1, str, "type"),
        ("1", int, "type"),
        (None, int, "type"),
        (jnp.ones(2), None, "type"),
        (jnp.ones(2), {}, "type"),
        (jnp.ones(2), float, "shape"),
        (jnp.ones(2), jnp.ones(3), "shape"),
        (jnp.ones(2), np.ones((2, 1), np.float32), "shape"),
        (jnp.ones(2), jnp.ones(2, jnp.bfloat16), "dtype"),
        (np.ones(2), jnp.ones(2), "dtype"),
        (jax.random.key(1), jax.random.key(1, impl="rbg"), "dtype"),
        ("text", jnp.ones(2), "type"),
    ]
    saved, like, kinds = map(list, zip(*cases, strict=True))
    with pytest.raises(StructureMismatchError) as caught:
        await round_trip(saved, like=like)

    found = [(difference.kind, difference.key_path) for difference in caught.value.differences]
    assert found == [(kind, f"[{at}]") for at, kind in enumerate(kinds)]
    assert all(difference.in_like and difference.on_disk for difference in caught.value.differences)


class TestShardings:
    ARRAY = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)

    @pytest.mark.parametrize(
        "wanted",
        [
            sharding((8,), "x"),
            sharding((2, 4), "y", "x"),
            sharding((4, 2), ("x", "y"), None),
            sharding((2, 2), None, "y"),
            sharding((2,), "x", first=5),
            sharding((8,)),
            SingleDeviceSharding(jax.devices()[6]),
        ],
        ids=str,
    )
    async def test_the_target_has_the_say(
        self, round_trip: RoundTrip, assert_same: AssertSame, wanted: Any
    ) -> None:
        saved = jax.device_put(self.ARRAY, sharding((4, 2), "x", "y"))
        expected = jax.device_put(self.ARRAY, wanted)
        abstract = struct((16, 8), jnp.float32, sharding=wanted)
        like = [abstract, jax.device_put(np.zeros((16, 8), np.float32), wanted)]
        assert_same(await round_trip([saved, saved], like=like), [expected, expected])

    @pytest.mark.parametrize("like", [{}, {"like": jax.Array}, {"like": struct((16, 8), jnp.float32)}])
    async def test_a_leaf_without_a_sharding_in_the_target_gets_the_saved_one(
        self, round_trip: RoundTrip, assert_same: AssertSame, like: dict[str, Any]
    ) -> None:
        array = jax.device_put(self.ARRAY, sharding((2, 3), "x", None, first=2))
        assert_same(await round_trip(array, **like), array)

    async def test_a_sharding_that_does_not_divide_the_shape_is_a_difference(
        self, round_trip: RoundTrip
    ) -> None:
        like = struct((6,), jnp.float32, sharding=sharding((4,), "x"))
        with pytest.raises(StructureMismatchError, match="does not fit"):
            await round_trip({"w": jnp.ones(6)}, like={"w": like})


class TestDifferences:
    SAVED: dict[str, Any] = {  # noqa: RUF012  # never changed
        "params": {"encoder": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}, "scale": 1.0},
        "step": 3,
        "tag": "x",
    }

    async def test_all_differences_are_in_one_error(self, round_trip: RoundTrip) -> None:
        like = {
            "params": {"encodr": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}, "scale": np.float32},
            "step": np.ones(2, np.int64),
            "tags": "x",
        }
        with pytest.raises(StructureMismatchError) as caught:
            await round_trip(self.SAVED, like=like)

        error = caught.value
        assert {(difference.kind, difference.key_path) for difference in error.differences} == {
            ("missing", "['params']['encodr']['bias']"),
            ("missing", "['params']['encodr']['kernel']"),
            ("missing", "['tags']"),
            ("unexpected", "['params']['encoder']['bias']"),
            ("unexpected", "['params']['encoder']['kernel']"),
            ("unexpected", "['tag']"),
            ("dtype", "['params']['scale']"),
            ("shape", "['step']"),
        }
        text = str(error)
        assert error.path.endswith("ckpt")
        assert "['encodr']['bias']: in the target (float64[3]), not on disk" in text
        assert "did you mean ['params']['encoder']['bias']?" in text
        assert "['params']['encoder']['kernel']: on disk (float64[2, 3]), not in the target" in text
        assert "did you mean ['params']['encodr']['kernel']?" in text
        assert error.stage == "plan"

    async def test_a_long_list_is_cut_in_the_text_only(self, round_trip: RoundTrip) -> None:
        with pytest.raises(StructureMismatchError, match=r"\n  \.\.\. and 60 more") as caught:
            await round_trip([1.5] * 100, like=[1] * 100)
        assert len(caught.value.differences) == 100

    async def test_list_against_dict_is_a_difference_and_lengths_are(self, round_trip: RoundTrip) -> None:
        with pytest.raises(StructureMismatchError) as caught:
            await round_trip([1, 2, 3], like=[1, 2])
        assert [str(difference) for difference in caught.value.differences] == [
            "unexpected  [2]: on disk (int64[]), not in the target"
        ]

    async def test_wholly_another_tree(self, round_trip: RoundTrip) -> None:
        with pytest.raises(StructureMismatchError) as caught:
            await round_trip(self.SAVED, like=jnp.ones(3))
        kinds = [difference.kind for difference in caught.value.differences]
        assert sorted(kinds) == ["missing", *["unexpected"] * 5]


class TestMetadata:
    TREE: dict[str, Any] = {  # noqa: RUF012  # never changed
        "a": {"w": np.zeros((2, 3), np.float32), "e": [{}, None]},
        "n": 5,
        "s": "text",
    }

    async def test_metadata_opens_no_data_file(self, tmp_path: Path) -> None:
        store = FaultyStore(LocalStore())
        async with Checkpointer(store=store) as checkpointer:
            placed = jax.device_put(np.zeros(16, np.int8), sharding((8,), "x"))
            tree = {**self.TREE, "k": jax.random.key(1), "p": placed}
            await (await checkpointer.save(tmp_path / "a", tree, custom_metadata={"lr": [0.1]}))
            before = len(store.operations)
            found = await checkpointer.metadata(tmp_path / "a")

        looks = {"identity", "kind", "size", "list_directory", "read_file", "hold_reading", "check_links"}
        looks |= {"file_sizes"}
        reads = [operation for operation in store.operations[before:] if operation.name not in looks]
        assert {operation.name for operation in reads} <= {"open_data_file", "file.read_at", "file.close"}
        assert not {operation.path for operation in reads} & files_of_arrays(tmp_path / "a")
        assert (found.path, found.custom_metadata) == (str(tmp_path / "a"), {"lr": [0.1]})
        assert found.committed_at_ns is not None
        assert found.nbytes == 24 + 8 + 8 + 16
        by_name = {leaf.name: leaf for leaf in found.leaves}
        assert list(by_name) == ["a.e.0", "a.e.1", "a.w", "k", "n", "p", "s"]
        kinds = [leaf.kind for leaf in found.leaves]
        assert kinds == ["Dict", "None", "np.ndarray", "jax.Array", "scalar", "jax.Array", "string"]
        w, p = by_name["a.w"], by_name["p"]
        assert (w.key_path, w.shape, w.dtype, w.nbytes, w.sharding) == (
            "['a']['w']",
            (2, 3),
            "float32",
            24,
            None,
        )
        assert (p.shape, p.chunk_shape) == ((16,), (2,))
        assert p.sharding is not None
        assert p.sharding["partition_spec"] == ["x"]
        assert by_name["k"].random_key_impl == "threefry2x32"
        assert found.tree["a"]["e"][1] is by_name["a.e.1"]
        assert found.tree["s"].shape is None


@pytest.mark.process
def test_metadata_touches_no_device(tmp_path: Path) -> None:
    penstock.sync.save(tmp_path / "a", {"w": jnp.ones(3), "k": jax.random.key(1)})
    program = """
import sys, penstock.sync
found = penstock.sync.metadata(sys.argv[1])
from jax._src import xla_bridge
print([leaf.dtype for leaf in found.leaves], xla_bridge.backends_are_initialized())
"""
    assert run_python(program, tmp_path / "a", n_devices=1) == "['uint32', 'float32'] False"


@pytest.mark.process
def test_a_machine_with_other_devices_can_restore_with_and_without_a_target(tmp_path: Path) -> None:
    array = np.arange(16, dtype=np.int32)
    eight = sharding((8,), "x")
    tree = {
        "here": jnp.asarray(array),
        "host": array,
        "key": jax.device_put(jax.random.split(jax.random.key(0), 8), eight),
        "sharded": jax.device_put(array, eight),
        "there": jax.device_put(array, jax.devices()[5]),
    }
    penstock.sync.save(tmp_path / "a", tree)

    program = """
import json, sys, jax, numpy as np, penstock.sync
assert len(jax.devices()) == 1

def kinds(found):
    key = found.pop("key")
    assert key.dtype == jax.random.key(0).dtype and key.shape == (8,)
    assert all(np.asarray(leaf).tolist() == list(range(16)) for leaf in found.values())
    return {name: "jax" if isinstance(leaf, jax.Array) else "numpy" for name, leaf in found.items()}

found = penstock.sync.restore(sys.argv[1])
like = dict.fromkeys(found, jax.Array)
print(json.dumps([kinds(found), kinds(penstock.sync.restore(sys.argv[1], like=like))]))
"""
    without, with_types = json.loads(run_python(program, tmp_path / "a", n_devices=1))
    assert without == {"here": "jax", "host": "numpy", "sharded": "numpy", "there": "jax"}
    assert with_types == dict.fromkeys(without, "jax")


def run_python(program: str, path: Path, *, n_devices: int) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(penstock.__file__).parents[1]),
        "XLA_FLAGS": xla_flags(n_devices),
    }
    command = [sys.executable, "-W", "error", "-c", program, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
