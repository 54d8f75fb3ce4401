"""The server of the page, on localhost, and the guard in front of it, which decides who may ask.

Other pages in the same browser can send requests here, too, and a name of theirs may lead to this machine
(DNS rebinding). So `Host` must be ours, `Origin` must be ours where there is one, and a cookie must be there
that no other page can read or send.
"""

from __future__ import annotations

__all__ = (
    "Guard",
    "PageConnection",
    "make_app",
    "make_server",
    "open_socket",
    "serve",
)

import secrets
import socket
from collections.abc import Callable
from functools import partial
from http.cookies import CookieError, SimpleCookie
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Final, final
from urllib.parse import parse_qsl, urlencode

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.inspection.texts import one_line
from penstock.kernel.errors import PenstockError
from penstock.kernel.protocols.stores import Store
from penstock.ui.page_data import differences, run_data, tree_data

_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


@final
class Guard:
    """Lets requests through to an application, or answers them itself.

    The token is good for one use: it is exchanged for a cookie, and the browser is sent to the page without
    it, so that it is in no history. It is sent nowhere else, whatever path was asked for.

    Args:
        app: The application.
        port: Of the server.
        token: In the address that is printed when the server starts.
    """

    def __init__(self, app: ASGIApp, port: int, token: str) -> None:
        self._app = app
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._token: str | None = token
        self._session = secrets.token_urlsafe(32)
        self._cookie = f"penstock-{port}"  # cookies are shared by all ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)  # the start and the end of the server
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # the page has none
            return

        answer = self._answer(scope)
        await (self._app if answer is None else answer)(scope, receive, _with_headers(send))

    def _answer(self, scope: Scope) -> Response | None:
        """Return the answer to a request that does not go through; None if it does."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if host not in self._hosts:
            return PlainTextResponse("wrong Host", 421)
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            return PlainTextResponse("wrong Origin", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("nothing can be changed here", 405, {"Allow": "GET, HEAD"})

        query = parse_qsl(scope["query_string"].decode("latin-1"))
        given = dict(query).get("token")
        if given is not None:
            return self._exchange(given, [pair for pair in query if pair[0] != "token"], headers)
        if not self._knows(headers):
            return PlainTextResponse("open the address that `penstock ui` printed", 403)

        return None

    def _exchange(self, given: str, rest: list[tuple[str, str]], headers: Headers) -> Response:
        is_right = self._token is not None and secrets.compare_digest(given.encode(), self._token.encode())
        if not is_right and not self._knows(headers):
            return PlainTextResponse(
                "this address was used already, or is wrong: start `penstock ui` anew", 403
            )

        # The path of the request is not in it: `//evil.example/` is another host, and so may a whole URL be.
        answer = RedirectResponse("/" + (f"?{urlencode(rest)}" if rest else ""), 303)
        if is_right:
            self._token = None
            answer.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", path="/")

        return answer

    def _knows(self, headers: Headers) -> bool:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False

        return found is not None and secrets.compare_digest(found.value.encode(), self._session.encode())


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(_HEADERS)

        await send(message)

    return sending


_PAGE: Final = Path(__file__).parent / "page"
_TYPES: Final = {"page.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
_MOST_PIXELS: Final = 4000


class PageConnection(H11Protocol):
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
            waiting = [one for one in everyone if isinstance(one, PageConnection) and one.waits]
            longest: PageConnection = min(waiting, key=attrgetter("since"), default=self)
            longest.abort()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request. The time in which the whole must come stays as it is."""
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
    """Return the application that shows what is at `path`.

    Args:
        store: Where it is.
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
        store: Where `path` is.
        path: As for `make_app`.
        listening: From `open_socket`.
        on_ready: Called with the address to open, once.
    """
    port, token = listening.getsockname()[1], secrets.token_urlsafe(32)
    server = make_server(make_app(store, path, port, token))
    on_ready(f"http://127.0.0.1:{port}/?token={token}")
    server.run(sockets=[listening])


def make_server(app: ASGIApp, connection: type[PageConnection] = PageConnection) -> uvicorn.Server:
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
