"""Lists the ranges of a safetensors checkpoint that have a checksum, and those that have none."""

from __future__ import annotations

__all__ = ("TensorSurvey", "ranges_of", "survey_tensors")

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

from penstock.handlers.formats.leaf_table import show_key_path
from penstock.handlers.formats.safetensors.file_digests import MEMBER
from penstock.handlers.formats.safetensors.file_set import FileSet
from penstock.handlers.formats.safetensors.header import FileHeader
from penstock.handlers.formats.safetensors.safetensors_checkpoint import open_checkpoint
from penstock.handlers.formats.verification import Finding, RecordedRange
from penstock.kernel.protocols.leaf import KeyKind
from penstock.kernel.protocols.stores import Store

_HINT: Final = "`penstock convert` writes a copy that does"


@final
@dataclass(frozen=True, slots=True)
class TensorSurvey:
    """All that can be compared, and what is known without reading a byte of a tensor."""

    n_leaves: int
    n_documents: int  #: headers and indices that were compared
    ranges: tuple[RecordedRange, ...]  #: by file and offset
    findings: tuple[Finding, ...]


def survey_tensors(store: Store, path: str, item: str | None = None) -> TensorSurvey:
    """Find what can be compared of the checkpoint at `path`. Compares the headers and the index. Blocking.

    Raises:
        PenstockError: As `open_checkpoint`.
    """
    opened = open_checkpoint(store, path, item)
    sealed = [header for header in opened.files.headers if header.checksums is not None]
    ranges = tuple([found for header in sealed for found in ranges_of(header)])
    n_documents = len(sealed) + opened.files.index_is_sealed
    return TensorSurvey(len(opened.leaves), n_documents, ranges, tuple(_unchecked(opened.files)))


def ranges_of(header: FileHeader) -> Iterator[RecordedRange]:
    """Yield each block of each tensor that has a checksum, by offset, under the name of its tensor."""
    tensors = sorted([tensor for tensor in header.tensors if tensor.nbytes], key=lambda one: one.offset)
    offsets = [tensor.offset for tensor in tensors]
    for checksum in header.checksums or ():
        tensor = tensors[bisect_right(offsets, checksum.offset) - 1]
        yield RecordedRange(header.path, checksum, (show_key_path((tensor.name,), (KeyKind.MAPPING,)),))


def _unchecked(files: FileSet) -> Iterator[Finding]:
    for header in files.headers:
        if header.checksums is None:
            yield Finding("unchecked", header.path, _why(MEMBER in header.metadata))

    if files.index is not None and not files.index_is_sealed:
        yield Finding("unchecked", files.index, _why(is_outdated=False))


def _why(is_outdated: bool) -> str:
    if is_outdated:
        return f"was written anew by another program, so that its checksums are of other bytes; {_HINT}"

    return f"records no checksums; {_HINT}"
