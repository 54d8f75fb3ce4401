"""`penstock keeper`: runs, shows and stops the process that holds checkpoints in memory."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import errno
import json
import os
import sys
import time

import anyio
import msgspec

from penstock.cli.terminal import CommandError, Output, Table, format_bytes
from penstock.config.config import Config
from penstock.handlers.stores.keeper.keeper_store import KeeperStore
from penstock.handlers.stores.keeper.messages import KeptStep, StatusAnswer
from penstock.handlers.stores.publishing.paths import path_or_url
from penstock.inspection.texts import age
from penstock.kernel.errors import StorageError
from penstock.kernel.options import parse_bytes, parse_seconds
from penstock.kernel.words import counted


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "The keeper holds checkpoints in memory, at keeper:///, so that they outlive the process that saved "
        "them. There is one for each user and host. A training with a memory tier starts it by itself; on a "
        "cluster, run it as a service or a sidecar, since it ends with the container that it is in."
    )
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    start = what.add_parser("run", help="run it until it is stopped, or idle for long enough")
    start.description = (
        "Run a keeper. If there is one already, the exit status is 3. It ends on SIGTERM and Ctrl-C, and "
        "what it holds is gone then."
    )
    start.add_argument(
        "--limit", metavar="BYTES", default="auto",
        help="the most memory that files may take, as 64GiB; auto (the default) is half of what is free",
    )  # fmt: skip
    start.add_argument(
        "--idle", metavar="TIME", default="inf",
        help="end after so long without a client, as 10min, unless it holds what no other tier has; "
        "by default never",
    )  # fmt: skip
    start.add_argument("--detach", action="store_true", help="go on in the background once it listens")
    status = what.add_parser("status", help="what it holds, and how much memory that takes")
    status.add_argument("--json", action="store_true", help="as one JSON document")
    stop = what.add_parser("stop", help="end it, and free its memory")
    stop.description = "End the keeper. If it holds what no other tier has, say what, and do nothing."
    stop.add_argument("--force", action="store_true", help="also if that is lost by it")
    pull = what.add_parser("pull", help="bring a step that it holds to a directory, or to a bucket")
    pull.description = (
        "Copy the newest step that the keeper of this host holds to TARGET, where it appears in one "
        "step, with its checksums compared. Of the parts that the processes of a job have here, those that "
        "peers sent included, one checkpoint is made. A keeper brings steps to their root by itself when a "
        "training has died; this is for another place, or if the root cannot be reached."
    )
    pull.add_argument("target", metavar="TARGET", help="a directory of steps, which need not be there yet")
    pull.add_argument("--run", metavar="ROOT", help="whose step; needed if it holds steps of several runs")
    pull.add_argument("--step", type=int, metavar="N", help="which one; by default the newest")
    pull.add_argument("-n", "--dry-run", action="store_true", help="only say what would be copied")
    for one in (start, status, stop, pull):
        one.add_argument(
            "--socket", metavar="PATH",
            help="where it listens; by default that of [store.keeper], or of this user",
        )  # fmt: skip


def run(options: argparse.Namespace, output: Output) -> int:
    """Run, show or stop it, or bring a step elsewhere.

    Raises:
        KeeperLostError: If there is none to show or to stop.
        CommandError: If an argument is wrong, it holds what would be lost, or has no such step.
    """
    known = Config.load().store.keeper
    store = KeeperStore(options.socket or known.socket, answer_s=known.answer_s)
    if options.what == "run":
        return _run(store.socket, options)
    if options.what == "stop":
        return _stop(store, options.force, output)

    if options.what == "pull":
        return _pull(store, options, output)

    status = store.status()
    if options.json:
        output.say(json.dumps(msgspec.to_builtins(status), indent=2))
    else:
        _show(status, output)

    return 0


def _run(socket: str, options: argparse.Namespace) -> int:
    from penstock.keeper.process import arguments

    try:
        limit = None if options.limit == "auto" else parse_bytes(options.limit)
        idle_s = float("inf") if options.idle == "inf" else parse_seconds(options.idle)
    except ValueError as error:
        raise CommandError(str(error)) from None

    given = arguments(socket, limit, idle_s, detached=options.detach)
    sys.stdout.flush()
    # In place of this process, which has loaded more than a keeper needs.
    os.execv(sys.executable, [sys.executable, "-m", "penstock.keeper", *given])


def _stop(store: KeeperStore, force: bool, output: Output) -> int:
    try:
        store.stop(force=force)
    except StorageError as error:
        if error.errno == errno.ENOTEMPTY:
            raise CommandError(f"the keeper {error.problem}; --force loses that") from None

        raise

    output.success("stopped")
    return 0


def _pull(store: KeeperStore, options: argparse.Namespace, output: Output) -> int:
    # What else the command does needs none of these.
    from penstock.kernel.memory.regulator import MemoryRegulator
    from penstock.steps.pulling import pull_step, runs_in
    from penstock.steps.tiers import Memory, path_of
    from penstock.stores.store_finder import store_of

    runs = runs_in(store)
    if options.run is not None:
        root = path_or_url(options.run)
        inside = path_of(Memory(), root)
        runs = [run for run in runs if root == run.root or run.path == inside]
    if not runs:
        raise CommandError("the keeper holds no step" + (f" of {options.run}" if options.run else ""))
    if len(runs) > 1:
        named = ", ".join(sorted(run.root or run.path for run in runs))
        raise CommandError(f"the keeper holds steps of several runs; choose one by --run: {named}")

    (run,) = runs
    step = options.step if options.step is not None else max(run.steps, default=None)
    if step is None:  # none is whole
        step = max([part.step for part in run.parts])

    sources = run.sources(step)
    if sources is None:
        raise CommandError(f"the keeper {run.lacks(step)}")

    target, folder = store_of(options.target)
    destination = os.path.join(folder, os.path.basename(next(iter(sources.values()))))
    of = "" if step in run.whole else f", from {counted(len(sources), 'part')}"
    if options.dry_run:
        output.say(f"step {step} of {run.root or run.path} would be copied to {destination}{of}")
        return 0

    with output.bar(None, "bytes") as bar:
        nbytes = anyio.run(pull_step, store, run, step, target, destination, MemoryRegulator(), bar.show)

    output.success(f"{destination}: step {step} of {run.root or run.path}, {format_bytes(nbytes)}{of}")
    return 0


def _show(status: StatusAnswer, output: Output) -> None:
    used, limit = format_bytes(status.used_bytes), format_bytes(status.limit_bytes)
    output.headline(f"keeper {status.pid} at {status.socket}")
    output.note(
        f"{used} of {limit} used · {format_bytes(status.pool_bytes)} of it in "
        f"{counted(status.pool_files, 'file')} ready for the next step · "
        f"{format_bytes(status.lingering_bytes)} removed and still read"
    )
    rows = [
        (step.path, step.state, "yes" if step.is_elsewhere else "no", _age(step), format_bytes(step.nbytes))
        for step in status.steps
    ]
    plain = [
        (step.path, step.state, "yes" if step.is_elsewhere else "no", f"{step.age_s:.0f}", str(step.nbytes))
        for step in status.steps
    ]
    output.table(Table(("path", "state", "elsewhere", "age", "size"), rows, n_left=3, plain=plain))


def _age(step: KeptStep) -> str:
    return "" if step.state == "building" else age(time.time_ns() - int(step.age_s * 1e9))
