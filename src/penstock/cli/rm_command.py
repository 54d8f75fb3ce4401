"""`penstock rm`: deletes checkpoints, and nothing else."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import json

import anyio

import penstock
from penstock.cli.completers import completed, step_numbers
from penstock.cli.terminal import CommandError, Output, format_bytes
from penstock.handlers.layouts.discovery import check_deletable, checkpoint_path, find_place
from penstock.inspection.file_sizes import FileSizes, sizes_below
from penstock.stores.store_finder import store_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Delete each checkpoint at PATH, on a disk or in a bucket; of a directory of steps, those that "
        "--step names. Nothing else is deleted: what is being read or written is refused, files that "
        "another step shares stay there, and of a link only the link goes."
    )
    parser.add_argument("path", metavar="PATH", nargs="+", help="a checkpoint, a step, or safetensors")
    step = parser.add_argument(
        "--step", type=int, action="append", metavar="N", help="this step of the one PATH; repeatable"
    )
    completed(step, step_numbers)
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Delete what is named, one after the other; the first that cannot be deleted ends it.

    Raises:
        CommandError: If a directory of steps is named without a step.
        PenstockError: What `penstock.delete` raises.
    """
    # All are looked at first: a slip of the pen in the last one deletes nothing.
    found = [(path, _sizes(path)) for path in map(_checked, _named(options))]
    for path, sizes in found:
        if not options.dry_run:
            anyio.run(penstock.delete, path)
        if not options.json:
            what = "would be deleted" if options.dry_run else "deleted"
            output.success(f"{path}: {what} ({format_bytes(sizes.own_bytes)} freed)")

    if options.json:
        deleted = [{"path": path, "freed_bytes": sizes.own_bytes} for path, sizes in found]
        output.say(json.dumps({"dry_run": options.dry_run, "deleted": deleted}, indent=2))

    return 0


def _named(options: argparse.Namespace) -> list[str]:
    if options.step is None:
        return [_one(path) for path in options.path]
    if len(options.path) != 1:
        raise CommandError("--step goes with one PATH")

    store, path = store_of(options.path[0])
    return [checkpoint_path(store, path, step) for step in options.step]


def _one(path: str) -> str:
    store, found = store_of(path)
    if find_place(store, found).kind == "root":
        raise CommandError(f"{path}: is a directory of steps; name those to delete with --step")

    return found


def _checked(path: str) -> str:
    check_deletable(*store_of(path))
    return path


def _sizes(path: str) -> FileSizes:
    return sizes_below(*store_of(path))
