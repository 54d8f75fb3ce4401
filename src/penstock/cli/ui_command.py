"""`penstock ui`: shows a run as a page in the browser."""

from __future__ import annotations

__all__ = ("configure", "run")

import argparse
from importlib.util import find_spec

from penstock.cli.terminal import CommandError, Output
from penstock.handlers.layouts.discovery import find_place
from penstock.stores.store_finder import store_of


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Show the run at PATH as one page in the browser: steps with metrics as curves and sizes, the tree "
        "of one as a treemap, two compared, how long recent saves took; live while the run goes on. "
        "Nothing can be changed there. It is served on this machine alone, to the browser that first opens "
        "the address printed, until Ctrl-C."
    )
    parser.add_argument("path", metavar="PATH", nargs="?", default=".", help="a directory of steps (here)")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="of the server (any that is free)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def run(options: argparse.Namespace, output: Output) -> int:
    """Serve the page until it is interrupted.

    Raises:
        CommandError: If starlette or uvicorn is not installed.
        PenstockError: If nothing is at the path.
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise CommandError("the page needs starlette and uvicorn: pip install 'penstock[ui]'")

    from penstock.ui.page_server import open_socket, serve

    store, path = store_of(options.path)
    find_place(store, path)  # what is wrong with the path is said here, and not in the browser

    def on_ready(address: str) -> None:
        output.say(address)
        if not options.no_browser:
            import webbrowser

            webbrowser.open(address)

    with open_socket(options.port) as listening:
        serve(store, path, listening, on_ready)

    return 0
