"""`penstock verify`: compares a checkpoint with the checksums of what was written."""

from __future__ import annotations

__all__ = ("verify",)

import json
from dataclasses import asdict

import anyio

import penstock
from penstock.checkpointer.verify import VerifyReport
from penstock.cli.terminal.byte_sizes import format_bytes
from penstock.cli.terminal.terminal_output import Output, Table


def verify(path: str, output: Output, *, as_json: bool) -> int:
    """Check the checkpoint at `path` and print what is damaged.

    Returns:
        0 if everything is as it was written, else 1.

    Raises:
        PenstockError: If it is not a checkpoint, or has no recorded checksums.
    """
    found = anyio.run(penstock.verify, path)
    if as_json:
        output.say(json.dumps({"intact": found.intact, **asdict(found)}, indent=2))
    else:
        _show(found, output)

    return 0 if found.intact else 1


def _show(found: VerifyReport, output: Output) -> None:
    if found.damages:
        rows = [
            (
                ", ".join(damage.key_paths) or "(no leaf)",
                damage.problem,
                damage.file,
                f"{damage.offset:,}",
                f"{damage.nbytes:,}",
            )
            for damage in found.damages
        ]
        output.table(Table(("leaf", "problem", "file", "offset", "bytes"), rows, n_left=3))
    if found.unchecked:
        output.say(f"no checksum was recorded for {', '.join(found.unchecked)}")

    what = f"{found.n_ranges:,} ranges, {format_bytes(found.nbytes)}, of {found.n_leaves:,} leaves"
    if found.intact:
        output.success(f"{found.path}: intact ({what})")
    else:
        n_damaged = len(found.damaged_leaves)
        output.say(f"{found.path}: DAMAGED, {n_damaged:,} of its leaves ({what} were checked)")
