"""A database in a directory, written by us, with data files to point into."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import pytest

from penstock.handlers.ocdbt.database_writer import DEFAULT_MAX_NODE_BYTES, encode_index
from penstock.handlers.ocdbt.wire_format import Value


class WriteDatabase(Protocol):
    def __call__(
        self,
        directory: Path,
        entries: Iterable[tuple[bytes, Value]],
        *,
        files: dict[str, bytes] | None = None,
        max_node_bytes: int = DEFAULT_MAX_NODE_BYTES,
    ) -> Path: ...


@pytest.fixture(scope="session")
def write_database() -> WriteDatabase:
    """Encode and write an index; its nodes go behind what `files` has for `d/nodes`. Returns `d/nodes`."""

    def write(
        directory: Path,
        entries: Iterable[tuple[bytes, Value]],
        *,
        files: dict[str, bytes] | None = None,
        max_node_bytes: int = DEFAULT_MAX_NODE_BYTES,
    ) -> Path:
        contents = {"d/nodes": b"", **(files or {})}
        encoded = encode_index(
            entries,
            node_file="d/nodes",
            node_offset=len(contents["d/nodes"]),
            uuid=bytes(range(16)),
            commit_time_ns=1_700_000_000_000_000_000,
            max_node_bytes=max_node_bytes,
        )
        contents["d/nodes"] += encoded.nodes
        contents["manifest.ocdbt"] = encoded.manifest
        for name, content in contents.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

        return directory / "d/nodes"

    return write
