"""The server of the page: on localhost, in front of it the guard."""

from __future__ import annotations

__all__ = ("make_app", "open_socket", "serve")

import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.cli.terminal.printable import one_line
from penstock.kernel.errors import PenstockError
from penstock.kernel.protocols.stores import Store
from penstock.ui.page_data import differences, run_data, tree_data
from penstock.ui.request_guard import Guard

_PAGE: Final = Path(__file__).parent / "page"
_TYPES: Final = {"page.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
_MOST_PIXELS: Final = 4000


def make_app(store: Store, path: str, port: int, token: str) -> ASGIApp:
    """Return the application that shows what lies at `path`.

    Args:
        store: Where it lies.
        path: A directory of steps, a checkpoint, or safetensors.
        port: Of the server, for the `Host` that is allowed.
        token: What a browser must have; see `Guard`.
    """

    async def run(_: Request) -> Response:
        return JSONResponse(await anyio.to_thread.run_sync(run_data, store, path))

    async def tree(request: Request) -> Response:
        width, height = _pixels(request, "width", 960), _pixels(request, "height", 540)
        name = request.query_params.get("name", "")
        return JSONResponse(await tree_data(store, path, name, width, height))

    async def diff(request: Request) -> Response:
        names = [request.query_params.get(name, "") for name in ("first", "second")]
        values = request.query_params.get("values") == "1"
        return JSONResponse(await differences(store, path, names[0], names[1], values=values))

    routes = [
        Route("/", partial(_file, "page.html"), methods=["GET"]),
        Route("/page.js", partial(_file, "page.js"), methods=["GET"]),
        Route("/page.css", partial(_file, "page.css"), methods=["GET"]),
        Route("/api/run", run, methods=["GET"]),
        Route("/api/tree", tree, methods=["GET"]),
        Route("/api/diff", diff, methods=["GET"]),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={PenstockError: _failed}), port, token)


def open_socket(port: int = 0) -> socket.socket:
    """Return a socket that listens on this machine alone; 0 for any port that is free.

    Raises:
        OSError: If the port is taken.
    """
    return socket.create_server(("127.0.0.1", port))


def serve(store: Store, path: str, listening: socket.socket, on_ready: Callable[[str], object]) -> None:
    """Serve the page until it is interrupted.

    Args:
        store: Where `path` lies.
        path: As for `make_app`.
        listening: From `open_socket`.
        on_ready: Called with the address to open, once.
    """
    port, token = listening.getsockname()[1], secrets.token_urlsafe(32)
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(store, path, port, token), log_level="warning", access_log=False, server_header=False
        )
    )
    on_ready(f"http://127.0.0.1:{port}/?token={token}")
    server.run(sockets=[listening])


async def _file(name: str, _: Request) -> Response:
    return FileResponse(_PAGE / name, media_type=_TYPES[name])


async def _failed(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": one_line(str(error))}, 422)


def _pixels(request: Request, name: str, default: int) -> int:
    given: Any = request.query_params.get(name, "")
    return min(max(int(given), 100), _MOST_PIXELS) if given.isdecimal() and len(given) < 6 else default
