"""The bars, held against made-up results."""

from __future__ import annotations

import pytest
from tests.bench import measures
from tests.bench.bars import BARS, judge
from tests.bench.results import IDLE, Memory, Operation, Results, Sample, Size, Stall

SAVE, INTO_JAX = Operation.SAVE, Operation.RESTORE_JAX


def timed(who: str, *seconds: float, work: str = "large", what: str = SAVE, **more: float) -> list[Sample]:
    return [Sample(work, who, what, at, taken, **more) for at, taken in enumerate(seconds)]  # type: ignore[arg-type]


def results_of(*samples: list[Sample]) -> Results:
    return Results(samples=[sample for group in samples for sample in group])


def test_a_bar_without_figures_is_neither_passed_nor_missed() -> None:
    assert {verdict.verdict for verdict in judge(Results())} == {"not measured"}


def test_half_the_time_is_twice_as_fast_and_medians_count() -> None:
    results = results_of(timed("penstock", 1, 1, 50), timed("Orbax", 2, 2, 0.1))

    assert measures.times_as_fast("large", SAVE, "Orbax")(results) == 2


def test_the_fastest_of_the_others_counts() -> None:
    results = results_of(timed("penstock", 4), timed("raw buffered", 6), timed("raw O_DIRECT", 2))

    assert measures.times_as_fast("large", SAVE, "raw buffered", "raw O_DIRECT")(results) == 0.5
    assert measures.times_as_fast("large", SAVE, "raw buffered", "absent")(results) == 1.5


def test_figures_of_other_workloads_and_operations_do_not_count_for_a_bar() -> None:
    elsewhere = timed("Orbax", 2, work="small") + timed("Orbax", 2, what=INTO_JAX)

    assert measures.times_as_fast("large", SAVE, "Orbax")(results_of(timed("penstock", 1), elsewhere)) is None


def test_times_its_time_is_the_ratio_of_times() -> None:
    results = results_of(timed("penstock", 3), timed("safetensors", 2))

    assert measures.times_its_time("large", SAVE, "safetensors")(results) == 1.5


def test_staged_is_compared_with_the_blocking_of_the_asynchronous_save() -> None:
    blocked = timed("Orbax async", 9, staged_s=2.0)

    assert measures.staged_share("large")(results_of(timed("penstock", 5, staged_s=0.5), blocked)) == 0.25
    assert measures.staged_share("large")(results_of(timed("penstock", 5, staged_s=0.5))) is None


def test_the_slowest_is_compared_with_the_median() -> None:
    results = results_of(timed("penstock", 1, 2, 5, what=Operation.STEADY))

    assert measures.slowest_to_median("large", Operation.STEADY)(results) == 2.5


def test_growth_is_by_leaf() -> None:
    results = results_of(timed("penstock", 24, work="many"), timed("penstock", 2, work="small"))
    results.sizes = [Size("many", "", 100, 1), Size("small", "", 10, 1)]

    assert measures.per_leaf_growth("many", "small", SAVE)(results) == pytest.approx(1.2)


def test_pairs_are_of_one_round() -> None:
    results = results_of(timed("penstock", 1, 4, 10), timed("safetensors", 2, 4, 5))

    assert measures.pairs_as_fast("large", SAVE, "safetensors")(results) == 1
    assert measures.pairs_as_fast("large", SAVE, "absent")(results) is None


def test_the_face_is_compared_with_the_call_behind_it() -> None:
    results = results_of(timed("penstock", 2), timed("penstock.orbax", 3))

    assert measures.beside_its_own("large", SAVE, "penstock.orbax")(results) == 1.5


def test_figures_that_are_no_ratio_are_measured() -> None:
    results = results_of(timed("penstock", 2, staged_s=0.25))
    results.sizes = [Size("large", "", 4, 1000)]
    results.memory = [Memory("large", "penstock", SAVE, 50, 70, 9)]

    assert measures.microseconds_per_leaf("large", SAVE)(results) == 500_000
    assert measures.staged_ms("large")(results) == 250
    assert measures.memory_per_leaf("large", SAVE)(results) == 12.5
    assert measures.staged_ms("small")(results) is None


def test_memory_and_bytes_are_shares() -> None:
    results = results_of(
        timed("penstock", 1, nbytes_written=200),
        timed("penstock", 1, what=Operation.SECOND_SAVE, nbytes_written=10),
    )
    results.sizes = [Size("large", "", 1, 1000)]
    results.memory = [Memory("large", "penstock", SAVE, 50, 70, 9)]

    assert measures.memory_share("large", SAVE)(results) == 0.05
    assert measures.memory_share("large", INTO_JAX)(results) is None
    assert measures.written_share("large")(results) == 0.05


@pytest.mark.parametrize(("ours", "verdict"), [(0.4, "pass"), (0.41, "short")])
def test_a_bar_with_a_lower_bound(ours: float, verdict: str) -> None:
    bar = next(bar for bar in BARS if bar.text == "1 GiB saved: times Orbax's default")
    results = results_of(timed("penstock", ours), timed("Orbax", 1))

    found = next(found for found in judge(results) if found.text == bar.text)
    assert (found.verdict, found.wanted) == (verdict, "at least 2.5")


@pytest.mark.parametrize(("ours", "verdict"), [(2.0, "pass"), (2.1, "short")])
def test_a_bar_with_an_upper_bound(ours: float, verdict: str) -> None:
    results = results_of(timed("penstock", ours, work="small"), timed("safetensors", 1, work="small"))

    found = next(
        found for found in judge(results) if found.text.startswith("10,000 leaves saved: time / safet")
    )
    assert (found.verdict, found.wanted) == (verdict, "at most 2")


@pytest.mark.parametrize(
    ("idle_s", "stalled_s", "verdict"),
    [(0.001, 0.010, "pass"), (0.001, 0.011, "short"), (0.02, 0.019, "pass"), (0.02, 0.021, "short")],
)
def test_a_stall_counts_from_10_ms_or_from_the_noise_floor(
    idle_s: float, stalled_s: float, verdict: str
) -> None:
    results = Results(
        stalls=[
            Stall("small", "penstock", IDLE, idle_s, "trio"),
            Stall("small", "penstock", IDLE, 0.5, "asyncio"),
            Stall("small", "penstock", SAVE, 0.001, "trio"),
            Stall("small", "penstock", INTO_JAX, stalled_s, "trio"),
            Stall("small", "Orbax", INTO_JAX, 9.0, "trio"),
        ]
    )

    (found,) = [one for one in judge(results) if one.text.startswith("10,000 leaves: longest stall of trio")]
    assert (found.verdict, found.wanted, found.measured) == (verdict, "at most 10", stalled_s * 1e3)
    assert found.note == f"noise floor {idle_s * 1e3:g}"


def test_every_bar_has_a_text_of_its_own() -> None:
    assert len({bar.text for bar in BARS}) == len(BARS)


def test_what_two_libraries_left_is_compared() -> None:
    results = results_of(timed("Orbax", 1, nbytes_written=200), timed("penstock", 1, nbytes_written=150))

    assert measures.stored_share("large", "penstock", "Orbax")(results) == 0.75
