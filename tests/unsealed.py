"""Checkpoints without digests of documents, as penstock 0.1 wrote them: for tests that edit documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack


def unseal(checkpoint: Path) -> None:
    """Remove what was recorded of documents, here and in all items."""
    for record in checkpoint.rglob("_PENSTOCK_INTEGRITY"):
        members: dict[str, Any] = msgpack.unpackb(record.read_bytes())
        kept = {name: value for name, value in members.items() if name not in {"documents", "about"}}
        record.write_bytes(msgpack.packb(kept))
    for mark in checkpoint.rglob("commit_success.txt"):
        mark.write_text("Checkpoint commit was successful")
