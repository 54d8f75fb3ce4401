"""The directory of steps: that it is what the manager leaves, and that all who open it say the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.bench.contenders.managers import Answer, everybody
from tests.bench.results import Operation
from tests.bench.steps import EVERY, WrongStepsError, best_of, check, make_root, measure_steps
from tests.bench.workloads import BY_NAME

import penstock

STEPS = BY_NAME["steps"]
N = 30


async def test_any_step_can_be_restored_with_its_metrics(tmp_path: Path) -> None:
    await make_root(tmp_path / "root", N)

    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    async with penstock.CheckpointManager(tmp_path / "root", metric="loss") as manager:
        assert list(manager.all_steps()) == list(range(0, EVERY * N, EVERY))
        assert await manager.best_step() == best_of(N) > 0
        for step in (0, EVERY, EVERY * (N - 1)):
            restored = await manager.restore(step)
            np.testing.assert_array_equal(restored["weights"], np.arange(8, dtype=np.float32))
            metrics = (await manager.metadata(step)).metrics
            assert (metrics is not None) is (step % (2 * EVERY) == 0)


@pytest.mark.timeout(120)
async def test_all_contenders_give_the_right_answers(tmp_path: Path) -> None:
    results = await measure_steps(STEPS, N, 1, tmp_path, everybody())

    assert results.notes == []
    wanted = ("penstock", "raw scandir", "Orbax")
    assert {(s.contender, s.operation) for s in results.samples} == {
        (who, what) for who in wanted for what in STEPS.operations
    }


@pytest.mark.parametrize(
    ("operation", "right", "wrong"),
    [
        (Operation.LATEST, EVERY, 0),
        (Operation.ALL_STEPS, (0, EVERY), [0]),
        (Operation.BEST, best_of(2), EVERY),
        (Operation.OPEN, None, 0),
    ],
)
def test_a_wrong_answer_is_none(operation: Operation, right: object, wrong: object) -> None:
    check(right, operation, 2)
    with pytest.raises(WrongStepsError):
        check(wrong, operation, 2)


async def test_a_contender_with_a_wrong_answer_has_no_figures(tmp_path: Path) -> None:
    class Wrong:
        label = "wrong"

        async def look(self, root: Path) -> list[Answer]:
            return [Answer(Operation.LATEST, 0.1, EVERY * 3 if root.name == "few" else 7)]

        async def find_best(self, root: Path) -> list[Answer]:
            return []

    results = await measure_steps(STEPS, N, 2, tmp_path, [Wrong()])

    assert results.samples == []
    (note,) = results.notes
    assert note.failed
    assert "latest_step said 7, and not 290" in note.text
