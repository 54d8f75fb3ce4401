from __future__ import annotations

from pathlib import Path
from typing import final

import jax.numpy as jnp
import pytest
from tests.bench.beside import Training
from tests.bench.measures import UNDISTURBED, cpu_share, interval, slow_down_percent, slow_downs, speed_of_raw
from tests.bench.results import Operation, Results, Sample
from tests.bench.trees import State

BESIDE, SAVE = Operation.BESIDE_1, Operation.SAVE


@final
class NotedSaver:
    """Writes down what it is asked."""

    label = "noted"

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def begin(self, path: Path, state: State) -> None:
        path.mkdir()
        self.asked.append(path.name)

    async def finish(self) -> None:
        self.asked.append("finish")


@pytest.mark.anyio
async def test_a_save_is_begun_whenever_one_is_due_and_each_is_waited_for(tmp_path: Path) -> None:
    saver = NotedSaver()
    training = Training(State({"a": jnp.zeros(3)}), tmp_path)

    seconds, cpu_s = await training.train(2, saver, 0.0)

    assert saver.asked == ["finish", "step_1", "finish", "step_2", "finish"]
    assert seconds > 0 < cpu_s
    assert list(tmp_path.iterdir()) == []


@pytest.mark.anyio
async def test_without_a_saver_nothing_is_saved_and_an_interval_that_never_ends_begins_none(
    tmp_path: Path,
) -> None:
    saver = NotedSaver()
    training = Training(State({"a": jnp.zeros(3)}), tmp_path)

    await training.train(1, None, 0.0)
    await training.train(1, saver, float("inf"))

    assert saver.asked == ["finish"]


def results_of(**seconds: list[float]) -> Results:
    labels = {"ours": "penstock", "alone": UNDISTURBED, "raw": "raw O_DIRECT, crc32c"}
    return Results(
        samples=[
            Sample("w", labels[who], operation, at, taken, cpu_s=taken * 2)
            for who, found in seconds.items()
            for operation in (BESIDE, SAVE)
            for at, taken in enumerate(found)
        ]
    )


def test_a_slow_down_is_that_of_each_pair() -> None:
    results = results_of(ours=[11.0, 30.0, 4.0], alone=[10.0, 20.0, 5.0])

    assert slow_downs(results, "w", BESIDE, "penstock") == pytest.approx([0.1, 0.5, -0.2])
    assert slow_down_percent("w", BESIDE)(results) == pytest.approx(10)
    assert slow_down_percent("w", BESIDE)(Results()) is None


def test_processor_seconds_are_compared_with_those_of_another() -> None:
    assert cpu_share("w", SAVE, "raw O_DIRECT, crc32c")(results_of(ours=[3.0], raw=[2.0])) == 1.5
    assert cpu_share("w", SAVE, "raw O_DIRECT, crc32c")(results_of(ours=[3.0])) is None


def test_a_restore_into_jax_is_compared_with_raw_reads_into_numpy() -> None:
    results = Results(
        samples=[
            Sample("w", "raw buffered", Operation.RESTORE_NUMPY, 0, 9.0),
            Sample("w", "penstock", Operation.RESTORE_JAX, 0, 10.0),
            Sample("w", "penstock, one-shot", Operation.RESTORE_JAX, 0, 18.0),
        ]
    )

    assert speed_of_raw("w")(results) == 0.9
    assert speed_of_raw("w", "penstock, one-shot")(results) == 0.5


@pytest.mark.parametrize(
    ("n", "bounds"),
    [(5, None), (6, (0, 5)), (9, (1, 7)), (20, (5, 14))],  # the ranks in every table of the sign test
)
def test_the_interval_of_a_median_goes_from_rank_to_rank(n: int, bounds: tuple[int, int] | None) -> None:
    assert interval([float(value) for value in reversed(range(n))]) == bounds
