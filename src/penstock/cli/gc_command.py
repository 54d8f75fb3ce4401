"""`penstock gc`: removes what interrupted saves and deletions left."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import json
import os
from typing import Final

from penstock.cli.terminal import CommandError, Output, Table, format_bytes
from penstock.handlers.formats.orbax.file_names import TEMPORARY_SUFFIX
from penstock.handlers.stores.publishing.deletion import remove_abandoned
from penstock.inspection.file_sizes import FileSizes, sizes_below
from penstock.kernel.errors import InUseError, NotACheckpointError
from penstock.kernel.protocols.stores import ObjectStore, Store, is_at_work
from penstock.steps.tier_record import levels_of
from penstock.stores.store_finder import store_of

_STATES: Final = {"kept": "in use", "unmarked": "no checkpoint"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        f"Remove the directories named *{TEMPORARY_SUFFIX}* that interrupted saves and deletions left in "
        "PATH and in the directories below it. What a live save or deletion on this machine works in is "
        "held, and left alone; of savers on other machines, a file system without locks tells nothing, so "
        "that there nothing should be saving. Of a run with tiers, these are looked at, too. Checkpoints are "
        "never touched."
    )
    parser.add_argument(
        "path", metavar="PATH", nargs="?", default=".", help="a directory of steps or runs (here)"
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument(
        "--older-than", type=float, metavar="SECONDS",
        help="in a bucket: what a process of another machine claims, if that was not renewed for so long",
    )  # fmt: skip
    parser.add_argument(
        "--unmarked", action="store_true",
        help="in a bucket: also what is named like a step and has no commit_success.txt, such as an "
        "interrupted copy; without this it is only listed",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Remove what was left, and say how much room that took.

    Raises:
        NotACheckpointError: If there is no such directory.
        StorageError: If the medium refuses.
    """
    store, path = store_of(options.path)
    if (objects := store.objects) is not None:
        return _collect(objects, path, options, output)
    if store.kind(path) != "directory":
        raise NotACheckpointError(path, "is no directory")

    tiers = [(level.store, level.path) for level in levels_of(store, path)[:-1] if level.store is not None]
    found = [
        (left, sizes_below(where, left), _removed(where, left, options.dry_run))
        for where, place in ((store, path), *tiers)
        if where.objects is None
        for left in _left_below(where, place)
    ]
    if options.json:
        documents = [{"path": left, "nbytes": sizes.nbytes, "state": state} for left, sizes, state in found]
        output.say(json.dumps({"dry_run": options.dry_run, "left": documents}, indent=2))
        return 0

    rows = [(state, left, format_bytes(sizes.nbytes)) for left, sizes, state in found]
    if rows:
        plain = [(state, left, str(sizes.nbytes)) for left, sizes, state in found]
        output.table(Table(("", "path", "size"), rows, n_left=2, plain=plain))

    freed = sum([sizes for _, sizes, state in found if state != "in use"], FileSizes())
    what = "would be freed" if options.dry_run else "freed"
    output.note(f"{format_bytes(freed.own_bytes)} {what}")
    return 0


def _collect(store: ObjectStore, path: str, options: argparse.Namespace, output: Output) -> int:
    """In a bucket, have the store find what was left: nothing there can be found by its name."""
    if options.dry_run:
        raise CommandError("in a bucket, --dry-run cannot say what would be removed")

    from penstock.tools.gc import collect_in_bucket  # which loads more than this command needs on a disk

    became = collect_in_bucket(store, path, options.older_than, unmarked=options.unmarked)
    if options.json:
        documents = [{"path": left, "state": state} for left, state in became.items()]
        output.say(json.dumps({"dry_run": False, "left": documents}, indent=2))
    elif became:
        rows = [(_STATES.get(state, state), left) for left, state in became.items()]
        output.table(Table(("", "path"), rows, n_left=2, plain=rows))

    return 0


def _left_below(store: Store, path: str, levels: int = 3) -> list[str]:
    """Return temporary directories in `path` and in a few levels of directories below it."""
    found: list[str] = []
    for name in sorted(store.list_directory(path)):
        inner = os.path.join(path, name)
        if store.kind(inner) != "directory":
            continue
        if TEMPORARY_SUFFIX in name:
            found.append(inner)
        elif levels and not os.path.islink(inner):
            found += _left_below(store, inner, levels - 1)

    return found


def _removed(store: Store, path: str, dry_run: bool) -> str:
    if dry_run:
        return "in use" if is_at_work(store, path) else "left"
    try:
        remove_abandoned(store, path)
    except InUseError:
        return "in use"

    return "removed"
