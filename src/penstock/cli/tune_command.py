"""`penstock tune`: measures a store with real saves and restores, and writes the profile that is faster.

With `--failures` it measures nothing, and says how often to save.
"""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import os
import re
import secrets
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio

from penstock.cli.job_failures import configure_failures, is_about_failures, run_failures
from penstock.cli.terminal import CommandError, Output, format_bytes
from penstock.config.config import Config, profiles_in
from penstock.config.files import FoundFile
from penstock.handlers.stores.publishing.paths import path_or_url, scheme_of
from penstock.kernel.errors import StorageError
from penstock.kernel.memory.memory_limit import free_memory
from penstock.kernel.options import parse_bytes, parse_seconds
from penstock.stores.store_finder import store_of
from penstock.tuning import (
    Space,
    Tuned,
    given_candidate,
    nested_tables,
    profile_text,
    search,
    space_of,
    tuned_svg,
)

_REMOVAL_S: Final = 60.0
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Save and restore below PATH with other numbers of workers, pieces and budgets, as a model of the "
        "store foretells, and write as a profile what is faster beyond noise than what is set already, with "
        "the figures of all that was tried, and why it was rejected. What is saved there is removed. Arrays "
        "are in host memory: staging from a device is not measured."
    )
    parser.add_argument(
        "path", metavar="PATH", nargs="?",
        help="an existing directory on the store, or a bucket's URL; with --failures, a run",
    )  # fmt: skip
    parser.add_argument(
        "--like", metavar="RUN/STEP", help="a checkpoint of yours to save; codecs are tried, too"
    )
    parser.add_argument("--size", default="256MiB", help="of made-up arrays without --like (%(default)s)")
    parser.add_argument(
        "--time", default="5min", metavar="LIMIT", help="begin no run after this (%(default)s)"
    )
    parser.add_argument(
        "--try", dest="tried", action="append", metavar="KEY=VALUE",
        help="only this candidate, as in save.write.concurrency=8; repeatable",
    )  # fmt: skip
    parser.add_argument("--profile", default="tuned", metavar="NAME", help="its name (%(default)s)")
    parser.add_argument(
        "--output", default="penstock.toml", metavar="FILE",
        help="the file to write, or to add the profile to (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--picture", metavar="FILE.svg", help="write a picture of the figures there, too")
    configure_failures(parser)


def run(options: argparse.Namespace, output: Output) -> int:
    """Measure, and write the profile; or say how often to save.

    Raises:
        CommandError: If an argument does not fit, or the file has the profile already.
    """
    if is_about_failures(options):
        return run_failures(options, output)

    output_path = Path(options.output)
    _check(options, output_path)
    tuned, about = anyio.run(partial(_tune, options, output))
    text = profile_text(options.profile, tuned, about)
    before = output_path.read_text(encoding="utf-8").rstrip() + "\n\n" if output_path.exists() else ""
    output_path.write_text(before + text, encoding="utf-8")
    if options.picture is not None:
        Path(options.picture).write_text(tuned_svg(tuned), encoding="utf-8")

    output.say(text.rstrip())
    output.success(f"written to {output_path}; use it by PENSTOCK_PROFILE={options.profile}")
    return 0


def _check(options: argparse.Namespace, file: Path) -> None:
    if options.path is None:
        raise CommandError("name a directory on the store that is to be measured; or --failures")
    if not _is_bucket(options.path) and not os.path.isdir(options.path):
        raise CommandError(f"{options.path!r} is no directory")
    if not _NAME.fullmatch(options.profile):
        raise CommandError(f"--profile {options.profile!r}: letters, digits, - and _ alone")
    if file.exists() and options.profile in profiles_in(FoundFile(str(file), "--output")):
        raise CommandError(
            f"{str(file)!r} has a profile {options.profile!r} already: remove it, or name another"
        )
    for name, parse in (("size", parse_bytes), ("time", parse_seconds)):
        try:
            parse(getattr(options, name))
        except ValueError as error:
            raise CommandError(f"--{name}: {error}") from None


def _is_bucket(path: str) -> bool:
    return scheme_of(path_or_url(path)) is not None


def _space(options: argparse.Namespace, config: Config) -> Space:
    """Return what may be tried.

    Raises:
        CommandError: If what is asked for is not of the form that it must have.
        ConfigError: If there is no such option, or it has no such value.
    """
    if options.tried is None:
        limit = config.memory.limit_bytes
        return space_of(
            is_bucket=_is_bucket(options.path),
            own_tree=options.like is not None,
            limit_bytes=None if limit == "auto" else limit,
            free_bytes=free_memory(),
        )

    try:
        candidates = [given_candidate(text) for text in options.tried]
    except ValueError as error:
        raise CommandError(f"--try: {error}") from None

    for _, changed in candidates:
        config.changed(nested_tables(changed))

    return Space(given=candidates)


async def _tune(options: argparse.Namespace, output: Output) -> tuple[Tuned, list[str]]:
    from penstock.tuning import (  # which load numpy, and more
        RealRuns,
        made_up_tree,
        probe_store,
        tree_of,
    )

    config = Config.load()
    space = _space(options, config)
    nbytes = parse_bytes(options.size)
    tree: Any = made_up_tree(nbytes) if options.like is None else await tree_of(options.like)
    store, root = store_of(options.path)
    directory = os.path.join(root, f".penstock-tune-{secrets.token_hex(8)}")
    await anyio.to_thread.run_sync(store.make_directory, directory)
    try:
        probes = await anyio.to_thread.run_sync(probe_store, store, directory, nbytes)
        runs = RealRuns(directory, tree, config)
        await runs.measure("save", {})  # what is loaded at the first save is not part of it
        start, limit_s = time.monotonic(), parse_seconds(options.time)
        with output.bar(None, "runs") as bar:
            tuned = await search(
                runs.measure,
                space,
                spent=lambda: (time.monotonic() - start) / limit_s if limit_s else 1.0,
                tell=bar.show,
            )
    finally:
        with anyio.move_on_after(_REMOVAL_S, shield=True), suppress(StorageError):
            await anyio.to_thread.run_sync(store.remove_tree, directory)

    what = (
        f"made-up arrays of {format_bytes(nbytes)}" if options.like is None else f"the tree of {options.like}"
    )
    when = time.strftime("%Y-%m-%d %H:%M")
    return tuned, [
        f"Measured by `penstock tune` at {when}, below {options.path},",
        f"with {what}.",
        *probes,
    ]
