"""Databases of single processes that were never merged into one."""

from __future__ import annotations

__all__ = ("check_merged",)

from collections.abc import Collection

from penstock.handlers.formats.orbax.documents.file_names import MANIFEST, OF_A_PROCESS
from penstock.kernel.errors import IncompleteCheckpointError


def check_merged(directory: str, names: Collection[str], use_ocdbt: bool | None) -> None:
    """Raise if each process wrote its part but the merge at the end of the save is missing.

    A process knows only its own chunks, and most know no array's shape, so parts are not read.

    Args:
        directory: Of the tree; it has arrays.
        names: What is in it.
        use_ocdbt: What is recorded, None if nothing is.

    Raises:
        IncompleteCheckpointError: The message names the parts.
    """
    parts = sorted(name for name in names if name.startswith(OF_A_PROCESS))
    if parts and MANIFEST not in names and use_ocdbt is not False:
        raise IncompleteCheckpointError(
            directory, f"has no {MANIFEST}: its parts were never merged ({', '.join(parts)})"
        )
