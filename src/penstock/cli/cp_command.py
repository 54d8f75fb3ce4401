"""`penstock cp`: copies checkpoints as they are."""

from __future__ import annotations

__all__ = (
    "configure",
    "copy_checkpoint",
    "run",
)

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import anyio

import penstock
from penstock.cli.completers import completed, step_numbers
from penstock.cli.terminal import Bar, CommandError, Output, format_bytes
from penstock.handlers.formats.orbax.discovery import ROOT_FOLDER, step_at
from penstock.handlers.formats.orbax.file_names import COMMIT_MARK, REPORTS
from penstock.handlers.layouts.discovery import Place, checkpoint_path, find_place
from penstock.handlers.stores.publishing.paths import scheme_of
from penstock.inspection.file_sizes import sizes_below
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import CorruptCheckpointError, NotACheckpointError
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.protocols.stores import Store
from penstock.kernel.words import counted
from penstock.reports.kept_reports import copy_reports
from penstock.stores.store_finder import store_of
from penstock.verification.copying import COPY_WORKERS, CheckpointCopier


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Copy the checkpoint at SOURCE to DESTINATION, every file as it is, also those of other programs; "
        "of a directory of steps, every finished step, and what was recorded of its saves. Checksums are "
        "compared on the way, and what is damaged is not copied. While it is copied nobody deletes it here, "
        "and if it is overwritten, the new one is copied instead. The copy appears in one step, when it is "
        "durable. What has no commit_success.txt, as Orbax saves on a disk, is written anew in a bucket, as "
        "`convert` does, since there it needs one."
    )
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint, a directory of steps, or safetensors")
    parser.add_argument("destination", metavar="DESTINATION", help="where it goes; nothing may be there")
    step = parser.add_argument("--step", type=int, metavar="N", help="only this step of SOURCE")
    completed(step, step_numbers)
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would be copied")
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Copy, and say what was copied.

    Raises:
        CommandError: If the source has no finished step, something is at the destination, or steps of a run
            are damaged: those that are not are copied first.
        PenstockError: If the source is no checkpoint, or is damaged, or the medium refuses.
    """
    store, source = store_of(options.source)
    if options.step is not None:
        source = checkpoint_path(store, source, options.step)

    _, destination = store_of(options.destination)
    place = find_place(store, source)
    copies = _copies(store, place, destination)
    if not copies:
        raise CommandError(f"{source}: there is nothing to copy")

    for _, target in copies:  # all of them, before the first is copied
        if store_of(target)[0].kind(target) is not None:
            raise CommandError(f"{target}: exists, and is not replaced; delete it, or copy to another place")

    sizes = [sizes_below(store, path).nbytes for path, _ in copies]
    damaged: Mapping[str, CorruptCheckpointError] = {}
    if not options.dry_run:
        damaged = _copy_all(copies, sizes, output)

    done = [
        (path, target, nbytes)
        for (path, target), nbytes in zip(copies, sizes, strict=True)
        if path not in damaged
    ]
    if options.json:
        copied = [dict(zip(("source", "destination", "nbytes"), each, strict=True)) for each in done]
        output.say(json.dumps({"dry_run": options.dry_run, "copied": copied}, indent=2))
    elif options.dry_run:
        for path, target in copies:
            output.say(f"{path}: would be copied to {target}")
    else:
        besides = (ROOT_FOLDER, REPORTS) if place.kind == "root" else ()
        n = sum(os.path.basename(path) not in besides for path, _, _ in done)
        nbytes = sum(nbytes for _, _, nbytes in done)
        output.success(f"{destination}: {counted(n, 'checkpoint')} copied, {format_bytes(nbytes)}")
    if damaged:
        problems = "".join([f"\n  {error}" for error in damaged.values()])
        raise CommandError(f"{counted(len(damaged), 'step')} not copied, because of damage:{problems}")

    return 0


def _copy_all(
    copies: Sequence[tuple[str, str]], sizes: Sequence[int], output: Output
) -> Mapping[str, CorruptCheckpointError]:
    """Copy all, and return what is damaged, by path. What is alone raises that itself."""
    damaged: dict[str, CorruptCheckpointError] = {}
    with output.bar(sum(sizes), "bytes") as bar:
        done = 0
        for (path, target), nbytes in zip(copies, sizes, strict=True):
            name = os.path.basename(path)
            try:
                if name == REPORTS:
                    copy_reports(*_folder_of(path), *_folder_of(target))
                elif _needs_a_mark(path, target):
                    anyio.run(penstock.convert, path, target)
                else:
                    anyio.run(copy_checkpoint, path, target, partial(_show, bar, done, name))
            except CorruptCheckpointError as error:
                if len(copies) == 1:
                    raise

                damaged[path] = error

            done += nbytes
            bar.show(done, name)

    return damaged


def _needs_a_mark(path: str, target: str) -> bool:
    """True if a checkpoint would not count where it goes: in a bucket each has a mark, on a disk not all."""
    (source, _), (into, _) = store_of(path), store_of(target)
    if into.objects is None or source.kind(path) != "directory":
        return False

    return source.kind(os.path.join(path, COMMIT_MARK)) is None


def _folder_of(path: str) -> tuple[Store, str]:
    return store_of(os.path.dirname(path))


def _show(bar: Bar, before: int, name: str, done: int) -> None:
    bar.show(before + done, name)


def _copies(store: Store, place: Place, destination: str) -> list[tuple[str, str]]:
    """Return sources and destinations: of a run its metadata, the finished steps and the reports of saves."""
    if place.kind == "folder":
        raise NotACheckpointError(place.path, "is a folder, and no checkpoint; copy what is in it one by one")
    if place.kind != "root":
        return [(place.path, destination)]

    metadata = [ROOT_FOLDER] if store.kind(os.path.join(place.path, ROOT_FOLDER)) == "directory" else []
    steps = [name for name in place.steps if step_at(store, os.path.join(place.path, name)).is_published]
    if metadata and scheme_of(place.path) is None and scheme_of(destination) is None:
        steps = [*metadata, *steps]
    kept, target = os.path.join(place.path, REPORTS), os.path.join(destination, REPORTS)
    if steps and store.kind(kept) == "file" and store_of(target)[0].kind(target) is None:
        steps = [*steps, REPORTS]

    return [(os.path.join(place.path, name), os.path.join(destination, name)) for name in steps]


async def copy_checkpoint(source: str, destination: str, on_progress: Callable[[int], object]) -> int:
    """Copy a checkpoint with its files as they are; see `CheckpointCopier.copy`.

    Args:
        source: A finished checkpoint, in any store.
        destination: Where it goes, in any store; nothing is there.
        on_progress: Called with the bytes copied so far, in a worker thread.
    """
    (reading, path), (writing, target) = store_of(source), store_of(destination)
    copier = CheckpointCopier(reading, writing, Threads(COPY_WORKERS), MemoryRegulator())
    return await copier.copy(path, target, on_progress=on_progress)
