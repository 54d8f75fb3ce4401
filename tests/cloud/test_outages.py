"""Outages of a server, by its own answers and of the network: saves and restores outlast them by default."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
from anyio import create_task_group
from tests.cloud.fault_proxy import Action, FaultProxy, fault_proxy
from tests.cloud.servers import ENDPOINTS, Server

import penstock
from penstock.steps import CheckpointManager

AssertSame = Callable[[Any, Any], None]

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

LISTS = r"^GET .*[?&](list-type=|comp=list|prefix=)"


@pytest.fixture
def proxy(environ: Server, monkeypatch: pytest.MonkeyPatch) -> Generator[FaultProxy]:
    with fault_proxy(environ.endpoint) as found:
        monkeypatch.setenv(ENDPOINTS[environ.scheme], environ.path_to(found.endpoint))
        yield found


def state(step: int = 1) -> dict[str, Any]:
    return {"a": np.arange(3_000_000.0) * step, "b": np.full(10, step)}


@pytest.mark.slow
@pytest.mark.parametrize("action", ["refuse", "reset"])
@pytest.mark.parametrize("seconds", [10.0, 25.0])
async def test_an_outage_is_survived_by_default(
    environ: Server, proxy: FaultProxy, seconds: float, action: Action, assert_same: AssertSame
) -> None:
    url = environ.url()
    await penstock.save(f"{url}/there", state())

    async def restore() -> None:
        assert_same(await penstock.restore(f"{url}/there"), state())

    async def save(number: int) -> None:
        await penstock.save(f"{url}/{number}", state(number))

    async def keep_steps() -> None:
        async with CheckpointManager(f"{url}/run") as manager:
            future = await manager.save(1, state())
            assert future is not None
            await future

    proxy.fail_for(seconds, ".", action)
    async with create_task_group() as tasks:
        for number in range(2):
            tasks.start_soon(restore)
            tasks.start_soon(save, number)

        tasks.start_soon(keep_steps)

    assert len(proxy.fired()) < 60 * seconds, "not all of them, all of the time"
    for number in range(2):
        assert_same(await penstock.restore(f"{url}/{number}"), state(number))
    async with CheckpointManager(f"{url}/run", read_only=True) as manager:
        assert list(manager.all_steps()) == [1]


@pytest.mark.parametrize("action", ["truncate", "refuse", "reset"])
async def test_lists_that_fail_for_a_while_are_asked_for_again(
    environ: Server, proxy: FaultProxy, action: Action, assert_same: AssertSame
) -> None:
    url = environ.url()
    async with CheckpointManager(url) as manager:
        future = await manager.save(1, state())
        assert future is not None
        await future

    proxy.fail_for(3.0, LISTS, action)
    async with CheckpointManager(url, read_only=True) as manager:
        assert list(manager.all_steps()) == [1]
        assert_same(await manager.restore(), state())

    assert proxy.fired()
