"""A proxy before a server that fails at chosen requests. Standard library, one thread for each connection."""

from __future__ import annotations

import math
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from time import monotonic
from typing import Literal
from urllib.parse import unquote, urlsplit

Action = Literal[
    "refuse", "reset", "lost_reply", "truncate", "flip", "hang", "deny", "conflict", "expire", "skew"
]
"""`refuse`: 503 instead of the server's answer. `reset`: the connection ends before the server hears of it.
`lost_reply`: it ends after the server has answered. `truncate`: half of the answer's body. `flip`: one bit of
the body. `hang`: no answer until the proxy ends. `deny`: 403. `conflict`: 409.
`expire`, `skew`: what S3 says of a token that is too old, and to a client whose clock is wrong."""

_STATUS = {"refuse": 503, "deny": 403, "conflict": 409, "expire": 400, "skew": 403}
_CODE = {"expire": "ExpiredToken", "skew": "RequestTimeTooSkewed"}
_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


@dataclass
class Rule:
    """What is done to some requests."""

    match: str  #: a pattern in `METHOD /path?query`
    action: Action
    count: int = 1  #: how many requests it is done to
    until: float = math.inf  #: of the monotonic clock: requests that come later are not concerned


@dataclass
class FaultProxy:
    """A proxy that is running."""

    endpoint: str
    upstream: str
    rules: list[Rule] = field(default_factory=list)
    log: list[tuple[str, str | None]] = field(default_factory=list)  #: each request, and what was done to it
    ended: Event = field(default_factory=Event)
    lock: Lock = field(default_factory=Lock)

    def fail(self, match: str, action: Action, count: int = 1) -> None:
        """Do something to the next requests that match."""
        with self.lock:
            self.rules.append(Rule(match, action, count))

    def fail_for(self, seconds: float, match: str, action: Action) -> None:
        """Do something to all requests that match, for so long from now."""
        with self.lock:
            self.rules.append(Rule(match, action, 10**9, monotonic() + seconds))

    def fired(self) -> list[str]:
        """What was done, request by request."""
        return [action for _, action in self.log if action]

    def action_for(self, request: str) -> str | None:
        """Return what is to be done to a request, and note it."""
        with self.lock:
            now = monotonic()
            rules = [rule for rule in self.rules if rule.count and now < rule.until]
            found = next((rule for rule in rules if re.search(rule.match, request)), None)
            if found is not None:
                found.count -= 1

            action = None if found is None else found.action
            self.log.append((request, action))
            return action


@contextmanager
def fault_proxy(upstream: str) -> Generator[FaultProxy]:
    """Run a proxy until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else the body waits 40 ms for what tells that its head has come

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            action = proxy.action_for(f"{self.command} {unquote(self.path)}")
            if action == "hang":
                proxy.ended.wait(60)
            if action in {"hang", "reset"}:
                self.end_connection()
                return
            if action in _STATUS:
                code = _CODE.get(action, "injected")
                self.answer(_STATUS[action], {}, f"<Error><Code>{code}</Code></Error>".encode())
                return

            status, headers, content = self.forwarded(body)
            if action == "lost_reply":
                self.end_connection()
                return
            if action == "flip" and content:
                middle = len(content) // 2
                content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]

            self.answer(status, headers, content, half=action == "truncate")

        def forwarded(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            connection = HTTPConnection(urlsplit(proxy.upstream).netloc, timeout=60)
            try:
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in _HOP:
                        connection.putheader(name, value)

                connection.putheader("Content-Length", str(len(body)))
                connection.endheaders(body)
                found = connection.getresponse()
                kept = {name: value for name, value in found.getheaders() if name.lower() not in _HOP}
                if self.command == "HEAD":
                    kept["Content-Length"] = found.getheader("Content-Length") or "0"
                return found.status, kept, found.read()
            finally:
                connection.close()

        def answer(self, status: int, headers: dict[str, str], content: bytes, *, half: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "Content-Length" not in headers and status != 204:
                self.send_header("Content-Length", str(len(content)))

            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if half else content)
            if half:
                self.end_connection()

        def end_connection(self) -> None:
            self.close_connection = True
            self.connection.close()

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # the name there
            """Say nothing."""

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any  # the names there

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Say nothing: connections end because they are asked to."""

    server = Server(("127.0.0.1", 0), Handler)
    proxy = FaultProxy(f"http://127.0.0.1:{server.server_port}", upstream)
    serving = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    serving.start()
    try:
        yield proxy
    finally:
        proxy.ended.set()
        server.shutdown()
        server.server_close()
        serving.join()
