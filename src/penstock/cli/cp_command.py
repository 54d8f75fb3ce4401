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
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import anyio
from anyio import move_on_after
from anyio.from_thread import check_cancelled

import penstock
from penstock.cli.completers import completed, step_numbers
from penstock.cli.terminal import Bar, CommandError, Output, format_bytes
from penstock.handlers.formats.orbax.discovery import ROOT_FOLDER, step_at
from penstock.handlers.formats.orbax.file_names import REPORTS
from penstock.handlers.layouts.discovery import Place, checkpoint_path, find_place
from penstock.handlers.stores.local import LocalStore
from penstock.handlers.stores.publishing.paths import scheme_of, temporary_path
from penstock.handlers.stores.publishing.reading import Reading, read_unchanged
from penstock.handlers.stores.publishing.workspace import Workspace
from penstock.inspection.file_sizes import sizes_below
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import DestinationExistsError, NotACheckpointError, NotAFileError, StorageError
from penstock.kernel.protocols.stores import Hold, NoHold, Store
from penstock.kernel.words import counted
from penstock.reports.kept_reports import copy_reports
from penstock.stores.store_finder import store_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Copy the checkpoint at SOURCE to DESTINATION, every file as it is, also those of other programs; "
        "of a directory of steps, every finished step, and what was recorded of its saves. While it is "
        "copied nobody deletes it here, and if it is overwritten, the new one is copied instead. The copy "
        "appears in one step, when it is durable. To or from a bucket it is written anew, as `convert` does."
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
        CommandError: If the source has no finished step, or something is at the destination.
        PenstockError: If the source is no checkpoint, or the medium refuses.
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
        besides = (ROOT_FOLDER, REPORTS) if place.kind == "root" else ()
        n = sum(os.path.basename(path) not in besides for path, _ in copies)
        output.success(f"{destination}: {counted(n, 'checkpoint')} copied, {format_bytes(sum(sizes))}")

    return 0


def _copy_all(copies: Sequence[tuple[str, str]], sizes: Sequence[int], output: Output) -> None:
    in_buckets = any(scheme_of(path) is not None for path in copies[0])
    with output.bar(sum(sizes), "bytes") as bar:
        done = 0
        for (path, target), nbytes in zip(copies, sizes, strict=True):
            if os.path.basename(path) == REPORTS:
                copy_reports(*_folder_of(path), *_folder_of(target))
                done += nbytes
                bar.show(done, REPORTS)
            elif in_buckets:
                anyio.run(penstock.convert, path, target)
                done += nbytes
                bar.show(done, os.path.basename(path))
            else:
                show = partial(_show, bar, done, os.path.basename(path))
                done += anyio.run(copy_checkpoint, path, target, show)


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


_BLOCK: Final = 2**24
_CLEANING_S: Final = 60.0


async def copy_checkpoint(source: str, destination: str, on_progress: Callable[[int], object]) -> int:
    """Copy the file or directory at `source` to `destination`, which must be free.

    Args:
        source: A finished checkpoint. It is held meanwhile, so that it is not deleted. If it is replaced
            meanwhile, what was copied is thrown away, and the new one is copied.
        destination: Where it goes; directories above it are made.
        on_progress: Called with the bytes copied so far, in a worker thread.

    Returns:
        The bytes copied.

    Raises:
        DestinationExistsError: If something is at the destination.
        InUseError: If the source is being deleted, or another copy is being made there.
        NotAFileError: If there is something in it that cannot be copied.
        NotDurableError: If the copy is there, and its name may not be durable.
        ReplacedError: If it was replaced again and again while it was copied.
        StorageError: If the medium refuses; nothing is left then.

    Cancellation:
        Nothing is left at the destination.
    """
    threads = Threads()
    await threads.run(_check_free, destination)
    copying = partial(_copy_and_publish, threads, source, destination, on_progress)
    return await read_unchanged(LocalStore(), threads, source, copying, _hold)


def _check_free(destination: str) -> None:
    if os.path.lexists(destination):
        raise DestinationExistsError(destination)


def _hold(path: str) -> Hold:
    return LocalStore().hold_reading(path) if os.path.isdir(path) else NoHold()


async def _copy_and_publish(
    threads: Threads, path: str, destination: str, on_progress: Callable[[int], object], source: Reading
) -> int:
    store, name = LocalStore(), os.path.basename(destination)
    workspace = Workspace(
        store, threads, destination, temporary_path(destination), overwrite=False, file=name
    )
    try:
        await workspace.open()
        nbytes = await threads.run(_copy_durably, store, path, workspace.path(name), on_progress)
        await source.end()
        await workspace.publish()
    except BaseException:
        with move_on_after(_CLEANING_S, shield=True):
            await workspace.discard()

        raise
    finally:
        workspace.release()

    return nbytes


def _copy_durably(store: LocalStore, path: str, built: str, on_progress: Callable[[int], object]) -> int:
    try:
        nbytes = _copy(path, built, on_progress)
    except OSError as error:
        if isinstance(error, StorageError):
            raise

        raise StorageError.of("copy", error.filename or path, error) from error

    store.sync_tree(os.path.dirname(built))
    return nbytes


def _copy(source: str, destination: str, on_progress: Callable[[int], object]) -> int:
    """Copy files, links as links, and times."""
    if not os.path.isdir(source):
        done = _copy_file(source, destination, 0, on_progress)
        shutil.copystat(source, destination)
        return done

    done = 0
    os.mkdir(destination)
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        target = os.path.join(destination, entry.name)
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), target)
        elif entry.is_dir():
            done += _copy(entry.path, target, _after(done, on_progress))
        elif not entry.is_file():
            raise NotAFileError(entry.path, "a pipe, a socket or a device")
        else:
            done += _copy_file(entry.path, target, done, on_progress)
            shutil.copystat(entry.path, target)

    shutil.copystat(source, destination)
    return done


def _after(before: int, on_progress: Callable[[int], object]) -> Callable[[int], object]:
    """Return what reports bytes that come after some others."""
    return lambda done: on_progress(before + done)


def _copy_file(source: str, destination: str, before: int, on_progress: Callable[[int], object]) -> int:
    done = 0
    with open(source, "rb") as reading, open(destination, "xb") as writing:
        while block := reading.read(_BLOCK):
            check_cancelled()
            writing.write(block)
            done += len(block)
            on_progress(before + done)

    return done
