"""The files of a safetensors checkpoint, and the tensors in all of them."""

from __future__ import annotations

__all__ = (
    "FileSet",
    "bytes_to_decode",
    "file_of_each",
    "find_index",
    "missing_siblings",
    "read_files",
    "read_index",
    "tensor_files",
)

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast, final

from penstock.handlers.formats.safetensors import file_digests
from penstock.handlers.formats.safetensors.header import FileHeader, header_bytes, read_header
from penstock.handlers.formats.safetensors.tensor_paths import INDEX_SUFFIX, SUFFIX
from penstock.handlers.formats.untrusted import as_object, as_string, parse_object
from penstock.kernel.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedFormatError
from penstock.kernel.protocols.layouts import SMALL_DOCUMENT
from penstock.kernel.protocols.stores import Store

_USUAL_INDEX: Final = "model.safetensors.index.json"
_FACTOR: Final = 5  # host bytes for each byte of a header: it, and what is made of it
_SHARD: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


@final
@dataclass(frozen=True, slots=True)
class FileSet:
    """The files that are one checkpoint."""

    headers: tuple[FileHeader, ...]
    index: str | None = None  #: the path of the document that lists them, if there is one
    index_is_sealed: bool = False  #: whether that was compared with a checksum


def bytes_to_decode(store: Store, path: str) -> int:
    """Return the bytes that long headers take: of the file at `path`, or of those in the folder. Blocking.

    Raises:
        StorageError: If the length of one cannot be found out.
    """
    files = (
        [path] if store.kind(path) == "file" else [os.path.join(path, x) for x in store.list_directory(path)]
    )
    long = [(file, size) for file in files if (size := store.size(file)) > SMALL_DOCUMENT]
    found = [header_bytes(store, file) for file, _ in long if file.endswith(SUFFIX)]
    found += [size for file, size in long if file.endswith(INDEX_SUFFIX)]
    return _FACTOR * sum([nbytes for nbytes in found if nbytes > SMALL_DOCUMENT])


def read_files(store: Store, path: str) -> FileSet:
    """Read the headers of the file at `path`, or of those in the folder there.

    In a folder an index says which files belong together; `model.safetensors.index.json` if there are
    several. Without one, every safetensors file does.

    Raises:
        NotACheckpointError: If there are no such files.
        CorruptCheckpointError: If a file or a tensor that must be there is not, or a tensor is twice.
        ChecksumError: If the index, or the header of a file, is not as penstock wrote it.
        UnsupportedFormatError: If there are several indices and none has the usual name.
    """
    if store.kind(path) == "file":
        return FileSet((read_header(store, path),))

    names = store.list_directory(path)
    index = find_index(path, names)
    if index is None:
        files = tensor_files(path, names)
        for sibling, name in missing_siblings(files):
            raise CorruptCheckpointError(os.path.join(path, sibling), f"is missing; {name!r} is there")

        headers = tuple([read_header(store, os.path.join(path, name)) for name in files])
        file_of_each(headers)
        return FileSet(headers)

    weights, is_sealed = read_index(store, os.path.join(path, index))
    files = sorted(set(weights.values()))
    missing = [name for name in files if store.kind(os.path.join(path, name)) != "file"]
    if missing:
        problem = f"is missing, and {index!r} refers to it"
        raise CorruptCheckpointError(os.path.join(path, missing[0]), problem)

    headers = tuple([read_header(store, os.path.join(path, name)) for name in files])
    _check_index(os.path.join(path, index), weights, file_of_each(headers))
    return FileSet(headers, os.path.join(path, index), is_sealed)


def find_index(path: str, names: Sequence[str]) -> str | None:
    """Return which of the names in the folder `path` is that of its index; None if there is none.

    Raises:
        UnsupportedFormatError: If there are several, and none has the usual name.
    """
    found = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(found) > 1 and _USUAL_INDEX not in found:
        problem = f"holds {len(found)} indices ({', '.join(found)}); open one of the files"
        raise UnsupportedFormatError(path, problem)
    if len(found) > 1:
        return _USUAL_INDEX

    return found[0] if found else None


def tensor_files(path: str, names: Sequence[str]) -> list[str]:
    """Return the names of all files of tensors in the folder `path`.

    Raises:
        NotACheckpointError: If there is none.
    """
    files = [name for name in names if name.endswith(SUFFIX)]
    if not files:
        raise NotACheckpointError(path, "holds no safetensors file")

    return files


def missing_siblings(files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each missing file whose existence follows from the name of another one, and that one."""
    there = frozenset(files)
    for name in files:
        shard = _SHARD.fullmatch(name)
        if shard is None or int(shard["count"]) > 99_999:
            continue
        for number in range(1, int(shard["count"]) + 1):
            sibling = f"{shard['stem']}-{number:05}-of-{shard['count']}{SUFFIX}"
            if sibling not in there:
                yield sibling, name


def read_index(store: Store, path: str) -> tuple[Mapping[str, str], bool]:
    """Return the file of each tensor, and whether the index was compared with its checksum.

    Raises:
        ChecksumError: If it is not as penstock wrote it.
        CorruptCheckpointError: If it is no index.
    """
    data = store.read_file(path)
    document = parse_object(path, data)
    about = document.get("metadata")
    texts = cast("dict[str, object]", about) if isinstance(about, dict) else {}
    is_sealed = file_digests.find(path, data, texts) is not None
    weights = as_object(path, "weight_map", document.get("weight_map"))
    found = {name: as_string(path, f"weight_map[{name!r}]", file) for name, file in weights.items()}
    for name, file in found.items():
        # An untrusted index must not make its reader open other files.
        if os.path.basename(file) != file or not file.endswith(SUFFIX):
            raise CorruptCheckpointError(path, f"{name!r} is said to lie in {file!r}, which is no file here")

    return found, is_sealed


def file_of_each(headers: Sequence[FileHeader]) -> dict[str, str]:
    """Return the file that each tensor is in.

    Raises:
        CorruptCheckpointError: If one is in two.
    """
    found: dict[str, str] = {}
    for header in headers:
        for tensor in header.tensors:
            first = found.setdefault(tensor.name, header.path)
            if first != header.path:
                problem = f"holds {tensor.name!r}, which {os.path.basename(first)!r} also holds"
                raise CorruptCheckpointError(header.path, problem, key_path=f"[{tensor.name!r}]")

    return found


def _check_index(path: str, weights: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Compare the index with the files; a tensor that it does not list is read, too."""
    for name, file in weights.items():
        if name not in found:
            raise CorruptCheckpointError(
                path, f"lists {name!r}, which {file!r} does not hold", key_path=f"[{name!r}]"
            )
        there = os.path.basename(found[name])
        if there != file:
            problem = f"says that {name!r} lies in {file!r}, but it lies in {there!r}"
            raise CorruptCheckpointError(path, problem, key_path=f"[{name!r}]")
