"""The files of a model that are no arrays, such as its configuration and its tokenizer, which go along."""

from __future__ import annotations

__all__ = ("carried_files",)

from collections.abc import Iterable
from typing import Final

from penstock.handlers.formats.orbax.checkpoint_documents import SealedDocuments
from penstock.handlers.formats.orbax.file_names import (
    COMMIT_MARK,
    INTEGRITY,
    LEGACY_MSGPACK,
    MANIFEST,
    MARKS,
    V1_MARK,
)
from penstock.handlers.formats.safetensors.tensor_paths import INDEX_SUFFIX, SUFFIX
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Document

_WEIGHTS: Final = (
    SUFFIX,
    INDEX_SUFFIX,
    *(".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".h5", ".h5.index.json", ".msgpack"),
    *(".msgpack.index.json", ".ot", ".gguf", ".ggml", ".onnx", ".onnx_data", ".tflite", ".npz"),
)
"""Ends of names of files with arrays: other forms of the same weights often lie in one folder with them."""

_OF_ORBAX: Final = frozenset({*MARKS, COMMIT_MARK, LEGACY_MSGPACK, MANIFEST, V1_MARK, ".zarray", "zarr.json"})


def carried_files(store: Store, path: str, *, intact_only: bool = False) -> list[Document]:
    """Return the files in the folder `path` that belong to a model and are no arrays. Blocking.

    They are those that `save_pretrained` and the hub put next to tensors: `config.json`,
    `generation_config.json`, files of a tokenizer or a processor, templates, code, texts. Of a checkpoint in
    Orbax's layout they are what a conversion put there, and are compared with their checksums.

    Args:
        store: Where it is.
        path: Of a checkpoint; a file has none.
        intact_only: Whether those that are damaged are passed over.

    Raises:
        ChecksumError: If one is not as it was written, unless `intact_only`.
        MissingFileError: If one was written and is not there, unless `intact_only`.
        StorageError: If one cannot be read.
    """
    if store.kind(path) != "directory":
        return []

    there = store.list_directory(path)
    if not any(True for _ in _of_models(there)) and INTEGRITY not in there:
        return []

    try:
        sealed = SealedDocuments.open(store, path, frozenset(there))
    except CorruptCheckpointError:
        if not intact_only:
            raise

        sealed = SealedDocuments(store, path)

    recorded = [name for name in sealed.recorded.documents if "/" not in name]
    folders = frozenset(store.list_folders(path))
    found: list[Document] = []
    for name in sorted({*_of_models(there), *_of_models(recorded)} - folders):
        try:
            found.append(Document(name, sealed.read(name)))
        except CorruptCheckpointError:
            if not intact_only:
                raise

    return found


def _of_models(names: Iterable[str]) -> Iterable[str]:
    for name in names:
        # Every document of Orbax's layout and of penstock that is no mark begins so; a hub's cache is hidden.
        if not name.startswith(("_", ".")) and name not in _OF_ORBAX and not name.endswith(_WEIGHTS):
            yield name
