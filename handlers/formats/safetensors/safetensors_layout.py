"""safetensors as a `Layout` of the kernel: one file, or a folder of files and their index.

The header of a file comes first and says where everything is, so `arrange` decides all of it before the first
byte is written. `WrittenDigests` adds the checksums to a header once its file is complete.
"""

from __future__ import annotations

__all__ = (
    "DEFAULT_SHARD_BYTES",
    "SINGLE_FILE",
    "SafetensorsLayout",
    "TensorsLayout",
    "WrittenDigests",
    "arrange",
    "check_leaf",
)

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Final, Self, TypeAlias, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.formats.orbax.file_names import TEMPORARY_SUFFIX, unfinished_at
from penstock.handlers.formats.region_reads import append_zeros_to_each
from penstock.handlers.formats.safetensors import file_digests
from penstock.handlers.formats.safetensors import penstock_metadata as notes
from penstock.handlers.formats.safetensors.file_digests import BLOCK_BYTES, blocks_of, filled
from penstock.handlers.formats.safetensors.file_set import bytes_to_decode
from penstock.handlers.formats.safetensors.header import (
    CODES,
    MAX_HEADER_BYTES,
    METADATA,
    encode_header,
)
from penstock.handlers.formats.safetensors.penstock_metadata import Note, steps_of
from penstock.handlers.formats.safetensors.safetensors_checkpoint import (
    SafetensorsCheckpoint,
    open_checkpoint,
)
from penstock.handlers.formats.safetensors.tensor_paths import (
    SUFFIX,
    holds_only_tensors,
    holds_tensors,
)
from penstock.handlers.stores.publishing.paths import temporary_path
from penstock.kernel.errors import InvalidLeafError, NotACheckpointError, PathError, SpecError
from penstock.kernel.options import fit_fields
from penstock.kernel.protocols.layouts import Arrangement, FilePosition, Opening, WrittenRange
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import Leaf
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Document, WrittenLeaves

# The default of Hugging Face's writers, so that folders look as their readers expect.
DEFAULT_SHARD_BYTES: Final = 5 * 10**9
SINGLE_FILE: Final = "model.safetensors"

_FORMAT: Final = "format"
_FORMAT_VALUE: Final = "pt"
"""transformers refuses to load a file whose metadata does not name the library that wrote it."""

LeafAt: TypeAlias = "tuple[int, ParamInfo, LeafSpec]"
"""A leaf with its place in flatten order."""


@final
@dataclass(frozen=True, slots=True)
class _Shard:
    """The tensors of one file, in tree order, and where their data begin after the header."""

    members: tuple[LeafAt, ...]
    begins: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for _, _, spec in self.members)


def check_leaf(info: ParamInfo, spec: LeafSpec) -> None:
    """Refuse a leaf that the format cannot hold.

    Raises:
        InvalidLeafError: If it has elements of a type that the format lacks, an impossible name, opaque
            bytes, or a handler that writes its own files.
    """
    if spec.shape is None:
        if spec.text is None and not spec.is_empty_marker:
            problem = f"a {spec.typestr} is stored in files of its own handler, which safetensors cannot hold"
            raise InvalidLeafError(info.key_path, problem)
        if spec.text is not None and spec.typestr != "string":
            problem = f"a {spec.typestr} is kept as text, which would come back from safetensors as a string"
            raise InvalidLeafError(info.key_path, problem)
        return

    if spec.codec is not None:
        problem = f"its bytes are opaque ({spec.codec}), and safetensors has no way to say so"
        raise InvalidLeafError(info.key_path, problem)
    if spec.dtype not in CODES:
        problem = f"safetensors has no elements of type {spec.dtype}; convert it, or leave it out"
        raise InvalidLeafError(info.key_path, problem)
    if info.name == METADATA:
        raise InvalidLeafError(
            info.key_path, f"safetensors cannot hold a tensor called {METADATA!r}; rename it"
        )


