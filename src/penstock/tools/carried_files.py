"""The files of a model that are no arrays, such as its configuration and its tokenizer, which go along."""

from __future__ import annotations

__all__ = ("carried_files",)

import os
from collections.abc import Iterable
from typing import Final

from penstock.handlers.formats.orbax.file_names import (
    COMMIT_MARK,
    LEGACY_MSGPACK,
    MANIFEST,
    MARKS,
    V1_MARK,
)
from penstock.handlers.formats.safetensors.tensor_paths import INDEX_SUFFIX, SUFFIX
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


def carried_files(store: Store, path: str) -> list[Document]:
    """Return the files in the folder `path` that belong to a model and are no arrays. Blocking.

    They are those that `save_pretrained` and the hub put next to tensors: `config.json`,
    `generation_config.json`, files of a tokenizer or a processor, templates, code, texts. Of a checkpoint in
    Orbax's layout they are what a conversion put there.

    Args:
        store: Where it is.
        path: Of a checkpoint; a file has none.

    Raises:
        StorageError: If one cannot be read.
    """
    if store.kind(path) != "directory":
        return []

    names = sorted(_of_models(store.list_directory(path)))
    folders = frozenset(store.list_folders(path)) if names else ()
    files = [name for name in names if name not in folders]
    return [Document(name, store.read_file(os.path.join(path, name))) for name in files]


def _of_models(names: Iterable[str]) -> Iterable[str]:
    for name in names:
        # Every document of Orbax's layout and of penstock that is no mark begins so; a hub's cache is hidden.
        if not name.startswith(("_", ".")) and name not in _OF_ORBAX and not name.endswith(_WEIGHTS):
            yield name
