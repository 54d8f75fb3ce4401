"""`penstock delete`: deletes one checkpoint."""

from __future__ import annotations

__all__ = ("delete",)

import anyio

import penstock
from penstock.cli.terminal.terminal_output import Output


def delete(path: str, output: Output) -> int:
    """Delete the checkpoint at `path`, and say so.

    Raises:
        PenstockError: What `penstock.delete` raises.
    """
    anyio.run(penstock.delete, path)
    output.success(f"{path}: deleted")
    return 0
