"""What an OCDBT key maps to: a few bytes in the index, or a range of a data file."""

from __future__ import annotations

__all__ = ("MAX_INLINE_BYTES", "Indirect", "Inline", "Value")

from dataclasses import dataclass
from typing import TypeAlias, final

#: The longest value stored in the index itself, in bytes, as Orbax configures it.
MAX_INLINE_BYTES = 1024


@final
@dataclass(frozen=True, slots=True)
class Inline:
    """A value that is stored in the index itself."""

    value: bytes


@final
@dataclass(frozen=True, slots=True)
class Indirect:
    """A value that is stored in a data file."""

    file: str  #: relative to the database's directory, like `d/<32 hex>` or `ocdbt.process_0/d/<32 hex>`
    offset: int  #: bytes from the start of the file
    length: int  #: bytes


Value: TypeAlias = Inline | Indirect
