"""`penstock inspect`: prints what a checkpoint holds, without reading its arrays."""

from __future__ import annotations

__all__ = ("inspect",)

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import anyio

import penstock
from penstock.checkpointer.description import CheckpointMetadata, LeafMetadata
from penstock.cli.terminal.byte_sizes import format_bytes
from penstock.cli.terminal.terminal_output import Output, Table

_FIELDS: Final = (
    "name",
    "key_path",
    "kind",
    "shape",
    "dtype",
    "nbytes",
    "stored_nbytes",
    "codec",
    "chunk_shape",
    "sharding",
    "random_key_impl",
)


def inspect(path: str, output: Output, *, as_json: bool) -> int:
    """Print what the checkpoint at `path` holds, as tables or as one JSON document.

    Raises:
        PenstockError: If it is not a checkpoint, or damaged.
    """
    found = anyio.run(penstock.metadata, path)
    if as_json:
        output.say(json.dumps(_document(found), indent=2))
    else:
        _show(found, output)

    return 0


def _show(found: CheckpointMetadata, output: Output) -> None:
    output.say(found.path)
    columns = ("leaf", "kind", "shape", "dtype", "bytes", "sharding")
    rows = [
        (
            leaf.key_path,
            leaf.kind if leaf.random_key_impl is None else "random key",
            "" if leaf.shape is None else _shape(leaf.shape),
            leaf.random_key_impl or leaf.dtype,
            f"{leaf.nbytes:,}" if leaf.shape is not None else "",
            _sharding(leaf.sharding),
        )
        for leaf in found.leaves
    ]
    output.table(Table(columns, rows, n_left=4))
    arrays = sum(leaf.shape is not None for leaf in found.leaves)
    size, stored = format_bytes(found.nbytes), found.stored_nbytes
    if stored is not None and stored != found.nbytes:
        size += f" ({format_bytes(stored)} as stored)"
    output.say(f"\n{len(found.leaves):,} leaves, {arrays:,} of them arrays, {size}")
    if found.committed_at_ns is not None:
        output.say(f"committed {_time(found.committed_at_ns)}")
    if found.custom_metadata:
        output.say(f"custom metadata {json.dumps(dict(found.custom_metadata))}")


def _document(found: CheckpointMetadata) -> dict[str, Any]:
    return {
        "path": found.path,
        "n_leaves": len(found.leaves),
        "nbytes": found.nbytes,
        "stored_nbytes": found.stored_nbytes,
        "committed_at": None if found.committed_at_ns is None else _time(found.committed_at_ns),
        "custom_metadata": found.custom_metadata,
        "leaves": [_leaf(leaf) for leaf in found.leaves],
    }


def _leaf(leaf: LeafMetadata) -> dict[str, Any]:
    found = {name: getattr(leaf, name) for name in _FIELDS}
    return {name: value for name, value in found.items() if value not in (None, "", ())}


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _sharding(sharding: Mapping[str, Any] | None) -> str:
    """Return a recorded sharding in a few words."""
    if sharding is None:
        return ""
    if sharding.get("sharding_type") == "SingleDeviceSharding":
        return str(sharding.get("device_str", "one device"))
    if sharding.get("sharding_type") == "NamedSharding":
        axes = zip(sharding.get("axis_names", ()), sharding.get("shape", ()), strict=False)
        mesh = ", ".join(f"{name}={size}" for name, size in axes)
        spec = ", ".join(map(_axis, sharding.get("partition_spec", ())))
        return f"({spec}) over {mesh}"

    return str(sharding.get("sharding_type", "unknown"))


def _axis(part: str | list[str] | None) -> str:
    if part is None:
        return "-"

    return part if isinstance(part, str) else "+".join(part)


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(timespec="milliseconds")
