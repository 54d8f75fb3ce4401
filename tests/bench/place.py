"""A folder for checkpoints that is gone afterwards, whatever happens."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "penstock-bench-"
SPARE = 2**30


class NoSpaceError(Exception):
    """The disk is too small for a workload."""


@contextmanager
def open_place(parent: Path) -> Generator[Path]:
    """Yield an empty folder in `parent`; first remove those of runs that were killed."""
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{PREFIX}*"):
        owner = left.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(left, ignore_errors=True)

    place = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent)).resolve()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def check_space(place: Path, nbytes: int, n_copies: int) -> None:
    """Raise `NoSpaceError` unless so many copies fit, with something to spare."""
    needed, free = nbytes * n_copies + SPARE, shutil.disk_usage(place).free
    if free < needed:
        raise NoSpaceError(f"{needed / 2**30:.1f} GiB are needed at {place}, and {free / 2**30:.1f} are free")
