"""The server of the page, on localhost, and the guard in front of it, which decides who may ask.

Other pages in the same browser can send requests here, too, and a name of theirs may lead to this machine
(DNS rebinding). So `Host` must be ours, `Origin` must be ours where there is one, and a cookie must be there
that no other page can read or send.
"""

from __future__ import annotations

__all__ = (
    "Guard",
    "Run",
    "make_app",
    "make_server",
    "open_socket",
    "serve",
)

import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from http.cookies import CookieError, SimpleCookie
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias, final
from urllib.parse import parse_qsl, urlencode

import uvicorn
from anyio import Lock, to_thread
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.handlers.stores.publishing.paths import scheme_of
from penstock.inspection.texts import one_line
from penstock.kernel.errors import PenstockError
from penstock.kernel.protocols.stores import Store
from penstock.ui.layer_norms import LayerNorms
from penstock.ui.page_data import At, differences, tree_data
from penstock.ui.run_reader import RunReader

_OWN_SITES: Final = frozenset({"same-origin", "none"})
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

    A token is exchanged for a cookie, and the browser is sent to the page without it. It is sent nowhere
    else, whatever path was asked for.

    Args:
        app: The application.
        port: Of the server.
        token: In the address that is printed when the server starts, for any browser of who reads that.
        opening_token: In the address that a browser is started with: good for one use, since others on this
            machine see the arguments of programs.
    """

    def __init__(self, app: ASGIApp, port: int, token: str, opening_token: str = "") -> None:
        self._app = app
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._token = token
        self._opening_token = opening_token
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
        # The cookie comes with links from other sites, which lead to the page and to nothing else.
        if scope["path"] != "/" and headers.get("sec-fetch-site", "same-origin") not in _OWN_SITES:
            return PlainTextResponse("asked for by another site", 403)
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
        is_opening = _is_same(given, self._opening_token)
        if is_opening:
            self._opening_token = ""

        is_right = is_opening or _is_same(given, self._token)
        if not is_right and not self._knows(headers):
            return PlainTextResponse("open the address that `penstock ui` printed: this one is wrong", 403)

        # The path of the request is not in it: `//evil.example/` is another host, and so may a whole URL be.
        answer = RedirectResponse("/" + (f"?{urlencode(rest)}" if rest else ""), 303)
        if is_right:
            # Lax: a link in a terminal that is itself a web page leads here from another site.
            answer.set_cookie(self._cookie, self._session, httponly=True, samesite="lax", path="/")

        return answer

    def _knows(self, headers: Headers) -> bool:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False

        return found is not None and _is_same(found.value, self._session)


def _is_same(given: str, secret: str) -> bool:
    return bool(secret) and secrets.compare_digest(given.encode(), secret.encode())


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(_HEADERS)

        await send(message)

    return sending


_PAGE: Final = Path(__file__).parent / "page"
_TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_SCRIPTS: Final = ("page.js", "elements.js", "strips.js", "checkpoints.js", "page.css")
_MOST_PIXELS: Final = 4000


class _PageConnection(H11Protocol):
    """A connection that is closed if no whole request comes in time; uvicorn would wait for ever.

    Of too many connections the one that has waited longest is closed, so that those that send nothing never
    keep a browser out.
    """

    request_s: ClassVar[float]  #: from the first byte, or the connection, to the end of the headers
    most: ClassVar[int]

    def connection_made(self, transport: Any) -> None:
        """Begin to wait."""
        super().connection_made(transport)
        self._deadline: Any = None
        self._since: float = self.loop.time()
        self._expect()
        if len(self.connections) > self.most:
            everyone: list[object] = list(self.connections)  # of which uvicorn does not say the type
            waiting = [one for one in everyone if isinstance(one, _PageConnection) and one.waits]
            longest: _PageConnection = min(waiting, key=attrgetter("since"), default=self)
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


Run: TypeAlias = tuple[Store, str]
"""The store of a run and its path: a directory of steps, which need not be there yet, a checkpoint, or
safetensors."""


def make_app(runs: Sequence[Run], port: int, token: str, opening_token: str = "") -> ASGIApp:
    """Return the application that shows some runs, over each other.

    Args:
        runs: One at least.
        port: Of the server, for the `Host` that is allowed.
        token: What a browser must have; see `Guard`.
        opening_token: Likewise, for one use.
    """
    pages = _Pages([_RunPages(store, path) for store, path in runs])
    routes = [
        Route("/", partial(_file, "page.html"), methods=["GET"]),
        *[Route(f"/{name}", partial(_file, name), methods=["GET"]) for name in _SCRIPTS],
        Route("/api/runs", pages.runs, methods=["GET"]),
        Route("/api/run", pages.run, methods=["GET"]),
        Route("/api/report", pages.report, methods=["GET"]),
        Route("/api/tree", pages.tree, methods=["GET"]),
        Route("/api/diff", pages.diff, methods=["GET"]),
        Route("/api/norms", pages.norms, methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={PenstockError: _failed})
    return Guard(app, port, token, opening_token)


@final
class _RunPages:
    """One run, and the locks by which one request at a time reads it."""

    def __init__(self, store: Store, path: str) -> None:
        self.store, self.path = store, path
        self.reader, self.norms = RunReader(store, path), LayerNorms(store)
        self.reading, self.measuring = Lock(), Lock()


@final
class _Pages:
    """The answers to the page."""

    def __init__(self, runs: Sequence[_RunPages]) -> None:
        self._runs = runs

    async def runs(self, _: Request) -> Response:
        return JSONResponse({"n_runs": len(self._runs)})

    async def run(self, request: Request) -> Response:
        one, seen = self._run(request), _number(request, "seen", 0)
        async with one.reading:
            return JSONResponse(await to_thread.run_sync(one.reader.look, seen))

    async def report(self, request: Request) -> Response:
        one, given = self._run(request), request.query_params
        name, kind = given.get("name", ""), given.get("kind", "save")
        found = one.reader.report(name, kind)
        if found is None:
            return JSONResponse(
                {"error": f"no timeline of the {one_line(kind)} of {one_line(name)} is kept"}, 422
            )

        return JSONResponse(found)

    async def tree(self, request: Request) -> Response:
        one, name = self._run(request), request.query_params.get("name", "")
        width, height = _pixels(request, "width", 960), _pixels(request, "height", 540)
        return JSONResponse(await tree_data(one.store, one.path, name, width, height))

    async def diff(self, request: Request) -> Response:
        pair: list[At] = []
        for which in ("first", "second"):
            one = self._run(request, f"{which}_run")
            pair.append((one.store, one.path, request.query_params.get(which, "")))

        values = request.query_params.get("values") == "1"
        return JSONResponse(await differences(*pair, values=values))

    async def norms(self, request: Request) -> Response:
        one, given = self._run(request), request.query_params
        if scheme_of(one.path) is not None and given.get("remote_too") != "1":
            return JSONResponse(LayerNorms.waiting())

        async with one.measuring:
            if given.get("more") == "1":
                one.norms.extend()

            async with one.reading:
                finished = one.reader.finished()

            return JSONResponse(await one.norms.read_one(finished))

    def _run(self, request: Request, name: str = "run") -> _RunPages:
        return self._runs[min(_number(request, name, 0), len(self._runs) - 1)]


def open_socket(port: int = 0) -> socket.socket:
    """Return a socket that listens on this machine alone; 0 for any port that is free.

    Raises:
        OSError: If the port is taken.
    """
    return socket.create_server(("127.0.0.1", port))


def serve(runs: Sequence[Run], listening: socket.socket, on_ready: Callable[[str, str], object]) -> None:
    """Serve the page until it is interrupted.

    Args:
        runs: As for `make_app`.
        listening: From `open_socket`.
        on_ready: Called once, with the address to print, and another one to start a browser with, which is
            good for one use.
    """
    port = listening.getsockname()[1]
    token, opening_token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    server = make_server(make_app(runs, port, token, opening_token))
    address = f"http://127.0.0.1:{port}/?token="
    on_ready(address + token, address + opening_token)
    server.run(sockets=[listening])


def make_server(app: ASGIApp, *, request_s: float = 10.0, most: int = 64) -> uvicorn.Server:
    """Return a server that listens nowhere yet.

    Args:
        app: What it serves.
        request_s: In so many seconds, from the connection or its first byte, a whole request must come.
        most: So many connections are kept.
    """
    limited = type("PageConnection", (_PageConnection,), {"request_s": request_s, "most": most})
    config = uvicorn.Config(
        app, http=limited, ws="none", log_level="warning", access_log=False, server_header=False
    )
    return uvicorn.Server(config)


async def _file(name: str, _: Request) -> Response:
    return FileResponse(_PAGE / name, media_type=_TYPES[Path(name).suffix])


async def _failed(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": one_line(str(error))}, 422)


def _pixels(request: Request, name: str, default: int) -> int:
    return min(max(_number(request, name, default), 100), _MOST_PIXELS)


def _number(request: Request, name: str, default: int) -> int:
    given: Any = request.query_params.get(name, "")
    return int(given) if given.isdecimal() and given.isascii() and len(given) < 10 else default
