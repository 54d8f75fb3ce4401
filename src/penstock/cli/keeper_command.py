"""`penstock keeper`: runs, shows and stops the process that holds checkpoints in memory."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
import errno
import json
import os
import sys
import time

import msgspec

from penstock.cli.terminal import CommandError, Output, Table, format_bytes
from penstock.config.config import Config
from penstock.handlers.stores.keeper.keeper_store import KeeperStore
from penstock.handlers.stores.keeper.messages import KeptStep, StatusAnswer
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
    for one in (start, status, stop):
        one.add_argument(
            "--socket", metavar="PATH",
            help="where it listens; by default that of [store.keeper], or of this user",
        )  # fmt: skip


def run(options: argparse.Namespace, output: Output) -> int:
    """Run, show or stop it.

    Raises:
        KeeperLostError: If there is none to show or to stop.
        CommandError: If an argument is wrong, or it holds what would be lost.
    """
    known = Config.load().store.keeper
    store = KeeperStore(options.socket or known.socket, answer_s=known.answer_s)
    if options.what == "run":
        return _run(store.socket, options)
    if options.what == "stop":
        return _stop(store, options.force, output)

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
