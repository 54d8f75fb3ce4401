"""Servers of S3's protocol on loopback, with made-up credentials. Nothing here reaches another machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep
from typing import Any

BUCKET = "bucket"
READY_S = 60.0
SECRET = "testingsecret"
ENVIRONMENT: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True)
class Server:
    """A server that is running."""

    name: str
    endpoint: str

    def environ(self, endpoint: str | None = None) -> dict[str, str]:
        """The variables by which a client finds it, or a proxy before it."""
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint or self.endpoint}

    def url(self) -> str:
        """A prefix that nobody else uses."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"

    def store(self, endpoint: str | None = None) -> Any:
        """obstore's client of the bucket."""
        return _obstore("obstore.store").S3Store(
            BUCKET,
            endpoint=endpoint or self.endpoint,
            region="us-east-1",
            access_key_id="testing",
            secret_access_key=SECRET,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )


def _obstore(name: str) -> Any:
    """Import it only here and when it is needed: it is in an extra."""
    return import_module(name)


def program(name: str) -> str | None:
    """Find a program beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def free_port() -> int:
    """Return one that is free, and so low that SeaweedFS can add the 10,000 of its second port."""
    while True:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port: int = taken.getsockname()[1]
        if port < 55_000:
            return port


@contextmanager
def running(command: list[str], url: str, folder: Path) -> Generator[None]:
    """Run a server until the block ends; it is there once it answers anything at `url`."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **ENVIRONMENT},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_for(url, process, folder / "log")
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

            process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once something answers. Looks every 0.1 s: a server says by nothing else that it is there."""
    until = monotonic() + READY_S
    while monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError as answer:
            if answer.code < 500:
                return
        except OSError:
            pass
        else:
            return

        sleep(0.1)

    message = f"{process.args!r} did not come up: {log.read_text()[-2000:]}"
    raise RuntimeError(message)


@contextmanager
def seaweedfs(folder: Path) -> Generator[Server]:
    """A real distributed store, in one process."""
    weed = program("weed")
    assert weed is not None
    ports = [free_port() for _ in range(5)]
    endpoint = f"http://127.0.0.1:{ports[0]}"
    command = [
        weed, "mini", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", f"-s3.port={ports[0]}",
        f"-master.port={ports[1]}", f"-volume.port={ports[2]}", f"-filer.port={ports[3]}",
        f"-bucket={BUCKET}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false", "-webdav=false", "-admin.ui=false", "-master.telemetry=false",
        "-master.telemetry.url=http://127.0.0.1:9/",
    ]  # fmt: skip
    with running(command, endpoint, folder):
        server = Server("SeaweedFS", endpoint)
        wait_for_bucket(server)
        yield server


@contextmanager
def moto(folder: Path) -> Generator[Server]:
    """A mock of Amazon's, which has no lock around its conditions."""
    found = program("moto_server")
    assert found is not None
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    with running([found, "-H", "127.0.0.1", "-p", str(port)], endpoint, folder):
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")).close()
        yield Server("moto", endpoint)


def wait_for_bucket(server: Server) -> None:
    """Return once an object can be written."""
    obstore, errors = _obstore("obstore"), _obstore("obstore.exceptions")
    until = monotonic() + READY_S
    while True:
        try:
            obstore.put(server.store(), "first", b"")
        except (errors.BaseError, FileNotFoundError):
            if monotonic() > until:
                raise
            sleep(0.2)
        else:
            return
