"""Bytes of a bucket that were damaged on their way: they are read again before that is an error."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from tests.object_server import Asked, ObjectServer, object_server

from penstock import Checkpointer, Config
from penstock.errors import ChecksumError, CorruptCheckpointError
from penstock.handlers import LocalStore
from penstock.stages.read import read_twice

pytestmark = pytest.mark.anyio

PATH = "s3://bucket/run/7"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Generator[ObjectServer]:
    pytest.importorskip("obstore", reason="needs obstore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    with object_server() as found:
        yield found


def checkpointer(server: ObjectServer) -> Checkpointer:
    given = {"endpoint": server.endpoint, "region": "us-east-1", "file_bytes": "1MiB"}
    return Checkpointer(config=Config.load(environ={}, arguments={"store": {"s3": given}}))


def state() -> dict[str, Any]:
    return {"large": np.arange(2**18), "small": [np.full(5, at) for at in range(9)], "name": "run"}


async def flipping(server: ObjectServer, part: str, times: int) -> list[Asked]:
    """Save, and have a bit flipped in the next answers about an object; return those it was done to."""
    async with checkpointer(server) as made:
        await (await made.save(PATH, state()))

    done: list[Asked] = []

    def after(asked: Asked, content: bytes) -> bytes:
        if asked.method != "GET" or part not in asked.key or len(done) >= times or not content:
            return content

        done.append(asked)
        middle = len(content) // 2
        return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]

    server.after = after
    return done


@pytest.mark.thinned(2)
@pytest.mark.parametrize("part", ["/d/", "/_METADATA", "/manifest.ocdbt", "/_CHECKPOINT_METADATA"])
async def test_one_flipped_bit_is_read_again(server: ObjectServer, part: str, assert_same: Any) -> None:
    done = await flipping(server, part, 1)
    async with checkpointer(server) as made:
        assert_same(await made.restore(PATH), state())

    assert len(done) == 1


@pytest.mark.parametrize("part", ["/d/", "/_METADATA"])
async def test_what_stays_wrong_is_an_error(server: ObjectServer, part: str) -> None:
    done = await flipping(server, part, 10**6)
    async with checkpointer(server) as made:
        with pytest.raises(CorruptCheckpointError, match=part.strip("/")):
            await made.restore(PATH)

    assert len(done) >= 2


def test_a_disk_is_not_asked_twice() -> None:
    calls: list[int] = []

    def read() -> None:
        calls.append(1)
        raise ChecksumError("file", "differs")

    assert not LocalStore().over_network
    with pytest.raises(ChecksumError):
        read_twice(LocalStore(), read)

    assert len(calls) == 1
