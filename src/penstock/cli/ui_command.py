"""`penstock ui`: shows a run as a page in the browser."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
from importlib.util import find_spec
from typing import Final

from penstock.cli.terminal import CommandError, Output
from penstock.handlers.layouts.discovery import look_at
from penstock.stores.store_finder import store_of

MOST_RUNS: Final = 6


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Show the run at PATH as one page in the browser: metrics, and what each save took, step by step; "
        "what held it up, memory, sizes and events; the tree of a step, the norms of its layers, and two "
        "steps compared. Several runs are drawn over each other. It is live while the run goes on, and "
        "waits for one that has not begun. Nothing can be changed there. It is served on this machine alone, "
        "to browsers that open the address printed, until Ctrl-C."
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="*",
        default=["."],
        help=f"directories of steps, up to {MOST_RUNS} (here)",
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="of the server (any that is free)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def run(options: argparse.Namespace, output: Output) -> int:
    """Serve the page until it is interrupted.

    Raises:
        CommandError: If starlette or uvicorn is not installed, or there are too many runs.
        PenstockError: If what is at a path is no run and no checkpoint.
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise CommandError("the page needs starlette and uvicorn: pip install 'penstock[ui]'")
    if len(options.path) > MOST_RUNS:
        raise CommandError(f"{len(options.path)} runs are too many to be told apart; {MOST_RUNS} at most")

    from penstock.ui.page_server import open_socket, serve

    runs = [store_of(path) for path in options.path]
    for store, path in runs:
        # What is wrong with the path is said here, and not in the browser; a run may begin later.
        place = look_at(store, path)
        if place.kind == "nothing":
            output.note(f"{path}: nothing is there yet; the page waits for it")
        elif place.problem is not None:
            raise place.problem

    def on_ready(address: str, opening: str) -> None:
        output.say(address)
        if not options.no_browser:
            import webbrowser

            webbrowser.open(opening)

    with open_socket(options.port) as listening:
        serve(runs, listening, on_ready)

    return 0
