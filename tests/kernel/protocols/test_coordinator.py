from __future__ import annotations

import pytest
from anyio import CancelScope

from penstock.kernel.protocols.coordinator import Coordinator, SingleProcessCoordinator

pytestmark = pytest.mark.anyio


@pytest.fixture
def coordinator() -> Coordinator:
    return SingleProcessCoordinator()


def test_one_process_is_the_first_the_primary_and_all_there_are(coordinator: Coordinator) -> None:
    assert coordinator.process_index == 0
    assert coordinator.process_count == 1
    assert coordinator.is_primary


async def test_a_barrier_is_passed_at_once_any_number_of_times(coordinator: Coordinator) -> None:
    for _ in range(2):
        await coordinator.barrier("commit", 0.0)


async def test_a_barrier_can_be_cancelled(coordinator: Coordinator) -> None:
    with CancelScope() as scope:
        scope.cancel()
        await coordinator.barrier("commit", 1.0)

    assert scope.cancelled_caught
