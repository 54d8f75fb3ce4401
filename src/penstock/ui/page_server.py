"""The server of the page: on localhost, in front of it the guard."""

from __future__ import annotations

__all__ = ("Connection", "make_app", "make_server", "open_socket", "serve")

import secrets
import socket
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Final

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.inspection.texts import one_line
from penstock.kernel.errors import PenstockError
from penstock.kernel.protocols.stores import Store
from penstock.ui.page_data import differences, run_data, tree_data
from penstock.ui.request_guard import Guard

_PAGE: Final = Path(__file__).parent / "page"
_TYPES: Final = {"page.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
_MOST_PIXELS: Final = 4000


class Connection(H11Protocol):
    """A connection that is closed if no whole request comes in time; uvicorn would wait for ever.

    Of too many connections the one that has waited longest is closed, so that those that send nothing never
    keep a browser out.
    """

    request_s: ClassVar[float] = 10.0  #: from the first byte, or the connection, to the end of the headers
    most: ClassVar[int] = 64

    def connection_made(self, transport: Any) -> None:
        """Begin to wait."""
        super().connection_made(transport)
        self._deadline: Any = None
        self._since: float = self.loop.time()
        self._expect()
        if len(self.connections) > self.most:
            everyone: list[object] = list(self.connections)  # of which uvicorn does not say the type
            waiting = [one for one in everyone if isinstance(one, Connection) and one.waits]
            longest: Connection = min(waiting, key=attrgetter("since"), default=self)
            longest.abort()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request. It does not prolong the time."""
        super().data_received(data)
        if self.waits:
            self._expect()
        else:
            self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._forget()
        super().connection_lost(exc)

    @property
    def since(self) -> float:
        """When it began to wait, by the clock of the loop."""
        return self._since

    @property
    def waits(self) -> bool:
        """True if no request is being answered."""
        cycle: Any = self.cycle  # None before the first request, whatever uvicorn declares
        return cycle is None or bool(cycle.response_complete)

    def abort(self) -> None:
        """Close it at once."""
        self._forget()
        self.transport.abort()

    def _expect(self) -> None:
        if self._deadline is None:
            self._since = self.loop.time()
            self._deadline = self.loop.call_later(self.request_s, self.abort)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


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
    server = make_server(make_app(store, path, port, token))
    on_ready(f"http://127.0.0.1:{port}/?token={token}")
    server.run(sockets=[listening])


def make_server(app: ASGIApp, connection: type[Connection] = Connection) -> uvicorn.Server:
    """Return a server that listens nowhere yet."""
    config = uvicorn.Config(
        app, http=connection, ws="none", log_level="warning", access_log=False, server_header=False
    )
    return uvicorn.Server(config)


async def _file(name: str, _: Request) -> Response:
    return FileResponse(_PAGE / name, media_type=_TYPES[name])


async def _failed(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": one_line(str(error))}, 422)


def _pixels(request: Request, name: str, default: int) -> int:
    given: Any = request.query_params.get(name, "")
    return min(max(int(given), 100), _MOST_PIXELS) if given.isdecimal() and len(given) < 6 else default
