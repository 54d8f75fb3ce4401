"""A base that is used if it is whole. For managers, which choose it themselves."""

from __future__ import annotations

__all__ = ("BaseIfWhole",)

import os
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class BaseIfWhole(os.PathLike[str]):
    """The path of a base. One that is gone or damaged links nothing, and is no error.

    The processes of a job need not agree about it: each links what it finds.
    """

    path: str

    def __fspath__(self) -> str:
        return self.path
