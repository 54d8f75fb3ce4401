"""A server of objects on loopback: the requests of S3, and those of Google's XML interface, which are alike.

It keeps the objects in memory, or puts them into another server, and notes each request. Standard library,
one thread for each connection.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Lock, Thread
from typing import Protocol
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as Xml
from xml.sax.saxutils import escape

BUCKET = "bucket"
"""The only one."""
CREDENTIALS: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""What a client of S3 wants to find in the environment. The server looks at none of it."""


@dataclass(frozen=True)
class Stored:
    """An object."""

    data: bytes  #: all of it, or the part that was asked for
    generation: int  #: of all that was ever put, another for each
    size: int | None = None  #: of all of it, if this is a part
    modified: str = field(default_factory=lambda: formatdate(usegmt=True))  #: when it was put

    @property
    def tag(self) -> str:
        """Its tag, in quotes."""
        return f'"{self.generation:x}"'


class Backend(Protocol):
    """Where the objects are."""

    def get(self, key: str, span: str | None = None) -> Stored | None:
        """Return an object; of one that is asked for in part, perhaps that part, as in `bytes=0-9`."""
        ...

    def head(self, key: str) -> Stored | None:
        """Return an object, perhaps without its content."""
        ...

    def put(self, key: str, data: bytes) -> Stored: ...
    def delete(self, key: str) -> None: ...
    def names(self, prefix: str) -> Mapping[str, int]:
        """Return the objects whose names begin with something, and their lengths."""
        ...

    def tags(self, prefix: str) -> Mapping[str, str]:
        """Return their tags, in quotes. Those that are not known are "1" in lists, unlike elsewhere."""
        ...


@dataclass
class InMemory:
    """Objects in this process."""

    objects: dict[str, Stored] = field(default_factory=dict[str, Stored])
    generations: count[int] = field(default_factory=lambda: count(1_700_000_000_000_000))

    def get(self, key: str, span: str | None = None) -> Stored | None:
        return self.objects.get(key)

    def head(self, key: str) -> Stored | None:
        return self.objects.get(key)

    def put(self, key: str, data: bytes) -> Stored:
        self.objects[key] = made = Stored(data, next(self.generations))
        return made

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def names(self, prefix: str) -> Mapping[str, int]:
        return {key: len(found.data) for key, found in self.objects.items() if key.startswith(prefix)}

    def tags(self, prefix: str) -> Mapping[str, str]:
        return {key: found.tag for key, found in self.objects.items() if key.startswith(prefix)}


@dataclass(frozen=True)
class Asked:
    """A request, without the bucket's name."""

    method: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  #: by names in lower case
    nbytes: int  #: of the body

    @property
    def span(self) -> int:
        """How many bytes of an object are asked for; 0 if that is not said."""
        first, _, last = self.headers.get("range", "bytes=1-0").removeprefix("bytes=").partition("-")
        return int(last or first) - int(first) + 1


