"""`penstock seal`: records the digests of a checkpoint that has none."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import json
from dataclasses import asdict
from functools import partial

import penstock
from penstock.cli.read_progress import run_with_bar
from penstock.cli.terminal import Output, format_bytes
from penstock.kernel.words import counted


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Record the digests of everything in the checkpoint at PATH, or in each step there, as it is now, "
        "so that `verify` and restores can compare it. For checkpoints that Orbax, or penstock 0.1, wrote."
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a directory of steps")
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Seal the checkpoint that is named, or every step there, and print what was recorded.

    Raises:
        PenstockError: What `penstock.seal` raises.
    """
    found = run_with_bar(output, options.path, partial(penstock.seal, options.path))
    if options.json:
        output.say(json.dumps(asdict(found), indent=2))
        return 0

    documents, ranges = counted(found.n_documents, "document"), counted(found.n_ranges, "range")
    what = f"{documents}, {ranges}, {format_bytes(found.nbytes)} read"
    before = f"; {len(found.unchanged):,} had a record before" if found.unchanged else ""
    output.success(f"{found.path}: {counted(len(found.sealed), 'record')} written ({what}){before}")
    return 0
