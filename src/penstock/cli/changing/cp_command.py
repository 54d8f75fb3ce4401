"""`penstock cp`: copies checkpoints as they are."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import json
import os
from collections.abc import Sequence
from functools import partial

import anyio

import penstock
from penstock.cli.changing.file_copying import copy_checkpoint
from penstock.cli.terminal.byte_sizes import format_bytes
from penstock.cli.terminal.terminal_output import Bar, CommandError, Output
from penstock.handlers.formats.orbax.discovery import ROOT_FOLDER, step_at
from penstock.handlers.layouts.discovery import Place, checkpoint_path, find_place
from penstock.inspection.file_sizes import sizes_below
from penstock.inspection.places import store_of
from penstock.kernel.errors import NotACheckpointError
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.paths import bucket_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Copy the checkpoint at SOURCE to DESTINATION, every file as it is, also those of other programs; "
        "of a directory of steps, every finished step. While it is copied nobody deletes it here, and if it "
        "is overwritten, the new one is copied instead. The copy appears in one step, when it is durable. To "
        "or from a bucket it is written anew, as `convert` does."
    )
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint, a directory of steps, or safetensors")
    parser.add_argument("destination", metavar="DESTINATION", help="where it goes; nothing may be there")
    parser.add_argument("--step", type=int, metavar="N", help="only this step of SOURCE")
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would be copied")
    parser.add_argument("--json", action="store_true", help="as one JSON document")


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
    copies = _copies(store, place, destination)
    if not copies:
        raise CommandError(f"{source}: there is nothing to copy")

    sizes = [sizes_below(store, path).nbytes for path, _ in copies]
    if not options.dry_run:
        _copy_all(copies, sizes, output)
    if options.json:
        copied = [
            {"source": path, "destination": target, "nbytes": nbytes}
            for (path, target), nbytes in zip(copies, sizes, strict=True)
        ]
        output.say(json.dumps({"dry_run": options.dry_run, "copied": copied}, indent=2))
    elif options.dry_run:
        for path, target in copies:
            output.say(f"{path}: would be copied to {target}")
    else:
        output.success(f"{destination}: {len(copies):,} copied, {format_bytes(sum(sizes))}")

    return 0


def _copy_all(copies: Sequence[tuple[str, str]], sizes: Sequence[int], output: Output) -> None:
    in_buckets = any(bucket_of(path) is not None for path in copies[0])
    with output.bar(sum(sizes), "bytes") as bar:
        done = 0
        for (path, target), nbytes in zip(copies, sizes, strict=True):
            if in_buckets:
                anyio.run(penstock.convert, path, target)
                done += nbytes
                bar.show(done, os.path.basename(path))
            else:
                show = partial(_show, bar, done, os.path.basename(path))
                done += anyio.run(copy_checkpoint, path, target, show)


def _show(bar: Bar, before: int, name: str, done: int) -> None:
    bar.show(before + done, name)


def _copies(store: Store, place: Place, destination: str) -> list[tuple[str, str]]:
    """Return what is copied where: of a run the finished steps, and the metadata of the run before them."""
    if place.kind == "folder":
        raise NotACheckpointError(place.path, "is a folder, and no checkpoint; copy what is in it one by one")
    if place.kind != "root":
        return [(place.path, destination)]

    metadata = [ROOT_FOLDER] if store.kind(os.path.join(place.path, ROOT_FOLDER)) == "directory" else []
    steps = [name for name in place.steps if step_at(store, os.path.join(place.path, name)).is_published]
    if metadata and bucket_of(place.path) is None and bucket_of(destination) is None:
        steps = [*metadata, *steps]

    return [(os.path.join(place.path, name), os.path.join(destination, name)) for name in steps]
