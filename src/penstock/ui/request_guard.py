"""Lets only a browser on this machine that was handed the token ask for the page.

Other pages in the same browser can send requests here, too, and a name of theirs may lead to this machine
(DNS rebinding). So `Host` must be ours, `Origin` must be ours where there is one, and a cookie must be there
that no other page can read or send.
"""

from __future__ import annotations

__all__ = ("Guard",)

import secrets
from http.cookies import CookieError, SimpleCookie
from typing import Final, final
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
