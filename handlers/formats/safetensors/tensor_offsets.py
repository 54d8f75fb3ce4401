"""Decides the file and offset of each tensor of a new checkpoint. Pure.

The header comes first and says where everything is, so all of it is decided before the first byte is
written.
"""

from __future__ import annotations

__all__ = ("DEFAULT_SHARD_BYTES", "SINGLE_FILE", "arrange", "check_leaf")

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from penstock.handlers.formats.safetensors import file_digests
from penstock.handlers.formats.safetensors import penstock_metadata as notes
from penstock.handlers.formats.safetensors.element_types import CODES
from penstock.handlers.formats.safetensors.header import MAX_HEADER_BYTES, encode_header
from penstock.handlers.formats.safetensors.header_decoding import METADATA
from penstock.handlers.formats.safetensors.penstock_metadata import Note, steps_of
from penstock.kernel.errors import InvalidLeafError, SpecError
from penstock.kernel.protocols.layouts import Arrangement, Place
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.written import Document

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
            bytes, or a handler that writes files of its own.
    """
    if spec.shape is None:
        if spec.text is None and not spec.is_empty_marker:
            problem = f"a {spec.typestr} is stored in files of its own handler, which safetensors cannot hold"
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
            lies alone. None: one file.

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
    places: list[Place | None] = [None] * len(infos)
    for number, (name, shard) in enumerate(zip(names, shards, strict=True)):
        head = _head(shard, {**texts, notes.MEMBER: notes.encode(note)} if number == 0 else texts)
        heads.append(Document(name, head))
        for index, begin in shard.begins.items():
            places[index] = Place(name, len(head) + begin)

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
        random_keys={info.name: spec.random_key_impl for info, spec in arrays if spec.random_key_impl},
        kinds={info.name: spec.typestr for info, spec in arrays if spec.typestr != kind},
        kind=kind,
        metadata=others,
        added=added,
    )
    return {_FORMAT: _FORMAT_VALUE, **texts}, note
