"""What a manager writes next to its steps, which tests of the steps leave out."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final

from penstock.handlers.stores.publishing import WRITER

REPORTS: Final = "_PENSTOCK_REPORTS.json"


def is_own(name: str) -> bool:
    """True of what a manager writes; reports have a longer name while they are written."""
    return name == WRITER or name.startswith(REPORTS)


def listed(root: str | os.PathLike[str], besides: Collection[str] = ()) -> list[str]:
    """Return the names in a directory of steps, sorted, without the manager's own and those of `besides`."""
    return sorted(name for name in os.listdir(root) if not is_own(name) and name not in besides)
