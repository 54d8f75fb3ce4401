"""Items that are no trees, one at a time, in both directions."""

from __future__ import annotations

__all__ = ("ITEMS_OF_ORBAX", "ITEMS_OF_PENSTOCK")

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from google.protobuf import text_format
from google.protobuf.struct_pb2 import Value
from orbax.checkpoint.experimental import v1 as ocp_v1
from tests.interop.matrix.model import Asked, Reader, Section, Tree, Writer

import penstock
from penstock.handlers import Composite
from penstock.items import Array, Json, NumpyRandomKey, Proto, PyTree, RandomKey

_ocp: Any = ocp
_v1: Any = ocp_v1
_state: Any = np.random.RandomState

STEP: Final = 3
PROTO: Final = "protobuf"


def values() -> Tree:
    """A value for each kind of item, by what the item is called in the tables."""
    return {
        "PyTree": {"w": jnp.arange(6.0), "n": [1, "x"]},
        "JSON": {"a": [1, 2.5, "x", None, True], "b": {}},
        "array": np.arange(5, dtype=np.int16),
        "jax random key": jax.random.key(3),
        "jax random key, raw": jax.random.PRNGKey(3),
        "numpy random key, legacy": _state(5).get_state(),
        "numpy random key": _state(5).get_state(legacy=False),
        PROTO: Value(string_value="x"),
    }


OURS: Final[dict[str, Callable[[Any], object]]] = {
    "PyTree": PyTree,
    "JSON": Json,
    "array": Array,
    "jax random key": RandomKey,
    "jax random key, raw": RandomKey,
    "numpy random key, legacy": NumpyRandomKey,
    "numpy random key": NumpyRandomKey,
    PROTO: Proto,
}
THEIRS: Final[dict[str, tuple[Any, Any]]] = {
    "PyTree": (_ocp.args.PyTreeSave, _ocp.args.PyTreeRestore),
    "JSON": (_ocp.args.JsonSave, _ocp.args.JsonRestore),
    "array": (_ocp.args.ArraySave, _ocp.args.ArrayRestore),
    "jax random key": (_ocp.args.JaxRandomKeySave, _ocp.args.JaxRandomKeyRestore),
    "jax random key, raw": (_ocp.args.JaxRandomKeySave, _ocp.args.JaxRandomKeyRestore),
    "numpy random key, legacy": (_ocp.args.NumpyRandomKeySave, _ocp.args.NumpyRandomKeyRestore),
    "numpy random key": (_ocp.args.NumpyRandomKeySave, _ocp.args.NumpyRandomKeyRestore),
    PROTO: (_ocp.args.ProtoSave, lambda: _ocp.args.ProtoRestore(Value)),
}


def by_penstock(kind: str) -> Callable[[Path, Tree], None]:
    def save(path: Path, tree: Tree) -> None:
        penstock.sync.save(path / str(STEP), Composite(item=OURS[kind](tree[kind]), other={"x": 1}))
        (path / "kind").write_text(kind)

    return save


def by_v0(kind: str) -> Callable[[Path, Tree], None]:
    def save(path: Path, tree: Tree) -> None:
        with _ocp.CheckpointManager(path) as manager:
            other = _ocp.args.PyTreeSave({"x": 1})
            manager.save(STEP, args=_ocp.args.Composite(item=THEIRS[kind][0](tree[kind]), other=other))
        (path / "kind").write_text(kind)

    return save


def kind_at(path: Path) -> str:
    return (path / "kind").read_text()


def whole(asked: Asked, value: Any) -> Tree:
    """The values of all kinds, with the one that was read in its place."""
    kind = kind_at(asked.path)
    if kind == "array" and isinstance(value, dict):
        value = value["checkpoint"]
    if kind == PROTO and isinstance(value, str):
        value = text_format.Parse(value, Value())

    return {**asked.like, kind: value}


def v0_manager(asked: Asked) -> Tree:
    with _ocp.CheckpointManager(asked.path) as manager:
        return whole(asked, manager.restore(STEP).item)


def v0_manager_args(asked: Asked) -> Tree:
    with _ocp.CheckpointManager(asked.path) as manager:
        args = _ocp.args.Composite(item=THEIRS[kind_at(asked.path)][1]())
        return whole(asked, manager.restore(STEP, args=args).item)


def v1_checkpointables(asked: Asked) -> Tree:
    wanted = Value if kind_at(asked.path) == PROTO else None
    found = _v1.load_checkpointables(str(asked.path / str(STEP)), {"item": wanted})
    return whole(asked, found["item"])


def ours(asked: Asked) -> Tree:
    return whole(asked, penstock.sync.restore(asked.path, item="item"))


def ours_like(asked: Asked) -> Tree:
    kind = kind_at(asked.path)
    like = {"checkpoint": asked.like[kind]} if kind == "array" else asked.like[kind]
    return whole(asked, penstock.sync.restore(asked.path, item="item", like=like))


def ours_path(asked: Asked) -> Tree:
    return whole(asked, penstock.sync.restore(asked.path / str(STEP) / "item"))


def cannot_read(kind: str) -> dict[str, str]:
    if "random" in kind:
        return {"v1 `load_checkpointables`": "v1 knows no random keys"}

    return {"v0 `CheckpointManager`": "must be told the class of a message"} if kind == PROTO else {}


OURS_READ: Final = [
    Reader("penstock, `item=`", ours, has_target=True),
    Reader("penstock, target", ours_like, has_target=True),
    Reader("penstock, path of the item", ours_path, has_target=True),
]
ITEMS_OF_PENSTOCK: Final = Section(
    "Items that penstock writes",
    "Each as an item of a `Composite`. Read as a tree, an array is one with the key `checkpoint`; without a "
    "target a message is its text.",
    values,
    [Writer(kind, {"": by_penstock(kind)}, cannot=cannot_read(kind)) for kind in OURS],
    [
        Reader("v0 `CheckpointManager`", v0_manager, has_target=True),
        Reader("v0 `CheckpointManager`, args", v0_manager_args, has_target=True),
        Reader("v1 `load_checkpointables`", v1_checkpointables, has_target=True),
        *OURS_READ,
    ],
)
ITEMS_OF_ORBAX: Final = Section(
    "Items that Orbax writes",
    "Each as an item of a v0 `Composite`.",
    values,
    [Writer(kind, {"": by_v0(kind)}) for kind in OURS],
    OURS_READ,
)
