"""`penstock seal`: records the digests of what lies in a checkpoint that has none."""

from __future__ import annotations

__all__ = ("seal",)

import json
from dataclasses import asdict
from functools import partial

import anyio

import penstock
from penstock.cli.terminal.byte_sizes import format_bytes
from penstock.cli.terminal.terminal_output import Output


def seal(path: str, output: Output, *, as_json: bool) -> int:
    """Seal the checkpoint at `path`, or every step there, and print what was recorded.

    Raises:
        PenstockError: What `penstock.seal` raises.
    """
    found = anyio.run(partial(penstock.seal, path))
    if as_json:
        output.say(json.dumps(asdict(found), indent=2))
        return 0

    what = f"{found.n_documents:,} documents, {found.n_ranges:,} ranges, {format_bytes(found.nbytes)} read"
    before = f"; {len(found.unchanged):,} had a record before" if found.unchanged else ""
    output.success(f"{found.path}: {len(found.sealed):,} records written ({what}){before}")
    return 0
