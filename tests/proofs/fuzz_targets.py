"""What `make fuzz` feeds with damaged bytes: each reader of a document, and whole checkpoints.

A target takes bytes and a folder of its own, and may raise nothing but penstock's errors.
"""

from __future__ import annotations

__all__ = (
    "TARGETS",
    "WHOLE",
    "Seeds",
    "Target",
    "checkpoint_seeds",
    "document_seeds",
    "run_target",
    "run_whole",
)

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import jax
import msgpack
import numpy as np
from tests.corpus.corpora import unpack, unpack_earlier

import penstock
from penstock import SaveFormat
from penstock.errors import PenstockError
from penstock.handlers import LocalStore, SafetensorsLayout
from penstock.handlers.formats import integrity
from penstock.handlers.formats import zarr as zarr_metadata
from penstock.handlers.formats.orbax.checkpoint_documents import decode_checkpoint_metadata
from penstock.handlers.formats.orbax.discovery import deleted_item
from penstock.handlers.formats.orbax.file_names import DELETION
from penstock.handlers.formats.orbax.msgpack_files import read_tree
from penstock.handlers.formats.orbax.open_checkpoint import json_leaves
from penstock.handlers.formats.orbax.tree_metadata import (
    decode_random_keys,
    decode_shardings,
    decode_strings,
    decode_tree_metadata,
    tuple_paths,
)
from penstock.handlers.formats.safetensors import penstock_metadata
from penstock.handlers.formats.safetensors.safetensors_checkpoint import open_checkpoint
from penstock.handlers.ocdbt.database_reader import read_index
from penstock.handlers.ocdbt.database_writer import EncodedIndex, encode_files, encode_index
from penstock.handlers.ocdbt.wire_format import (
    MANIFEST_MAGIC,
    NODE_MAGIC,
    Indirect,
    Inline,
    Value,
    seal,
    varints,
)
from penstock.items import Composite, Json

Target: TypeAlias = Callable[[bytes, Path], object]
Seeds: TypeAlias = Mapping[str, list[bytes]]
"""By target."""

WHOLE: Final = "whole"
"""The target that is a folder: one file of a checkpoint is damaged, and all of it read."""

STORE: Final = LocalStore()
_SPLIT: Final = b"\n--node--\n"
ENTRIES: Final[list[tuple[bytes, Value]]] = [
    *[(f"a/b{at:02}/0".encode(), Indirect(f"d/{at % 3}", 100 * at, 99)) for at in range(20)],
    *[(f"c/d{at}/.zarray".encode(), Inline(b"{}" * at)) for at in range(9)],
]
"""What the indices among the seeds hold."""


def _encoded(max_node_bytes: int) -> EncodedIndex:
    return encode_index(
        ENTRIES,
        node_file="d/n",
        node_offset=0,
        uuid=bytes(16),
        commit_time_ns=0,
        max_node_bytes=max_node_bytes,
    )


INDEX: Final = _encoded(10**6)


def _nodes(data: bytes, folder: Path) -> object:
    """Read an index of some nodes, the last of them the root, whose checksums are right."""
    nodes = [seal(NODE_MAGIC, body) for body in data.split(_SPLIT)]
    root, height = nodes[-1], data.split(_SPLIT)[-1][:1] or b"\0"
    offset = sum(map(len, nodes[:-1]))
    manifest = b"".join(
        (
            bytes(16),
            varints((0, 1024, 10**8)),
            bytes((4, 0)),
            encode_files(["d/n"]),
            varints((1, 1)),
            height,
            varints((0, offset, len(root), len(ENTRIES), len(root), 0)),
            bytes(8),
            b"\0",
        )
    )
    return _read_index(folder, manifest, b"".join(nodes))


def _manifest(data: bytes, folder: Path) -> object:
    """Read an index whose manifest is damaged behind a right checksum."""
    return _read_index(folder, data, INDEX.nodes)


