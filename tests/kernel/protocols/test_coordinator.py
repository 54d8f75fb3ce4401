from __future__ import annotations

import pytest

from penstock.kernel import Coordinator, SingleProcessCoordinator


@pytest.fixture
def coordinator() -> Coordinator:
    return SingleProcessCoordinator()


def test_one_process_is_the_first_the_primary_and_all_there_are(coordinator: Coordinator) -> None:
    assert coordinator.process_index == 0
    assert coordinator.processes == (0,)
    assert coordinator.is_primary


def test_one_process_agrees_with_nobody(coordinator: Coordinator) -> None:
    assert coordinator.operation("/run/step_1").is_alone
