"""`_CHECKPOINT_METADATA`: when and how a checkpoint was written, and the caller's metadata.

Source:
    ORBAX_FORMAT.md §3.2. An unknown top-level member breaks Orbax, so penstock adds none.
"""

from __future__ import annotations

__all__ = (
    "PYTREE_HANDLER",
    "CheckpointDocument",
    "content_of",
    "decode_checkpoint_metadata",
    "encode_checkpoint_metadata",
    "is_left_of",
    "read_checkpoint_metadata",
)

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast, final

from crc32c import crc32c

from penstock.handlers.formats.json_documents import as_object, as_string, parse_object
from penstock.handlers.formats.orbax.file_names import CHECKPOINT_METADATA
from penstock.kernel.errors import CorruptCheckpointError, SpecError
from penstock.kernel.protocols.stores import Store

PYTREE_HANDLER: Final = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
"""The handler recorded for a flat checkpoint; Orbax v0 and v1 know it."""


@final
@dataclass(frozen=True, slots=True)
class CheckpointDocument:
    """The members of the document that a reader needs."""

    item_handlers: Mapping[str, str] | str | None = None  #: by item; one string for a flat checkpoint
    started_at_ns: int | None = None
    committed_at_ns: int | None = None
    custom_metadata: Mapping[str, Any] | None = None

    @property
    def items(self) -> Collection[str]:
        """Names of the recorded items; empty for a flat checkpoint."""
        return self.item_handlers.keys() if isinstance(self.item_handlers, Mapping) else ()


def encode_checkpoint_metadata(
    *,
    started_ns: int,
    committed_ns: int,
    custom_metadata: Mapping[str, Any] | None,
    item_handlers: Mapping[str, str] | str = PYTREE_HANDLER,
) -> bytes:
    """Encode the document, by default that of a flat checkpoint.

    Raises:
        SpecError: If `custom_metadata` cannot be written as JSON.
    """
    document = {
        "item_handlers": item_handlers if isinstance(item_handlers, str) else dict(item_handlers),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": started_ns,
        "commit_timestamp_nsecs": committed_ns,
        "custom_metadata": dict(custom_metadata or {}),
    }
    try:
        return json.dumps(document).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"custom_metadata cannot be written as JSON: {error}") from error


def read_checkpoint_metadata(store: Store, path: str, names: Collection[str]) -> CheckpointDocument:
    """Read the document of the checkpoint at `path`, if it is among the `names` there.

    Raises:
        CorruptCheckpointError: As `decode_checkpoint_metadata`.
    """
    if CHECKPOINT_METADATA not in names:
        return CheckpointDocument()

    file = os.path.join(path, CHECKPOINT_METADATA)
    return decode_checkpoint_metadata(file, store.read_file(file))


def decode_checkpoint_metadata(path: str, data: bytes) -> CheckpointDocument:
    """Read the document, of any Orbax version. An empty file says nothing, and that is allowed.

    Raises:
        CorruptCheckpointError: If it is malformed.
    """
    if not data:
        return CheckpointDocument()

    document = parse_object(path, data)
    handlers = document.get("item_handlers")
    if isinstance(handlers, dict):
        items = as_object(path, "item_handlers", document["item_handlers"])
        handlers = {item: as_string(path, f"the handler of {item!r}", name) for item, name in items.items()}
    elif handlers is not None:
        handlers = as_string(path, "item_handlers", handlers)

    custom = document.get("custom_metadata", document.get("custom"))
    return CheckpointDocument(
        item_handlers=handlers,
        started_at_ns=_time(path, document, "init_timestamp_nsecs"),
        committed_at_ns=_time(path, document, "commit_timestamp_nsecs"),
        custom_metadata=None if custom is None else as_object(path, "custom_metadata", custom),
    )


def content_of(path: str, data: bytes) -> Mapping[str, object]:
    """Return what the document says, in a form that tells a rewritten one from a damaged one.

    Deleting an item of a checkpoint rewrites it without the item's handler, and changes nothing else.
    """
    document = parse_object(path, data)
    handlers = document.pop("item_handlers", None)
    return {"handlers": handlers, "rest": crc32c(json.dumps(document, sort_keys=True).encode())}


def is_left_of(recorded: Mapping[str, object], path: str, data: bytes) -> bool:
    """Return whether the document says what was recorded, except for items that were deleted since."""
    found, before = content_of(path, data), recorded.get("handlers")
    if found["rest"] != recorded.get("rest"):
        return False

    now = found["handlers"]
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        left, whole = cast("Mapping[str, object]", now), cast("Mapping[str, object]", before)
        return bool(left) and left.items() <= whole.items()

    return now == before


def _time(path: str, document: dict[str, object], name: str) -> int | None:
    value = document.get(name)
    if value is not None and type(value) is not int:
        raise CorruptCheckpointError(path, f"{name} is {value!r}, not an integer")

    return value
