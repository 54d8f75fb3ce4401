"""What each option of `[store.s3]` and `[store.gs]` does to the requests of a save and a restore."""

from __future__ import annotations

import logging
from collections.abc import Generator
from threading import Condition, Event
from typing import Any

import numpy as np
import pytest
from tests.object_server import Asked, ObjectServer, object_server

from penstock import Checkpointer, Config, SaveReport
from penstock.errors import PenstockError, ThrottledError, UnreachableError, UnsupportedByStoreError

pytestmark = pytest.mark.anyio

SECRET = "a-secret-that-nobody-reads"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Generator[ObjectServer]:
    pytest.importorskip("obstore", reason="needs obstore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with object_server() as found:
        yield found


def checkpointer(server: ObjectServer, scheme: str = "s3", **options: Any) -> Checkpointer:
    given = {"endpoint": server.endpoint, "retries": 0, **options}
    flows = {"save": {"piece_bytes": "1MiB"}, "restore": {"piece_bytes": "1MiB"}}
    return Checkpointer(config=Config.load(environ={}, arguments={"store": {scheme: given}, **flows}))


async def saved(server: ObjectServer, n: int = 8, scheme: str = "s3", **options: Any) -> SaveReport:
    async with checkpointer(server, scheme, **options) as made:
        return await (await made.save(f"{scheme}://bucket/run/7", [np.full(n, float(n))]))


@pytest.mark.parametrize("scheme", ["s3", "gs"])
async def test_a_tree_is_saved_and_restored(server: ObjectServer, scheme: str) -> None:
    assert not (await saved(server, scheme=scheme)).single_writer
    async with checkpointer(server, scheme) as made:
        assert (await made.restore(f"{scheme}://bucket/run/7"))[0].tolist() == [8.0] * 8


async def test_region_is_signed(server: ObjectServer) -> None:
    await saved(server, region="mars-north-3")
    assert all("/mars-north-3/s3/" in asked.headers["authorization"] for asked in server.log)


async def test_file_bytes_is_the_length_of_an_object(server: ObjectServer) -> None:
    await saved(server, n=2**18, file_bytes="512KiB")
    put = [asked.nbytes for asked in server.asked("PUT", "/d/")]
    assert [nbytes for nbytes in put if nbytes > 1000] == [2**19] * 4, "the other one is the index"


async def test_concurrency_is_how_many_requests_are_under_way(server: ObjectServer) -> None:
    wanted, under_way, most, met = 3, 0, 0, Condition()

    def before(asked: Asked) -> int | None:
        nonlocal under_way, most
        if max(asked.nbytes, asked.span) < 2**20:  # what is asked alone would wait for others in vain
            return None
        with met:
            under_way += 1
            most = max(most, under_way)
            met.notify_all()
            met.wait_for(lambda: most == wanted, timeout=20)
            under_way -= 1

        return None

    server.before = before
    tree = [np.full(2**19, n, np.float32) for n in range(6)]
    async with checkpointer(server, concurrency=wanted, file_bytes="2MiB") as made:
        await (await made.save("s3://bucket/run/7", tree))
        assert most == wanted
        most = 0
        await made.restore("s3://bucket/run/7")
        assert most == wanted


@pytest.mark.parametrize("option", ["request_s", "progress_s"])
async def test_a_server_that_does_not_answer_is_not_waited_for_longer(
    server: ObjectServer, option: str
) -> None:
    await saved(server)
    ended = Event()

    def before(asked: Asked) -> None:
        if "/d/" in asked.key:
            ended.wait(20)

    server.before = before
    try:
        async with checkpointer(server, **{option: "2s"}) as made:
            with pytest.raises(UnreachableError, match="/d/"):
                await made.restore("s3://bucket/run/7")
    finally:
        ended.set()


@pytest.mark.parametrize("retries", [0, 2])
async def test_retries_are_counted(server: ObjectServer, retries: int) -> None:
    server.before = lambda asked: 503 if asked.key.endswith("/_METADATA") else None
    async with checkpointer(server, retries=retries) as made:
        with pytest.raises(ThrottledError, match="_METADATA"):
            await made.restore("s3://bucket/run/7/_METADATA")

    first = server.asked("HEAD", "/_METADATA")
    assert len(first) == retries + 1


@pytest.mark.parametrize(
    ("checksum", "header"),
    [
        ("auto", "x-amz-checksum-sha256"),
        ("crc64nvme", "x-amz-checksum-crc64nvme"),
        ("sha256", "x-amz-checksum-sha256"),
    ],
)
async def test_checksum_is_sent(server: ObjectServer, checksum: str, header: str) -> None:
    await saved(server, checksum=checksum)
    assert all(asked.headers[header] for asked in server.asked("PUT"))


async def test_no_checksum_is_sent_if_none_is_wanted(server: ObjectServer) -> None:
    await saved(server, checksum="none")
    put = server.asked("PUT")  # deletions of many need one
    assert not [name for asked in put for name in asked.headers if "x-amz-checksum" in name]


async def test_requester_pays_is_sent(server: ObjectServer) -> None:
    await saved(server, requester_pays=True)
    assert {asked.headers["x-amz-request-payer"] for asked in server.asked("PUT")} == {"requester"}


async def test_the_project_that_pays_is_said_to_google(server: ObjectServer) -> None:
    await saved(server, scheme="gs", billed_project="mine")
    assert {asked.headers["x-goog-user-project"] for asked in server.log} == {"mine"}


@pytest.mark.parametrize("scheme", ["s3", "gs"])
async def test_a_server_that_ignores_conditions_is_used_if_there_is_one_writer(
    server: ObjectServer, scheme: str
) -> None:
    server.keeps_conditions = False
    with pytest.raises(UnsupportedByStoreError, match="single_writer"):
        await saved(server, scheme=scheme)

    assert server.backend.names("") == {}
    report = await saved(server, scheme=scheme, single_writer=True)
    assert report.single_writer
    assert "by single_writer alone" in str(report)
    with pytest.raises(PenstockError, match="exists"):
        await saved(server, scheme=scheme, single_writer=True)

    assert not [key for key in server.backend.names("") if "penstock" in key]


async def test_one_writer_is_not_relied_on_where_the_server_keeps_to_conditions(server: ObjectServer) -> None:
    assert not (await saved(server, single_writer=True)).single_writer


async def test_no_secret_is_logged(server: ObjectServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await saved(server)
    server.before = lambda _: 403
    with pytest.raises(PenstockError) as caught:
        await saved(server)

    config = Config.load(environ={}, arguments={"store": {"s3": {"endpoint": server.endpoint}}})
    assert SECRET not in caplog.text + repr(caught.value) + repr(config)
    assert not [asked for asked in server.log if SECRET in repr(asked)]
