"""How many requests operations on a bucket take, and how many of them one after another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from threading import Condition
from typing import Any

import numpy as np
import pytest
from anyio import create_task_group
from tests.object_server import CREDENTIALS, Asked, ObjectServer, object_server
from tests.own_files import REPORTS

import penstock
from penstock import Checkpointer, RestoreReport
from penstock.config import Config, JobLimits
from penstock.handlers.coordinators import JobCoordinator
from penstock.handlers.stores.buckets import MARK
from penstock.kernel import SingleProcessCoordinator
from penstock.steps import CheckpointManager
from penstock.testing import MemoryKeyValues

pytestmark = pytest.mark.anyio

ROOT = "s3://bucket/run"
QUIET = Config.load(environ={}, arguments={"telemetry": {"keep_reports": 0}})
PATH = f"{ROOT}/x"
LIMITS = JobLimits(join_s=30.0, write_s=30.0, silence_s=30.0, beat_s=0.2, call_s=5.0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Generator[ObjectServer]:
    pytest.importorskip("obstore", reason="needs obstore")
    with object_server() as found:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": found.endpoint}.items():
            monkeypatch.setenv(name, value)

        yield found


def tree(step: int = 1) -> dict[str, Any]:
    return {"a": np.arange(1000.0) * step, "b": np.full(10, step)}


async def save(path: str = PATH, step: int = 1, **options: Any) -> None:
    await penstock.save(path, tree(step), **options)


def requests(server: ObjectServer) -> Sequence[str]:
    """Return what was asked since the last call."""
    found = [f"{each.method} {each.key or each.query.get('prefix')}" for each in server.log]
    server.log.clear()
    return found


async def test_a_restore_of_a_small_tree_takes_8_requests(server: ObjectServer) -> None:
    await save()
    requests(server)
    reports: list[RestoreReport] = []
    found = await penstock.restore(PATH, on_report=reports.append)
    assert (found["a"] == tree()["a"]).all()
    asked = requests(server)
    assert len(asked) <= 8, asked
    assert len(asked) == len(set(asked)), "nothing is asked twice"
    assert reports[0].requests is not None
    assert reports[0].requests.n_sent == len(asked)
    assert "8 requests" in str(reports[0])


async def test_at_most_4_requests_follow_one_another(server: ObjectServer) -> None:
    """Requests that are under way together wait for each other here: each round is as wide as can be."""
    await save()
    rounds: list[int] = []
    met, waiting = Condition(), 0

    def before(_: Asked) -> None:
        nonlocal waiting
        with met:
            waiting += 1
            mine = len(rounds)
            # A round ends when nobody has come for a while: what comes later has waited for an answer.
            while len(rounds) == mine:
                seen = waiting
                if not met.wait(0.3) and waiting == seen and len(rounds) == mine:
                    rounds.append(waiting)
                    waiting = 0
                    met.notify_all()

    server.before = before
    await penstock.restore(PATH)
    assert sum(rounds) <= 8
    assert len(rounds) <= 4, rounds


async def test_what_was_read_last_is_known_if_the_mark_is_the_same(server: ObjectServer) -> None:
    await save()
    async with Checkpointer() as checkpointer:
        await checkpointer.metadata(PATH)
        requests(server)
        assert (await checkpointer.restore(PATH))["b"][0] == 1
        assert requests(server) == [f"GET run/x/{MARK}"]
        await save(step=2, overwrite="delete-first")
        requests(server)
        assert (await checkpointer.restore(PATH))["b"][0] == 2
        assert len(requests(server)) <= 9


async def test_a_larger_restore_asks_once_for_each_piece_besides(server: ObjectServer) -> None:
    await penstock.save(PATH, {"a": np.arange(3 * 2**20, dtype=np.float64)})
    requests(server)
    await penstock.restore(PATH)
    asked = requests(server)
    documents = [each for each in asked if "/d/" not in each]
    assert len(documents) <= 7, "with the mark once more, after the data"
    assert documents[-1].endswith(MARK)


async def test_metadata_take_8_requests(server: ObjectServer) -> None:
    await save()
    requests(server)
    await penstock.metadata(PATH)
    assert len(requests(server)) <= 8


async def test_a_save_takes_18_requests(server: ObjectServer) -> None:
    await save()
    asked = requests(server)
    assert len(asked) <= 18, asked


async def test_a_verification_of_64_mib_takes_12_requests(server: ObjectServer) -> None:
    await penstock.save(PATH, {"a": np.arange(8 * 2**20, dtype=np.float64)})
    requests(server)
    assert (await penstock.verify(PATH)).intact
    asked = requests(server)
    assert len(asked) <= 12, asked


async def test_short_ranges_are_verified_together(server: ObjectServer) -> None:
    await penstock.save(PATH, [np.full(30_000, float(at)) for at in range(50)])  # 12 MiB
    requests(server)
    assert (await penstock.verify(PATH)).intact
    asked = requests(server)
    assert len(asked) <= 12, asked


async def test_a_manager_takes_few_requests(server: ObjectServer) -> None:
    async with CheckpointManager(ROOT, config=QUIET) as manager:
        assert len(requests(server)) <= 9
        for step in (1, 2):
            future = await manager.save(step, tree(step))
            assert future is not None
            await future
            asked = requests(server)
            assert len(asked) <= 21, asked

    requests(server)
    async with CheckpointManager(ROOT, config=QUIET) as manager:
        assert (await manager.restore())["b"][0] == 2
        asked = requests(server)
        assert len(asked) <= 21, asked

    assert len(requests(server)) <= 4, "to give the root up"


async def test_what_is_kept_of_saves_takes_few_requests(server: ObjectServer) -> None:
    async with CheckpointManager(ROOT) as manager:
        for step in range(3):
            future = await manager.save(step, tree(step))
            assert future is not None
            await future

    asked = [each for each in requests(server) if REPORTS in each]
    assert 1 <= len(asked) <= 5, asked  # one or two writes, and what is there is read once


async def test_the_items_of_a_step_are_read_from_one_list(server: ObjectServer) -> None:
    items = penstock.Composite(one=tree(1), two=tree(2), three=tree(3))
    async with CheckpointManager(ROOT, config=QUIET) as manager:
        future = await manager.save(1, items)
        assert future is not None
        await future
        requests(server)
        found = await manager.restore(1)
        assert found["three"]["b"][0] == 3

    asked = requests(server)
    assert asked.count("GET run/1/") == 1
    marks = asked.count(f"GET run/1/{MARK}")
    assert marks <= 5, "each item compares the identity, if anything was asked for it"
    assert len(asked) - marks == len(set(asked)) - 1, "nothing else is asked twice"


async def test_where_lists_have_other_tags_a_restore_is_as_right(server: ObjectServer) -> None:
    """Some servers say other tags in lists than elsewhere: then the mark is read before and after."""
    server.after = lambda asked, content: (
        content.replace(b"<ETag>", b"<ETag>other") if "list-type" in asked.query else content
    )
    await save()
    requests(server)
    assert (await penstock.restore(PATH))["b"][0] == 1
    assert len(requests(server)) <= 16


@asynccontextmanager
async def job(count: int) -> AsyncGenerator[list[Checkpointer]]:
    service = MemoryKeyValues()
    async with AsyncExitStack() as ends:
        yield [
            await ends.enter_async_context(
                Checkpointer(coordinator=JobCoordinator(service, index, count, LIMITS))
            )
            for index in range(count)
        ]


async def each(do: Callable[[Checkpointer], Awaitable[Any]], processes: Sequence[Checkpointer]) -> list[Any]:
    found: list[Any] = [None] * len(processes)

    async def one(index: int) -> None:
        found[index] = await do(processes[index])

    async with create_task_group() as tasks:
        for index in range(len(processes)):
            tasks.start_soon(one, index)

    return found


@pytest.mark.parametrize("count", [2, 3, 4])
async def test_documents_are_read_by_one_process_of_a_job(server: ObjectServer, count: int) -> None:
    await save()
    async with job(count) as processes:
        for expected in (8 + count - 1, count):
            requests(server)
            found = await each(lambda one: one.restore(PATH), processes)
            assert [value["b"][0] for value in found] == [1] * count
            asked = requests(server)
            assert len(asked) == expected, asked
            assert asked.count(f"GET run/x/{MARK}") == count, "each compares the identity"


async def test_a_process_that_restores_alone_waits_for_nobody(server: ObjectServer) -> None:
    await save()
    async with job(3) as processes:
        for _ in range(4):
            assert (await processes[1].restore(PATH))["b"][0] == 1

        assert (await processes[0].restore(PATH))["b"][0] == 1


async def test_what_another_process_read_before_it_was_replaced_is_not_used(server: ObjectServer) -> None:
    await save()
    async with job(2) as processes:
        await processes[0].restore(PATH)
        await save(step=2, overwrite="delete-first")
        found = await processes[1].restore(PATH)
        assert (found["b"][0], found["a"][1]) == (2, 2.0)


async def test_if_the_process_that_reads_fails_the_others_read_themselves(server: ObjectServer) -> None:
    await save()
    denied: list[str] = []

    def before(asked: Asked) -> int | None:
        if "list-type" in asked.query and not denied:
            denied.append("")
            return 403

        return None

    server.before = before
    async with job(3) as processes:
        found = await each(lambda one: one.restore(PATH), processes)
        assert [value["b"][0] for value in found] == [1] * 3

    assert denied


async def test_a_coordinator_without_shared_reads_will_do(server: ObjectServer) -> None:
    await save()
    async with Checkpointer(coordinator=SingleProcessCoordinator()) as one:
        assert (await one.restore(PATH))["b"][0] == 1
