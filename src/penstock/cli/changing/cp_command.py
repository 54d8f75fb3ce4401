"""`penstock cp`: copies checkpoints as they are."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import os
from functools import partial

import anyio

import penstock
from penstock.cli.changing.file_copying import copy_checkpoint
from penstock.cli.terminal.byte_sizes import format_bytes
from penstock.cli.terminal.terminal_output import Bar, CommandError, Output
from penstock.inspection.file_sizes import sizes_below
from penstock.inspection.places import Place, checkpoint_path, find_place, store_of
from penstock.kernel.errors import NotACheckpointError
from penstock.kernel.storage.paths import bucket_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Copy the checkpoint at SOURCE to DESTINATION, every file as it is, also those of other programs; "
        "of a directory of steps, every finished step. While it is copied nobody deletes it here, and the "
        "copy appears in one step, when it is durable. To or from a bucket it is written anew, as "
        "`convert` does."
    )
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint, a directory of steps, or safetensors")
    parser.add_argument("destination", metavar="DESTINATION", help="where it goes; nothing may be there")
    parser.add_argument("--step", type=int, metavar="N", help="only this step of SOURCE")
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would be copied")


def run(options: argparse.Namespace, output: Output) -> int:
    """Copy, and say what was copied.

    Raises:
        CommandError: If the source has no finished step.
        PenstockError: If the source is no checkpoint, something lies at the destination, or the medium
            refuses.
    """
    store, source = store_of(options.source)
    if options.step is not None:
        source = checkpoint_path(store, source, options.step)

    _, destination = store_of(options.destination)
    place = find_place(store, source)
    copies = _copies(place, destination)
    if not copies:
        raise CommandError(f"{source}: there is nothing to copy")

    total = sum(sizes_below(store, path).nbytes for path, _ in copies)
    if options.dry_run:
        for path, target in copies:
            output.say(f"{path}: would be copied to {target}")

        return 0

    in_buckets = bucket_of(source) is not None or bucket_of(destination) is not None
    with output.bar(total, "bytes") as bar:
        done = 0
        for path, target in copies:
            if in_buckets:
                anyio.run(penstock.convert, path, target)
                done += sizes_below(store, path).nbytes
                bar.show(done, os.path.basename(path))
            else:
                done += copy_checkpoint(path, target, partial(_show, bar, done, os.path.basename(path)))

    output.success(f"{destination}: {len(copies):,} checkpoints copied, {format_bytes(total)}")
    return 0


def _show(bar: Bar, before: int, name: str, done: int) -> None:
    bar.show(before + done, name)


def _copies(place: Place, destination: str) -> list[tuple[str, str]]:
    """Return what is copied where: the metadata beside the steps of a run goes first."""
    if place.kind == "folder":
        raise NotACheckpointError(place.path, "is a folder, and no checkpoint; copy what is in it one by one")
    if place.kind != "root":
        return [(place.path, destination)]

    return [(os.path.join(place.path, name), os.path.join(destination, name)) for name in place.steps]
