"""The parts of a `Composite`: for each item the leaves of one tree and documents, and targets for messages.

`take_apart` is what a save of items begins with. `message_target` restores a protobuf message,
stored as text that does not name its class.
"""

from __future__ import annotations

__all__ = ("HANDLERS", "Parts", "TreePart", "message_target", "take_apart")

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast, final

import jax
import numpy as np

from penstock.handlers.layouts.item_types import (
    Array,
    Composite,
    Json,
    NumpyRandomKey,
    Proto,
    PyTree,
    RandomKey,
)
from penstock.handlers.leaves.prng_keys import is_key, key_data_of, key_impl_of
from penstock.handlers.stores.publishing.paths import TEMPORARY_SUFFIX
from penstock.kernel.errors import CorruptCheckpointError, InvalidLeafError, SpecError
from penstock.kernel.protocols.leaf import KeyPath, ParamInfo
from penstock.kernel.protocols.written import Document

_V0: Final = "orbax.checkpoint._src.handlers."
HANDLERS: Final[Mapping[type, str]] = {
    PyTree: f"{_V0}pytree_checkpoint_handler.PyTreeCheckpointHandler",
    Json: f"{_V0}json_checkpoint_handler.JsonCheckpointHandler",
    Array: f"{_V0}array_checkpoint_handler.ArrayCheckpointHandler",
    RandomKey: f"{_V0}random_key_checkpoint_handler.JaxRandomKeyCheckpointHandler",
    NumpyRandomKey: f"{_V0}random_key_checkpoint_handler.NumpyRandomKeyCheckpointHandler",
    Proto: f"{_V0}proto_checkpoint_handler.ProtoCheckpointHandler",
}
"""The Orbax handler recorded for each kind."""

_METRICS: Final = "metrics"  # an item of this name has a file of this name, as Orbax's managers write it


_LONGEST_NAME: Final = 255  # bytes


@final
@dataclass(frozen=True, slots=True)
class TreePart:
    """The leaves below some keys of the one tree, which have their own directory."""

    keys: KeyPath
    directory: str  #: relative to the checkpoint
    custom_metadata: Mapping[str, Any] | None = None
    single: bool = False  #: whether it is one array


@final
@dataclass(slots=True)
class Parts:
    """All that is written for the items of one checkpoint, but for the tree of their leaves.

    A layout holds it as long as the save lasts, which must not keep the caller's arrays for so long.
    """

    tree_parts: list[TreePart] = field(default_factory=list[TreePart])
    documents: list[Document] = field(default_factory=list[Document])
    handlers: dict[str, str] = field(default_factory=dict[str, str])  #: Orbax's, by item
    directories: list[str] = field(default_factory=list[str])  #: each gets a commit mark


def take_apart(items: Composite) -> tuple[dict[str, Any], Parts]:
    """Return the one tree of all leaves, and the other documents of each item.

    Raises:
        SpecError: If there is no item, or a value does not fit its item's kind.
    """
    if not items:
        raise SpecError("a Composite has at least one item")

    tree, parts = dict[str, Any](), Parts()
    for name, item in items.items():
        _check_name(name)
        kind = type(item) if type(item) in HANDLERS else PyTree
        parts.handlers[name] = HANDLERS[kind]
        parts.directories.append(name)
        _add(tree, parts, name, item)

    return tree, parts


def _add(tree: dict[str, Any], parts: Parts, name: str, item: object) -> None:
    match item:
        case Json(value):
            file = _METRICS if name == _METRICS else "metadata"
            parts.documents.append(Document(f"{name}/{file}", _json(name, value)))
        case Proto(message):
            parts.documents.append(Document(f"{name}/proto.pbtxt", _text(name, message)))
        case Array(value):
            if not isinstance(value, jax.Array | np.ndarray | np.generic | int | float | complex):
                raise InvalidLeafError(f"[{name!r}]", f"a {type(value).__name__} is neither array nor number")

            tree[name] = {"checkpoint": value}
            parts.tree_parts.append(TreePart((name,), name, single=True))
        case RandomKey(key):
            data, about = _random_key(name, key)
            _add_pair(tree, parts, name, "jax_random_key", {"checkpoint": data}, about, single=True)
        case NumpyRandomKey(state):
            if not isinstance(cast("object", state), tuple | dict):
                problem = f"a {type(state).__name__} is not what np.random.get_state() returns"
                raise InvalidLeafError(f"[{name!r}]", problem)

            about = {"legacy": isinstance(state, tuple)}
            _add_pair(tree, parts, name, "np_random_key", state, about)
        case PyTree() if name == _METRICS:
            raise SpecError(f"the item {name!r} must be Json: that is what Orbax takes it for")
        case PyTree(value, custom_metadata):
            _json(name, custom_metadata)  # so that errors in it are raised before anything is written
            tree[name] = value
            parts.tree_parts.append(TreePart((name,), name, custom_metadata))
        case _:
            _add(tree, parts, name, PyTree(item))


