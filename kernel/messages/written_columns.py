"""Where thousands of pieces were written, in columns: what another process tells of them."""

from __future__ import annotations

__all__ = ("WrittenColumns",)

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.written import Written

Column: TypeAlias = Any
"""An array of int64, of which the kernel knows nothing."""


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WrittenColumns:
    """A `Written` in each row. The columns are of one length."""

    specs: Sequence[LeafSpec]  #: of all leaves, by index
    files: Sequence[str]  #: relative to the checkpoint directory
    leaf: Column
    chunk: Column  #: the chunk's place in C order of the leaf's grid
    start: Column
    file: Column  #: number in `files`
    offset: Column
    nbytes: Column
    crc32c: Column
    coded: Column  #: -1 where the chunk is not encoded
    block_bytes: Column  #: of `Written.running`; 0 where there is none
    running: Column  #: the checksums of these, row after row

    def parts(self, rows: Iterable[int] | None = None) -> Iterator[Written]:
        """Yield all rows, or some of them, as objects, without `running`."""
        for row in range(len(self.leaf)) if rows is None else rows:
            leaf, coded = int(self.leaf[row]), int(self.coded[row])
            yield Written(
                leaf,
                _index(int(self.chunk[row]), self.specs[leaf].grid_shape),
                int(self.start[row]),
                self.files[int(self.file[row])],
                int(self.offset[row]),
                int(self.nbytes[row]),
                int(self.crc32c[row]),
                None if coded < 0 else coded,
            )


def _index(flat: int, grid: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(grid):
        flat, at = divmod(flat, size)
        index.append(at)

    return tuple(reversed(index))
