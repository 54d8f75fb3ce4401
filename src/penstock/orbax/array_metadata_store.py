"""`array_metadatas/process_N`: how each jax.Array was cut, and the kind of each typed PRNG key.

In the save of a tree the layout records them. `Store` does it for type handlers that are called directly.
"""

from __future__ import annotations

__all__ = (
    "RANDOM_KEY_IMPL",
    "ArrayMetadata",
    "SerializedArrayMetadata",
    "Store",
    "Validator",
    "check_store",
)

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final, cast

from penstock import handlers as built_in
from penstock.embedding import document_files, file_names
from penstock.orbax.future import in_thread
from penstock.orbax.item_files import check_document

RANDOM_KEY_IMPL: Final = "random_key_impl"

PROCESS_PREFIX: Final = "process_"


@dataclass(frozen=True)
class ArrayMetadata:
    """A record of the way that one array was written."""

    param_name: str
    shape: tuple[int, ...]
    dtype: Any
    write_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    use_ocdbt: bool
    use_zarr3: bool
    ext_metadata: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class SerializedArrayMetadata:
    """An `ArrayMetadata` as it is recorded."""

    param_name: str
    write_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    ext_metadata: dict[str, Any] | None = None


class Store:
    """Writes and reads the document of one process.

    Args:
        primary_host: Has no effect: every process creates the directory if it is missing.
        write_timeout_secs: Has no effect: no process waits for another one.
    """

    def __init__(self, primary_host: int | None = 0, write_timeout_secs: int = 600) -> None:
        self._primary_host = primary_host
        self._write_timeout_secs = write_timeout_secs
        self._lock = Lock()  # leaves handled separately are recorded concurrently

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=Lock())

    def set_primary_host(self, primary_host: int | None) -> None:
        """Has no effect."""
        self._primary_host = primary_host

    async def write(self, checkpoint_dir: Any, array_metadatas: Sequence[Any], process_index: int) -> None:
        """Record more arrays."""

        def write() -> None:
            with self._lock:
                _write(Path(checkpoint_dir), array_metadatas, process_index)

        await in_thread(write)

    async def read(self, checkpoint_dir: Any, process_index: int | None = None) -> Any:
        """Return what one process recorded, or each of them; None if there is nothing.

        Raises:
            ValueError: If there is no such directory.
        """
        return await in_thread(_read, Path(checkpoint_dir), process_index)


class Validator:
    """Has no effect: every byte of a tree is counted before it is published."""

    def validate_all_array_metadatas(self, array_metadatas: Mapping[int, Sequence[Any]]) -> None:
        """Do nothing. Nothing calls it."""


def check_store(store: Any) -> None:
    """Refuse a store of the caller's, which would not be asked in the save of a tree.

    Args:
        store: A `Store`, or Orbax's; None for no records.

    Raises:
        NotImplementedError: If it is of a class of the caller's.
    """
    kind = cast("Any", type)(store)
    if store is not None and kind is not Store and not kind.__module__.startswith("orbax."):
        raise NotImplementedError(
            f"the array metadata of a tree are written by penstock, and {kind.__qualname__} would not be "
            "called: give a Store, or None for no records"
        )


def _write(directory: Path, found: Sequence[Any], process_index: int) -> None:
    path = directory / file_names.ARRAY_METADATAS / f"{PROCESS_PREFIX}{process_index}"
    store = built_in.LocalStore()
    store.make_directory(str(path.parent))
    if file_names.TEMPORARY_SUFFIX not in str(
        path
    ):  # the record of a tree that is being built may be of what this replaces
        check_document(str(path.parent), path.name)

    known = store.read_file(str(path)) if store.kind(str(path)) == "file" else b""
    entries: list[Any] = json.loads(known)["array_metadatas"] if known else []
    entries += [
        {
            "array_metadata": {
                "param_name": one.param_name,
                "write_shape": one.write_shape,
                "chunk_shape": one.chunk_shape,
                "ext_metadata": one.ext_metadata,
            }
        }
        for one in found
    ]
    document_files.rewrite_document(store, str(path), json.dumps({"array_metadatas": entries}).encode())


def _read(directory: Path, process_index: int | None) -> Any:
    if not directory.exists():
        raise ValueError(f"the directory of the checkpoint does not exist: {directory}")

    folder = directory / file_names.ARRAY_METADATAS
    if process_index is not None:
        path = folder / f"{PROCESS_PREFIX}{process_index}"
        return _entries(path) if path.exists() else None

    paths = sorted(folder.glob(f"{PROCESS_PREFIX}*")) if folder.exists() else []
    found: dict[int, list[SerializedArrayMetadata]] = {}
    for path in paths:
        number = path.name.removeprefix(PROCESS_PREFIX)
        if not number.isdigit():
            raise ValueError(f"the document does not exist: {path}")
        found[int(number)] = _entries(path)

    return found or None


def _entries(path: Path) -> list[SerializedArrayMetadata]:
    entries = [item["array_metadata"] for item in json.loads(path.read_text())["array_metadatas"]]
    return [
        SerializedArrayMetadata(
            param_name=entry["param_name"],
            write_shape=tuple(entry["write_shape"]),
            chunk_shape=tuple(entry["chunk_shape"]),
            ext_metadata=entry.get("ext_metadata"),
        )
        for entry in entries
    ]