@dataclass
class ObjectServer:
    """A server that is running."""

    endpoint: str
    backend: Backend
    keeps_conditions: bool = True
    log: list[Asked] = field(default_factory=list[Asked])
    before: Callable[[Asked], int | None] = lambda _: None
    """Called before each request is answered. It may wait, and return a status to answer with instead."""
    after: Callable[[Asked, bytes], bytes] = lambda _, content: content
    """Called with each body that is sent, and returns what is sent instead."""
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict[str, dict[int, bytes]])
    """The parts of each upload that is neither completed nor aborted."""
    lock: Lock = field(default_factory=Lock)

    def asked(self, method: str, part: str = "") -> list[Asked]:
        """Return the requests of a method to keys with a part in them."""
        return [each for each in self.log if each.method == method and part in each.key]

    def answer(self, asked: Asked, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers and the body."""
        status = self.before(asked)
        if status is not None:
            return status, {}, b"<Error><Code>Injected</Code></Error>"
        if not asked.key:
            return (200, {}, self._list(asked.query)) if asked.method == "GET" else self._delete_many(body)

        with nullcontext() if asked.method in {"GET", "HEAD"} else self.lock:
            return getattr(self, f"_{asked.method.lower()}")(asked, body)  # type: ignore[no-any-return]

    def _get(self, asked: Asked, _: bytes) -> tuple[int, dict[str, str], bytes]:
        span = asked.headers.get("range")
        found = self.backend.get(asked.key, span)
        if found is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"

        data, headers = found.data, {**_told(found), "Last-Modified": found.modified}
        if span is None:
            return 200, headers, data

        first, last = span.removeprefix("bytes=").split("-")
        size = len(data) if found.size is None else found.size
        end = min(int(last) + 1, size) if last else size
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
        return 206, headers, data[int(first) : end] if found.size is None else data

    def _head(self, asked: Asked, _: bytes) -> tuple[int, dict[str, str], bytes]:
        found = self.backend.head(asked.key)
        if found is None:
            return 404, {}, b""

        size = len(found.data) if found.size is None else found.size
        told = {"Last-Modified": found.modified, "Content-Length": str(size)}
        return 200, {**_told(found), **told}, b""

    def _put(self, asked: Asked, body: bytes) -> tuple[int, dict[str, str], bytes]:
        source = next((text for name, text in asked.headers.items() if name.endswith("copy-source")), None)
        if source is not None:
            copied = self.backend.get(unquote(source).lstrip("/").split("/", 1)[1])
            if copied is None:
                return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"

            body = copied.data
        if "uploadId" in asked.query:
            return self._put_part(asked, body)
        if not self._may_put(asked):
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"

        made = self.backend.put(asked.key, body)
        told = f"<CopyObjectResult><ETag>{made.tag}</ETag></CopyObjectResult>".encode()
        return 200, _told(made), b"" if source is None else told

    def _put_part(self, asked: Asked, body: bytes) -> tuple[int, dict[str, str], bytes]:
        number = int(asked.query["partNumber"])
        parts = self.uploads.get(asked.query["uploadId"])
        if parts is None:
            return 404, {}, b"<Error><Code>NoSuchUpload</Code></Error>"

        parts[number] = body
        tag = f'"part-{number}"'
        return 200, {"ETag": tag}, f"<CopyPartResult><ETag>{tag}</ETag></CopyPartResult>".encode()

    def _post(self, asked: Asked, _: bytes) -> tuple[int, dict[str, str], bytes]:
        """Begin an upload in parts, or complete it."""
        upload = asked.query.get("uploadId")
        if upload is None:
            upload = f"upload-{len(self.log)}"
            self.uploads[upload] = {}
            told = f"<UploadId>{upload}</UploadId>"
            begun = f"<InitiateMultipartUploadResult>{told}</InitiateMultipartUploadResult>"
            return 200, {}, begun.encode()
        if upload not in self.uploads:
            return 404, {}, b"<Error><Code>NoSuchUpload</Code></Error>"
        if not self._may_put(asked):
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"

        parts = self.uploads.pop(upload)
        made = self.backend.put(asked.key, b"".join([parts[number] for number in sorted(parts)]))
        told = f"<ETag>{escape(made.tag)}</ETag>"
        done = f"<CompleteMultipartUploadResult>{told}</CompleteMultipartUploadResult>"
        return 200, _told(made), done.encode()

    def _may_put(self, asked: Asked) -> bool:
        return not self.keeps_conditions or _holds(asked.headers, self.backend.head(asked.key))

    def _delete(self, asked: Asked, _: bytes) -> tuple[int, dict[str, str], bytes]:
        if "uploadId" in asked.query:
            self.uploads.pop(asked.query["uploadId"], None)
        else:
            self.backend.delete(asked.key)

        return 204, {}, b""

    def _delete_many(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        keys = [each.text or "" for each in Xml.fromstring(body).iter() if each.tag.endswith("Key")]
        with self.lock:
            for key in keys:
                self.backend.delete(key)

        rows = "".join([f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys])
        return 200, {}, f"<DeleteResult>{rows}</DeleteResult>".encode()

    def _list(self, query: Mapping[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        with self.lock:
            found, tags = dict(self.backend.names(prefix)), self.backend.tags(prefix)

        folders = {
            prefix + key[len(prefix) :].split(delimiter)[0] + delimiter
            for key in found
            if delimiter and delimiter in key[len(prefix) :]
        }
        rows = [
            f"<Contents><Key>{escape(key)}</Key><Size>{nbytes}</Size>"
            f"<ETag>{escape(tags.get(key, _NO_TAG))}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, nbytes in sorted(found.items())
            if not (delimiter and delimiter in key[len(prefix) :])
        ]
        rows += [
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)
        ]
        return (
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>".encode()
        )


_NO_TAG = '"1"'


def _told(found: Stored) -> dict[str, str]:
    return {"ETag": found.tag, "x-goog-generation": str(found.generation)}


def _holds(headers: Mapping[str, str], there: Stored | None) -> bool:
    """Whether the conditions of a request hold."""
    generation = headers.get("x-goog-if-generation-match")
    if generation is not None and int(generation) != (0 if there is None else there.generation):
        return False
    if headers.get("if-none-match") == "*" and there is not None:
        return False

    tag = headers.get("if-match")
    return tag is None or (there is not None and there.tag == tag)


@contextmanager
def object_server(backend: Backend | None = None) -> Generator[ObjectServer]:
    """Run a server until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else the body waits 40 ms for what tells that its head has come

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            bucket, _, key = unquote(url.path).lstrip("/").partition("/")
            query = {name: each[0] for name, each in parse_qs(url.query, keep_blank_values=True).items()}
            headers = {name.lower(): text for name, text in self.headers.items()}
            asked = Asked(self.command, key, query, headers, len(body))
            server.log.append(asked)
            if bucket == BUCKET:
                status, told, content = server.answer(asked, body)
            else:
                status, told, content = 404, {}, b"<Error><Code>NoSuchBucket</Code></Error>"

            content = server.after(asked, content)
            self.send_response_only(status)
            for name, text in told.items():
                self.send_header(name, text)

            if "Content-Length" not in told:
                self.send_header("Content-Length", str(len(content)))

            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # the name there
            """Say nothing."""

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any  # the names there

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Say nothing: clients leave when they have waited long enough."""

    http = Server(("127.0.0.1", 0), Handler)
    server = ObjectServer(f"http://127.0.0.1:{http.server_port}", InMemory() if backend is None else backend)
    serving = Thread(target=http.serve_forever, args=(0.05,), daemon=True)
    serving.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        serving.join()
