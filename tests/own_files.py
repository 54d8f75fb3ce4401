"""What a manager writes next to its steps, which tests of the steps leave out."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final

from penstock.handlers.stores.publishing import WRITER

REPORTS: Final = "_PENSTOCK_REPORTS.json"
OWN: Final = frozenset({WRITER, REPORTS, f"{REPORTS}.new"})  #: the last while it is written


def listed(root: str | os.PathLike[str], besides: Collection[str] = ()) -> list[str]:
    """Return the names in a directory of steps, sorted, without the manager's own and those of `besides`."""
    return sorted(name for name in os.listdir(root) if name not in OWN and name not in besides)