def _add_pair(
    tree: dict[str, Any],
    parts: Parts,
    name: str,
    inner: str,
    value: object,
    about: Mapping[str, object],
    *,
    single: bool = False,
) -> None:
    """Add an item that Orbax stores as a separate composite: a tree, and JSON about it."""
    tree[name] = {inner: value}
    parts.tree_parts.append(TreePart((name, inner), f"{name}/{inner}", single=single))
    parts.documents.append(Document(f"{name}/{inner}_metadata/metadata", _json(name, about)))
    parts.directories += [f"{name}/{inner}", f"{name}/{inner}_metadata"]


def _random_key(name: str, key: Any) -> tuple[jax.Array, dict[str, object]]:
    if not isinstance(key, jax.Array):
        raise InvalidLeafError(f"[{name!r}]", f"a {type(key).__name__} is no jax PRNG key")
    if not is_key(cast("object", key.dtype)):
        return key, {"typed": False}

    impl = key_impl_of(key, ParamInfo((name,), (), f"[{name!r}]"))
    return key_data_of(key), {"typed": True, "impl": impl}


def _json(name: str, value: object) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"the item {name!r} cannot be written as JSON: {error}") from error


def _text(name: str, message: Any) -> bytes:
    try:
        from google.protobuf import text_format
        from google.protobuf.message import Message
    except ImportError as error:
        raise SpecError("a Proto item needs protobuf: pip install penstock[proto]") from error

    if not isinstance(message, Message):
        raise SpecError(f"the item {name!r} is no protobuf message, but a {type(message).__name__}")

    text: str = text_format.MessageToString(message)
    return text.encode()


def _check_name(name: object) -> None:
    """Refuse a name that is not a valid directory name or that Orbax reserves."""
    if not isinstance(name, str) or not name or name in {".", "..", "AUTO", "_CHECKPOINT_DELETION"}:
        raise SpecError(f"an item cannot be called {name!r}")
    if "/" in name or "\0" in name or name.startswith("_") or TEMPORARY_SUFFIX in name:
        raise SpecError(f"an item cannot be called {name!r}: it is the name of its directory")
    if len(name.encode(errors="replace")) > _LONGEST_NAME:
        raise SpecError(f"an item cannot be called {name!r}: that is longer than a file's name may be")
    if name in {"commit_success.txt", "orbax.checkpoint", "manifest.ocdbt", "checkpoint", "descriptor"}:
        raise SpecError(f"an item cannot be called {name!r}: the name is reserved")


def message_target(like: Any, path: str) -> tuple[Any, Callable[[Any], Any] | None]:
    """Return the target to restore to, and what makes a message of the restored text; None if none is meant.

    Args:
        like: A target. A message, or a class of messages, stands for a message of that class. Any other
            target is returned as it is.
        path: What is restored, for the error.
    """
    protobuf = sys.modules.get("google.protobuf.message")  # a caller that has a message has imported protobuf
    cls: type = like if isinstance(like, type) else type(like)
    if protobuf is None or not issubclass(cls, protobuf.Message):
        return like, None

    return str, partial(_parse, cls, path)


def _parse(cls: type, path: str, text: str) -> Any:
    from google.protobuf import text_format

    try:
        return text_format.Parse(text, cls())
    except text_format.ParseError as error:
        raise CorruptCheckpointError(path, f"holds no text of a {cls.__name__}: {error}") from error