def _read_index(folder: Path, manifest: bytes, nodes: bytes) -> object:
    (folder / "d").mkdir(exist_ok=True)
    (folder / "d" / "n").write_bytes(nodes)
    (folder / "manifest.ocdbt").write_bytes(seal(MANIFEST_MAGIC, manifest))
    return dict(read_index(STORE, str(folder)))


def _msgpack(data: bytes, folder: Path) -> object:
    (folder / "checkpoint").write_bytes(data)
    return read_tree(STORE, str(folder / "checkpoint"))


def _header(data: bytes, folder: Path) -> object:
    """Read the header of a file whose length and size fit it as far as they can."""
    end = data.rfind(b"}") + 1
    path = folder / "x.safetensors"
    path.write_bytes(len(data[:end]).to_bytes(8, "little") + data[:end] + data[end:])
    return open_checkpoint(STORE, str(path)).leaves


def _safetensors(data: bytes, folder: Path) -> object:
    (folder / "x.safetensors").write_bytes(data)
    return open_checkpoint(STORE, str(folder / "x.safetensors")).leaves


def _weights(data: bytes, folder: Path) -> object:
    (folder / "model.safetensors.index.json").write_bytes(data)
    return open_checkpoint(STORE, str(folder)).leaves


def _tree(data: bytes, _: Path) -> object:
    tree = decode_tree_metadata("x", data)
    return tuple_paths("x", tree.value_metadata_tree)


def _deletion(data: bytes, folder: Path) -> object:
    (folder / DELETION).write_bytes(data)
    return deleted_item(STORE, str(folder), [DELETION])


TARGETS: Final[Mapping[str, Target]] = {
    "tree_metadata": _tree,
    "checkpoint_metadata": lambda data, _: decode_checkpoint_metadata("x", data),
    "sharding": lambda data, _: decode_shardings("x", data),
    "strings": lambda data, _: decode_strings("x", data),
    "array_metadatas": lambda data, _: decode_random_keys("x", data),
    "zarr": lambda data, _: zarr_metadata.decode("x", data),
    "integrity": lambda data, _: integrity.decode("x", data),
    "json_item": lambda data, _: json_leaves("x", data, "d"),
    "deletion": _deletion,
    "note": lambda data, _: penstock_metadata.decode("x", data.decode(errors="surrogateescape")),
    "manifest": _manifest,
    "nodes": _nodes,
    "msgpack": _msgpack,
    "header": _header,
    "safetensors": _safetensors,
    "weights": _weights,
}


def run_target(name: str, data: bytes, folder: Path) -> PenstockError | None:
    """Feed one reader; return the error of penstock that it raised. Any other one is a finding."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        TARGETS[name](data, folder)
    except PenstockError as error:
        return error

    return None


async def run_whole(
    checkpointer: penstock.Checkpointer, seed: Path, file: str, data: bytes, folder: Path
) -> PenstockError | None:
    """Restore, describe and verify a copy of a checkpoint in which one file has other bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(seed, folder, copy_function=os.link)
    (folder / file).unlink()
    (folder / file).write_bytes(data)
    first: PenstockError | None = None
    for read in (checkpointer.restore, checkpointer.metadata, checkpointer.verify):
        try:
            await read(folder)
        except PenstockError as error:
            first = first or error

    return first


def _values() -> dict[str, Any]:
    return {
        "a": np.arange(64, dtype=np.float32).reshape(8, 8),
        "b": [np.zeros(3, np.int8), 5, "text", None, {}],
        "k": jax.random.key(1),
        "c": {"d": np.float64(3), "e/f": True},
    }


