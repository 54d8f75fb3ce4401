"""jax.distributed's coordination service, the real one, with several clients in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import pytest
from anyio import create_task_group
from tests.key_values_conformance import KeyValuesConformance
from tests.real_service import real_service

from penstock.errors import CoordinationError, PeerFailedError, StorageError
from penstock.handlers.coordinators.jax_key_values import JaxKeyValues
from penstock.handlers.coordinators.job_coordinator import JobCoordinator
from penstock.handlers.coordinators.joint_operation import JointOperation
from penstock.kernel.protocols import KeyValues


class TestConformance(KeyValuesConformance):
    """What every service must do."""

    @pytest.fixture(autouse=True)
    def _stack(self) -> Generator[None]:
        with contextlib.ExitStack() as self._services:
            yield

    def make_views(self, count: int) -> list[KeyValues]:
        return [*self._services.enter_context(real_service(count))]


async def test_processes_agree_by_it_and_learn_who_failed() -> None:
    errors: dict[int, Exception] = {}

    async def go_on(operation: JointOperation, index: int) -> None:
        if index == 0:
            await operation.begin("place")
            assert await operation.parts() == {1: b"\1", 2: b"\2"}
            await operation.decide()
            await operation.tell_published()
        else:
            assert await operation.wait_begun(b"plan", list) == ("place", b"")
            await operation.bring(bytes([index]))
            await operation.wait_published()

    def fail(fails: bool) -> None:
        if fails:
            raise StorageError("write", "/run/2", "Input/output error")

    with real_service(3) as views:
        jobs = [JobCoordinator(view, index, 3) for index, view in enumerate(views)]

        async def take_part(index: int, path: str, fails: bool) -> None:
            operation = jobs[index].operation(path)
            assert isinstance(operation, JointOperation)
            try:
                async with operation.running():
                    await operation.compare(b"plan", list)
                    fail(fails and index == 2)
                    await go_on(operation, index)
            except Exception as error:
                errors[index] = error

        for path, fails in (("/run/1", False), ("/run/2", True)):
            async with create_task_group() as tasks:
                for index in range(3):
                    tasks.start_soon(take_part, index, path, fails)
            if not fails:
                assert errors == {}

        left = views[0].under("penstock/")

    assert isinstance(errors.pop(2), StorageError)
    assert [type(error) for error in errors.values()] == [PeerFailedError, PeerFailedError]
    assert len(left) <= 4


def test_without_jax_distributed_the_error_says_what_to_call() -> None:
    with pytest.raises(CoordinationError, match=r"call jax\.distributed\.initialize"):
        JaxKeyValues()


def test_a_client_without_what_is_needed_is_refused_by_name() -> None:
    with pytest.raises(CoordinationError, match="has no blocking_key_value_get_bytes, key_value_delete"):
        JaxKeyValues(object())


class BrokenClient:
    """A client whose service is gone."""

    def __getattr__(self, name: str) -> object:
        def call(*_: object, **__: object) -> None:
            raise RuntimeError("UNAVAILABLE: failed to connect to all addresses")

        return call


@pytest.mark.parametrize("call", ["put", "wait", "under", "count", "delete"])
def test_a_service_that_is_gone_is_an_error_of_penstock(call: str) -> None:
    view = JaxKeyValues(BrokenClient())
    arguments = {"put": ("a", b"x", False), "wait": ("a", 1.0)}.get(call, ("a",))
    with pytest.raises(CoordinationError, match=r"UNAVAILABLE.*process 0 of the job, which has ended"):
        getattr(view, call)(*arguments)