def arrange(
    infos: Sequence[ParamInfo],
    specs: Sequence[LeafSpec],
    custom_metadata: Mapping[str, Any] | None,
    max_shard_bytes: int | None,
) -> Arrangement:
    """Decide the place of every leaf.

    Tensors keep their order from file to file; within a file the wide element types come first, so that
    each tensor begins at a multiple of its element's size.

    Args:
        infos: Of all leaves, in flatten order.
        specs: Of the same leaves; each passed `check_leaf`.
        custom_metadata: JSON. Texts become members of `__metadata__`, in every file.
        max_shard_bytes: A file that would grow beyond it is followed by another one; a larger tensor
            is alone. None: one file.

    Raises:
        SpecError: If a header would be too long, or the metadata has a name that penstock uses.

    Returns:
        The heads have zeros for checksums; `WrittenDigests` completes them.
    """
    texts, note = _metadata(infos, specs, custom_metadata)
    shards = _shards(infos, specs, max_shard_bytes)
    names = [
        f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else SINGLE_FILE
        for number in range(1, len(shards) + 1)
    ]
    heads: list[Document] = []
    places: list[FilePosition | None] = [None] * len(infos)
    for number, (name, shard) in enumerate(zip(names, shards, strict=True)):
        head = _head(shard, {**texts, notes.MEMBER: notes.encode(note)} if number == 0 else texts)
        heads.append(Document(name, head))
        for index, begin in shard.begins.items():
            places[index] = FilePosition(name, len(head) + begin)

    return Arrangement(tuple(heads), tuple(places), _index(names, shards))


def _shards(
    infos: Sequence[ParamInfo], specs: Sequence[LeafSpec], max_shard_bytes: int | None
) -> list[_Shard]:
    groups: list[list[LeafAt]] = [[]]
    nbytes = 0
    for index, (info, spec) in enumerate(zip(infos, specs, strict=True)):
        if spec.shape is None:
            continue
        if max_shard_bytes is not None and groups[-1] and nbytes + spec.nbytes > max_shard_bytes:
            groups.append([])
            nbytes = 0

        groups[-1].append((index, info, spec))
        nbytes += spec.nbytes

    return [_laid_out(group) for group in groups]


def _laid_out(members: Sequence[LeafAt]) -> _Shard:
    begins: dict[int, int] = {}
    end = 0
    for index, _, spec in sorted(members, key=lambda member: -member[2].itemsize):
        begins[index] = end
        end += spec.nbytes

    return _Shard(tuple(members), begins)