def checkpoint_seeds(folder: Path, *, corpus: bool = True) -> dict[str, Path]:
    """Make whole checkpoints, small ones of every kind, and unpack those of Orbax; return them by name."""
    seeds: dict[str, Path] = {}
    forms = {
        "ocdbt": SaveFormat(),
        "zarr3": SaveFormat(zarr=3, codec="zstd", chunk_byte_size=64, rich_types=True),
        "files": SaveFormat(ocdbt=False, codec="zstd"),
        "files_plain": SaveFormat(ocdbt=False, chunk_byte_size=64),
    }
    for name, form in forms.items():
        with penstock.sync.Checkpointer(save_format=form) as checkpointer:
            checkpointer.save(folder / name, _values(), custom_metadata={"x": [1, "y"]}).result()

        seeds[name] = folder / name

    items = Composite(state=_values(), about=Json({"a": [1, {"b": None}]}))
    penstock.sync.save(folder / "items", items)
    seeds["items"] = folder / "items"
    with penstock.sync.Checkpointer(layout=SafetensorsLayout()) as checkpointer:
        checkpointer.save(folder / "tensors", _values()).result()

    seeds["tensors"] = folder / "tensors"
    if not corpus:
        return seeds

    unpack(folder / "orbax")
    unpack_earlier(folder / "orbax")
    for path in sorted((folder / "orbax").rglob("ckpt")):
        files = [each for each in path.rglob("*") if each.is_file()]
        if sum(each.stat().st_size for each in files) < 100_000:
            seeds["_".join(path.relative_to(folder / "orbax").parts[:-1])] = path

    return seeds


def document_seeds(checkpoints: Mapping[str, Path]) -> Seeds:
    """Return the documents of some checkpoints, and what is not a file of its own, by target."""
    by_name = {
        "_METADATA": "tree_metadata",
        "_CHECKPOINT_METADATA": "checkpoint_metadata",
        "_sharding": "sharding",
        "_strings.json": "strings",
        "process_0": "array_metadatas",
        ".zarray": "zarr",
        "zarr.json": "zarr",
        "_PENSTOCK_INTEGRITY": "integrity",
        "checkpoint": "msgpack",
        "model.safetensors": "safetensors",
        "data.json": "json_item",
        "about": "json_item",
    }
    seeds: dict[str, list[bytes]] = {name: [] for name in TARGETS}
    for path in checkpoints.values():
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.name in by_name and file.stat().st_size < 50_000:
                seeds[by_name[file.name]].append(file.read_bytes())

    for data in seeds["safetensors"]:
        end = 8 + int.from_bytes(data[:8], "little")
        seeds["header"].append(data[8:end].rstrip() + data[end:])
        note = json.loads(data[8:end]).get("__metadata__", {}).get(penstock_metadata.MEMBER)
        seeds["note"] += [] if note is None else [note.encode()]

    array = msgpack.ExtType(1, msgpack.packb([[6], "float32", bytes(24)]))
    number = msgpack.ExtType(3, msgpack.packb([[], "int64", bytes(8)]))
    pieces = {"__msgpack_chunked_array__": True, "shape": {"0": 2, "1": 3}, "chunks": {"0": array}}
    tree = {"a": array, "b": [number, 2, -1.5, None, "x"], "c": {}, "d": "PLACEHOLDER://d", "e": pieces}
    seeds["msgpack"].append(msgpack.packb(tree))
    seeds["weights"].append(json.dumps({"weight_map": {"a": "x-00001-of-00002.safetensors"}}).encode())
    seeds["deletion"].append(json.dumps({"operation_id": "0" * 32, "checkpointable_name": "x"}).encode())
    seeds["json_item"].append(json.dumps({"a": [1, 2.5, {"b": None, "c": [], "d": {}}], "e": "x"}).encode())
    for max_node_bytes in (10**6, 200, 60):
        index = _encoded(max_node_bytes)
        bodies = [sealed[10:-4] for sealed in index.nodes.split(NODE_MAGIC)[1:]]
        seeds["manifest"].append(index.manifest[14:-4])
        seeds["nodes"].append(_SPLIT.join(bodies))

    return seeds
