"""What a save and a restore make of a server and a network that fail: a right result, or a right error."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
from tests.cloud.fault_proxy import Action, FaultProxy, fault_proxy
from tests.cloud.servers import ENDPOINTS, Server

from penstock import Checkpointer
from penstock.config import Config
from penstock.errors import (
    AccessDeniedError,
    ChecksumError,
    OutcomeUnknownError,
    PenstockError,
    ThrottledError,
    UnreachableError,
)
from penstock.steps import CheckpointManager

AssertSame = Callable[[Any, Any], None]

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

DATA, DOCUMENT, CLAIM, MARK = "/d/", "manifest", "penstock-saving", "commit_success"
LISTS = r"^GET .*[?&](list-type=|comp=list|prefix=)"


@pytest.fixture
def proxy(environ: Server, monkeypatch: pytest.MonkeyPatch) -> Generator[FaultProxy]:
    with fault_proxy(environ.endpoint) as found:
        monkeypatch.setenv(ENDPOINTS[environ.scheme], environ.path_to(found.endpoint))
        yield found


def quick() -> Config:
    """Gives up sooner than it should in earnest."""
    options = {"request_s": 3.0, "retry_s": 10.0, "retries": 3}
    return Config.load(environ={}, arguments={"store": dict.fromkeys(ENDPOINTS, options)})


def state() -> dict[str, Any]:
    return {"a": np.arange(3_000_000.0), "b": np.ones(10)}


@pytest.mark.parametrize("action", ["refuse", "reset", "lost_reply", "conflict"])
@pytest.mark.parametrize("what", [DATA, DOCUMENT, CLAIM, MARK])
async def test_a_save_survives_one_failure_of_any_request(
    environ: Server, proxy: FaultProxy, what: str, action: Action, assert_same: AssertSame
) -> None:
    path = f"{environ.url()}/7"
    proxy.fail(f"^PUT .*{what}", action)
    async with Checkpointer(config=quick()) as checkpointer:
        await (await checkpointer.save(path, state()))
        assert proxy.fired() == [action]
        assert_same(await checkpointer.restore(path), state())

    assert environ.bucket_store().list_directory(path.rsplit("/", 1)[0]) == ["7"]


@pytest.mark.parametrize("what", [DATA, DOCUMENT, CLAIM, MARK])
@pytest.mark.parametrize(
    ("action", "expected"),
    [("deny", AccessDeniedError), ("refuse", ThrottledError), ("hang", UnreachableError)],
)
async def test_a_save_that_keeps_failing_says_why_and_leaves_nothing_to_be_seen(
    environ: Server, proxy: FaultProxy, what: str, action: Action, expected: type[PenstockError]
) -> None:
    path = f"{environ.url()}/7"
    proxy.fail(f"^PUT .*{what}", action, count=10**6)
    unknown = what == MARK and action != "deny"
    async with Checkpointer(config=quick()) as checkpointer:
        with pytest.raises(OutcomeUnknownError if unknown else expected) as caught:
            await (await checkpointer.save(path, state()))

    assert path in str(caught.value)
    store = environ.bucket_store()
    assert store.kind(path) is None
    if unknown:  # whole, but for its mark
        assert proxy.fired()
        return

    proxy.rules.clear()
    async with Checkpointer(config=quick()) as checkpointer:
        await (await checkpointer.save(path, state()))


@pytest.mark.parametrize("action", ["expire", "skew"])
@pytest.mark.parametrize("what", [DATA, DOCUMENT])
async def test_credentials_that_expire_within_a_save_and_a_wrong_clock_are_told(
    environ: Server, proxy: FaultProxy, what: str, action: Action
) -> None:
    path = f"{environ.url()}/7"
    proxy.fail(f"^PUT .*{what}", action, count=10**6)
    async with Checkpointer(config=quick()) as checkpointer:
        with pytest.raises(AccessDeniedError) as caught:
            await (await checkpointer.save(path, state()))

    assert path in str(caught.value)
    assert environ.bucket_store().kind(path) is None


async def test_a_list_that_is_refused_is_not_read_as_an_empty_root(
    environ: Server, proxy: FaultProxy
) -> None:
    root = environ.url()
    async with CheckpointManager(root, config=quick()) as manager:
        await (await manager.save(7, state()) or pytest.fail("it was not saved"))

    proxy.fail(LISTS, "refuse")
    async with CheckpointManager(root, config=quick()) as manager:
        assert manager.all_steps() == (7,)

    proxy.fail(LISTS, "refuse", count=10**6)
    with pytest.raises(ThrottledError):
        async with CheckpointManager(root, config=quick()):
            pytest.fail("it was opened")

    assert proxy.fired().count("refuse") > 1


@pytest.mark.parametrize("action", ["refuse", "reset", "truncate"])
@pytest.mark.parametrize("what", [DATA, DOCUMENT])
async def test_a_restore_survives_one_failure_of_any_request(
    environ: Server, proxy: FaultProxy, what: str, action: Action, assert_same: AssertSame
) -> None:
    path = f"{environ.url()}/7"
    async with Checkpointer(config=quick()) as checkpointer:
        await (await checkpointer.save(path, state()))
        proxy.fail(f"^GET .*{what}", action)

    async with Checkpointer(config=quick()) as checkpointer:
        assert_same(await checkpointer.restore(path), state())

    assert proxy.fired() == [action]


async def test_a_flipped_bit_is_noticed(environ: Server, proxy: FaultProxy) -> None:
    path = f"{environ.url()}/7"
    async with Checkpointer(config=quick()) as checkpointer:
        await (await checkpointer.save(path, state()))
        proxy.fail(f"^GET .*{DATA}", "flip", count=10**6)

    async with Checkpointer(config=quick()) as checkpointer:
        with pytest.raises(ChecksumError):
            await checkpointer.restore(path)


async def test_a_restore_from_a_server_that_hangs_ends(environ: Server, proxy: FaultProxy) -> None:
    path = f"{environ.url()}/7"
    async with Checkpointer(config=quick()) as checkpointer:
        await (await checkpointer.save(path, state()))
        proxy.fail(f"^GET .*{DATA}", "hang", count=10**6)
        with pytest.raises(UnreachableError):
            await checkpointer.restore(path)