def _head(shard: _Shard, metadata: Mapping[str, str]) -> bytes:
    tensors = [
        (info.name, spec.dtype, spec.shape or (), shard.begins[index], shard.begins[index] + spec.nbytes)
        for index, info, spec in shard.members
    ]
    n_blocks = sum([-(-spec.nbytes // file_digests.BLOCK_BYTES) for _, _, spec in shard.members])
    head = encode_header(tensors, {**metadata, file_digests.MEMBER: file_digests.blank(n_blocks)})
    if len(head) - 8 > MAX_HEADER_BYTES:
        problem = f"the header would have {len(head)} bytes, of at most {MAX_HEADER_BYTES}"
        raise SpecError(f"{problem}: there are too many leaves, or their names are too long")

    return head


def _index(names: Sequence[str], shards: Sequence[_Shard]) -> tuple[Document, ...]:
    if len(names) == 1:
        return ()

    document = {
        "metadata": {
            "total_size": sum(shard.nbytes for shard in shards),
            file_digests.MEMBER: file_digests.blank(),
        },
        "weight_map": {
            info.name: name for name, shard in zip(names, shards, strict=True) for _, info, _ in shard.members
        },
    }
    data = file_digests.filled(file_digests.ended(json.dumps(document, indent=2).encode()))
    return (Document("model.safetensors.index.json", data),)


def _metadata(
    infos: Sequence[ParamInfo], specs: Sequence[LeafSpec], custom_metadata: Mapping[str, Any] | None
) -> tuple[dict[str, str], Note]:
    """Return the texts for `__metadata__`, and the note with everything that is not text."""
    custom = dict(custom_metadata or {})
    for name in (notes.MEMBER, file_digests.MEMBER):
        if name in custom:
            raise SpecError(f"custom_metadata cannot have a member {name!r}: penstock's own has its name")

    texts = {name: value for name, value in custom.items() if isinstance(value, str)}
    others = {name: value for name, value in custom.items() if not isinstance(value, str)}
    added = (*(() if _FORMAT in texts else (_FORMAT,)), file_digests.MEMBER)
    leaves = list(zip(infos, specs, strict=True))
    arrays = [(info, spec) for info, spec in leaves if spec.shape is not None]
    kinds = [spec.typestr for _, spec in arrays]
    kind = max(sorted(set(kinds)), key=kinds.count, default="np.ndarray")
    note = Note(
        paths={info.name: steps_of(info) for info in infos if steps_of(info) != tuple(info.name.split("."))},
        strings={info.name: spec.text for info, spec in leaves if spec.text is not None},
        empty={info.name: spec.typestr for info, spec in leaves if spec.is_empty_marker},
        random_keys={info.name: spec.extended_dtype for info, spec in arrays if spec.extended_dtype},
        kinds={info.name: spec.typestr for info, spec in arrays if spec.typestr != kind},
        kind=kind,
        metadata=others,
        added=added,
    )
    return {_FORMAT: _FORMAT_VALUE, **texts}, note


class TensorsLayout:
    """The members that all layouts of safetensors share: files of tensors as they are, without items.

    Where they are is decided before the first is written, and headers and the index say all of it. Digests of
    leaves are not kept, so such a checkpoint cannot be the base of another one.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        fit_fields(self, "")

    @property
    def arrays(self) -> None:
        """None: tensors are stored as they are."""

    @property
    def places(self) -> Self:
        """The layout itself."""
        return self

    @property
    def folders(self) -> None:
        """None: there are no items."""

    def data_file(self) -> str:
        return SINGLE_FILE

    def documents(
        self,
        leaves: Sequence[Leaf],
        batches: Sequence[WrittenLeaves],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes] | None = None,
        beside: Sequence[Document] = (),
    ) -> Iterable[Document]:
        """Return none: the headers and the index, made by `arrange`, say everything."""
        return ()

    def find(self, store: Store, path: str, item: str | None = None) -> Opening:
        """Tell what the headers at `path` take."""
        nbytes = bytes_to_decode(store, path) if holds_tensors(store, path) else 0
        return Opening(nbytes, partial(self.open, store, path, item))

    def open(self, store: Store, path: str, item: str | None = None) -> SafetensorsCheckpoint:
        """Read the headers of a checkpoint; see `open_checkpoint` for what it raises."""
        if TEMPORARY_SUFFIX in os.path.basename(path):
            raise unfinished_at(store, path, path)
        if store.kind(path) is None:
            raise NotACheckpointError(path, "does not exist")
        if not holds_tensors(store, path):
            raise NotACheckpointError(
                path, f"is not a safetensors file ({SUFFIX}), nor a folder with one in it"
            )

        return open_checkpoint(store, path, item)


@final
@dataclass(frozen=True, slots=True)
class SafetensorsLayout(TensorsLayout):
    """Writes files that every safetensors reader reads, and reads any whose names form a tree.

    A path that ends in `.safetensors` is one file. Any other is a folder, which holds
    `model.safetensors`, or several files with `model.safetensors.index.json`.

    What tensors cannot express (strings, None, empty containers, lists, PRNG keys) is stored in
    `__metadata__`, which other readers ignore. Shardings are not stored.

    Args:
        max_shard_bytes: A file in a folder that would hold more data is followed by another one; by
            default 5 GB. A single file is never split.
        beside: Names of files that are written next to those of tensors. A folder that has no others may be
            replaced.

    Raises:
        ConfigError: If that is not positive, or no number of bytes.
    """

    max_shard_bytes: int | None = field(default=None, metadata={"positive": True})
    beside: Sequence[str] = ()

    def temporary_name(self, path: str) -> str:
        """The name of the folder in which the file or folder `path` is made.

        Raises:
            PathError: If `path` is named like an interrupted save, or is one file that would have to be
                split.
        """
        if self.max_shard_bytes is not None and path.endswith(SUFFIX):
            raise PathError(path, "is one file, which max_shard_bytes cannot split; name a folder")

        return temporary_path(path)

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Check each leaf; see `check_leaf` for the errors. Names were compared before."""
        for leaf in leaves:
            check_leaf(leaf.info, leaf.spec)

    def arrange(
        self,
        path: str,
        infos: Sequence[ParamInfo],
        specs: Sequence[LeafSpec],
        custom_metadata: Mapping[str, Any] | None,
    ) -> Arrangement:
        """Decide where each leaf goes; see `tensor_offsets.arrange` for what it raises."""
        most = None if path.endswith(SUFFIX) else self.max_shard_bytes or DEFAULT_SHARD_BYTES
        return arrange(infos, specs, custom_metadata, most)

    def digests(self, arrangement: Arrangement, specs: Sequence[LeafSpec]) -> WrittenDigests:
        """Collect the checksums that the heads have of the tensors."""
        return WrittenDigests(arrangement, specs)

    def file_of(self, path: str) -> str | None:
        """The file that alone becomes `path`; None if it is a folder."""
        return SINGLE_FILE if path.endswith(SUFFIX) else None

    def recognises(self, store: Store, path: str) -> bool:
        """True if `path` holds only safetensors and `beside`; overwriting it would lose anything else."""
        return holds_only_tensors(store, path, self.beside)


_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """The blocks of one file, by offset."""

    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    crc32cs: npt.NDArray[np.uint32]  #: of what was written so far, all other bytes being absent


@final
class WrittenDigests:
    """Of one save; see `ArrangedDigests`. Thread-safe.

    A checksum is linear: that of a block is the exclusive or of those of its parts, each with zeros for
    what follows it. So parts may come in any order, and nothing is kept of them.

    Args:
        arrangement: Where every leaf goes, with heads that lack checksums.
        specs: Of all leaves.
    """

    __slots__ = ("_files", "_heads", "_lock")

    def __init__(self, arrangement: Arrangement, specs: Sequence[LeafSpec]) -> None:
        self._heads = {head.path: head.data for head in arrangement.heads}
        tensors: dict[str, list[tuple[int, int]]] = {head.path: [] for head in arrangement.heads}
        for place, spec in zip(arrangement.places, specs, strict=True):
            if place is not None:
                tensors[place.file].append((place.offset, spec.nbytes))

        self._files = {file: _blocks(sorted(found)) for file, found in tensors.items()}
        self._lock = Lock()

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES

    def add(self, ranges: Mapping[str, Sequence[WrittenRange]]) -> None:
        for file, found in ranges.items():
            blocks = self._files[file]
            offsets, nbytes, crc32cs = np.array(found, np.int64).reshape(-1, 3).T
            at = np.searchsorted(blocks.starts, offsets, side="right") - 1
            behind = blocks.stops[at] - offsets - nbytes
            parts = append_zeros_to_each(crc32cs.astype(np.uint32), behind)
            with self._lock:
                np.bitwise_xor.at(blocks.crc32cs, at, parts)

    def head(self, file: str) -> bytes:
        data = self._heads[file]
        return data[:_LENGTH_BYTES] + filled(data[_LENGTH_BYTES:], self._files[file].crc32cs)

    def encoded(self) -> bytes:
        with self._lock:
            return b"".join([blocks.crc32cs.astype("<u4").tobytes() for blocks in self._files.values()])

    def join(self, encoded: bytes) -> None:
        theirs = np.frombuffer(encoded, "<u4")
        if len(theirs) != sum([len(blocks.crc32cs) for blocks in self._files.values()]):
            raise ValueError("checksums of other blocks")

        at = 0
        with self._lock:
            for blocks in self._files.values():
                blocks.crc32cs[:] ^= theirs[at : at + len(blocks.crc32cs)]
                at += len(blocks.crc32cs)


def _blocks(tensors: Sequence[tuple[int, int]]) -> _Blocks:
    offsets, nbytes = np.array(tensors, np.int64).reshape(-1, 2).T
    starts, lengths = blocks_of(offsets, nbytes)
    return _Blocks(starts, starts + lengths, np.zeros(len(starts), np.uint32))
