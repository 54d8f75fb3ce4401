"""The options that bound how long a bucket is asked: each ends what would otherwise go on past the test."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import ExitStack

import pytest
from tests.object_server import InMemory, object_server

from penstock.errors import ThrottledError, UnreachableError
from penstock.handlers.stores.buckets.bucket_options import S3Options
from penstock.handlers.stores.buckets.bucket_store import BucketStore
from penstock.handlers.stores.buckets.connections import connect

LONG = 90.0  # longer than a test may take


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")


def store(options: S3Options) -> BucketStore:
    return BucketStore("s3://bucket", connect("bucket", options, environ={}))


@pytest.mark.parametrize(
    ("retries", "retry_s", "most"), [(2, LONG, 3), (1000, 0.5, 100)], ids=["retries", "retry_s"]
)
def test_a_request_is_repeated_so_often_and_so_long(retries: int, retry_s: float, most: int) -> None:
    with object_server(InMemory()) as server:
        server.before = lambda _: 503
        limits = S3Options(
            endpoint=server.endpoint, region="us-east-1", request_s=LONG, retries=retries, retry_s=retry_s
        )
        with pytest.raises(ThrottledError):
            store(limits).read_file("s3://bucket/run")

        assert 0 < len(server.log) <= most


@pytest.fixture
def silent() -> Generator[str]:
    """A port where nobody takes connections: as many wait already as the system lets wait."""
    with ExitStack() as held:
        listening = held.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(64):
            waiting = held.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(listening.getsockname())
            except TimeoutError:
                break
        else:
            pytest.skip("this system lets every connection wait")

        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_server_that_takes_no_connection_is_given_up(silent: str) -> None:
    limits = S3Options(
        endpoint=silent,
        region="us-east-1",
        connect_s=0.3,
        request_s=LONG,
        progress_s=LONG,
        retries=0,
        retry_s=LONG,
    )
    with pytest.raises(UnreachableError):
        store(limits).read_file("s3://bucket/run")
