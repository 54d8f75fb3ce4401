"""The policies against small models of what they promise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.steps import (
    Always,
    EverySeconds,
    EverySteps,
    FirstSave,
    KeepAll,
    KeepAllOf,
    KeepAnyOf,
    KeepBest,
    KeepEvery,
    KeepEverySeconds,
    KeepLast,
    KeepPolicy,
    KeepRecent,
    KeepSteps,
    Never,
    OnPreemption,
    OnSteps,
    SaveAllOf,
    SaveAnyOf,
    SaveMoment,
    SavePolicy,
    StepInfo,
    WhenIdle,
)
from penstock.steps.keep_policies import Mode, best_of, ranking_of, steps_to_delete
from penstock.steps.save_policies import awaits_preemption

numbers = st.integers(0, 60)
metric_values = st.one_of(st.none(), st.floats(), st.floats(-3, 3), st.sampled_from([0.0, 1.0, math.nan]))


@st.composite
def infos(draw: st.DrawFn) -> list[StepInfo]:
    steps = sorted(draw(st.sets(numbers, max_size=20)))
    times = sorted(draw(st.lists(st.integers(0, 1000), min_size=len(steps), max_size=len(steps))))
    found: list[StepInfo] = []
    for step, time_s in zip(steps, times, strict=True):
        value = draw(metric_values)
        kind = draw(st.sampled_from(["none", "other", "has"]))
        metrics: Any = {"none": None, "other": {"speed": 1.0}, "has": {"loss": value}}[kind]
        found.append(StepInfo(step, float(time_s), metrics))

    return found


moments = st.builds(
    SaveMoment,
    step=numbers,
    now_s=st.integers(0, 100).map(float),
    steps=st.sets(numbers, max_size=5).map(sorted),
    saved_s=st.integers(0, 100).map(float),
    saving=st.booleans(),
    preempted=st.booleans(),
)
save_policies: st.SearchStrategy[SavePolicy] = st.recursive(
    st.one_of(
        st.just(Always()),
        st.just(Never()),
        st.builds(EverySteps, st.integers(1, 7)),
        st.builds(EverySeconds, st.integers(1, 50)),
        st.builds(OnSteps, st.frozensets(numbers)),
        st.just(FirstSave()),
        st.just(OnPreemption()),
        st.builds(WhenIdle, st.integers(0, 50)),
    ),
    lambda inner: st.one_of(
        st.builds(SaveAnyOf, st.lists(inner, max_size=3)), st.builds(SaveAllOf, st.lists(inner, max_size=3))
    ),
    max_leaves=6,
)
modes: st.SearchStrategy[Mode] = st.sampled_from(["min", "max"])
keep_policies: st.SearchStrategy[KeepPolicy] = st.recursive(
    st.one_of(
        st.just(KeepAll()),
        st.builds(KeepLast, st.integers(0, 5)),
        st.builds(KeepEvery, st.integers(1, 9)),
        st.builds(KeepEverySeconds, st.integers(1, 300)),
        st.builds(KeepRecent, st.integers(0, 500)),
        st.builds(KeepSteps, st.frozensets(numbers)),
        st.builds(KeepBest, st.integers(0, 4), st.just("loss"), modes, st.booleans()),
    ),
    lambda inner: st.one_of(
        st.builds(KeepAnyOf, st.lists(inner, max_size=3)), st.builds(KeepAllOf, st.lists(inner, max_size=3))
    ),
    max_leaves=6,
)


def model_should_save(policy: SavePolicy, at: SaveMoment) -> bool:
    match policy:
        case SaveAnyOf(parts):
            return True in [model_should_save(part, at) for part in parts]
        case SaveAllOf(parts):
            return False not in [model_should_save(part, at) for part in parts]
        case Always():
            return True
        case Never():
            return False
        case EverySteps(n):
            return at.step in range(0, 1000, n)
        case EverySeconds(seconds):
            return at.now_s >= at.saved_s + seconds
        case OnSteps(steps):
            return at.step in set(steps)
        case FirstSave():
            return len(at.steps) == 0
        case OnPreemption():
            return at.preempted
        case WhenIdle(seconds):
            return not at.saving and (len(at.steps) == 0 or at.now_s >= at.saved_s + seconds)
        case _:
            raise AssertionError(policy)


def finite(info: StepInfo) -> bool:
    value = loss(info)
    return value is not None and math.isfinite(value)


def loss(info: StepInfo) -> float | None:
    return (info.metrics or {}).get("loss")


def model_keep(policy: KeepPolicy, steps: Sequence[StepInfo], now_s: float) -> set[int]:
    match policy:
        case KeepAnyOf(parts):
            return {step for part in parts for step in model_keep(part, steps, now_s)}
        case KeepAllOf(parts):
            return {i.step for i in steps if all(i.step in model_keep(part, steps, now_s) for part in parts)}
        case KeepAll():
            return {info.step for info in steps}
        case KeepLast(n):
            return {info.step for info in steps if sum(other.step > info.step for other in steps) < n}
        case KeepEvery(n):
            return {info.step for info in steps if info.step / n == info.step // n}
        case KeepSteps(pins):
            return {info.step for info in steps} & set(pins)
        case KeepRecent(seconds):
            return {info.step for info in steps if info.time_s >= now_s - seconds}
        case KeepEverySeconds(seconds):
            kept: list[StepInfo] = []
            for info in steps:
                if not kept or info.time_s >= kept[-1].time_s + seconds:
                    kept.append(info)
            return {info.step for info in kept}
        case KeepBest(n, _, mode, without):
            missing = {info.step for info in steps if loss(info) is None}
            having = [info for info in steps if loss(info) is not None]
            best = {i.step for i in having if sum(better(other, i, mode) for other in having) < n}
            return best | (missing if without else set())
        case _:
            raise AssertionError(policy)


def better(one: StepInfo, than: StepInfo, mode: Mode) -> bool:
    if finite(one) != finite(than):
        return finite(one)
    if not finite(one) or loss(one) == loss(than):
        return one.step > than.step

    a, b = loss(one), loss(than)
    assert a is not None
    assert b is not None
    return a < b if mode == "min" else a > b


@given(save_policies, moments)
def test_save_policies_are_their_model(policy: SavePolicy, moment: SaveMoment) -> None:
    assert policy.should_save(moment) is model_should_save(policy, moment)


@given(keep_policies, infos(), st.integers(0, 1500).map(float))
def test_keep_policies_are_their_model(policy: KeepPolicy, steps: list[StepInfo], now_s: float) -> None:
    assert set(policy.keep(steps, now_s)) == model_keep(policy, steps, now_s)


@given(keep_policies, infos(), st.integers(0, 1500).map(float), st.frozensets(numbers))
def test_deleted_steps_are_neither_kept_nor_pinned_nor_the_last(
    policy: KeepPolicy, steps: list[StepInfo], now_s: float, pinned: frozenset[int]
) -> None:
    gone = steps_to_delete(policy, steps, now_s, pinned)

    assert gone == sorted(gone)
    stay = model_keep(policy, steps, now_s) | pinned | ({steps[-1].step} if steps else set())
    assert set(gone) == {info.step for info in steps} - stay


@given(keep_policies, infos(), st.integers(0, 1500).map(float))
def test_a_policy_says_what_it_needs(policy: KeepPolicy, steps: list[StepInfo], now_s: float) -> None:
    known = [
        StepInfo(
            info.step,
            info.time_s if "time" in policy.needs else math.nan,
            info.metrics if "metrics" in policy.needs else None,
        )
        for info in steps
    ]

    assert set(policy.keep(known, now_s)) == set(policy.keep(steps, now_s))


@given(infos(), modes)
def test_the_best_is_finite_and_nothing_is_better(steps: list[StepInfo], mode: Mode) -> None:
    best = best_of(steps, "loss", mode)

    having = [info for info in steps if finite(info)]
    assert (best is None) is (not having)
    if best is not None:
        (found,) = [info for info in having if info.step == best]
        assert not any(better(other, found, mode) for other in having)


def test_operators_combine() -> None:
    assert EverySteps(2) | OnPreemption() & Never() == SaveAnyOf(
        (EverySteps(2), SaveAllOf((OnPreemption(), Never())))
    )
    assert KeepLast(2) | KeepEvery(5) & KeepAll() == KeepAnyOf(
        (KeepLast(2), KeepAllOf((KeepEvery(5), KeepAll())))
    )


def test_an_interval_of_exactly_its_seconds_has_passed() -> None:
    assert EverySeconds(5).should_save(SaveMoment(step=1, now_s=15, saved_s=10))
    assert WhenIdle(5).should_save(SaveMoment(step=1, now_s=15, saved_s=10, steps=(0,)))
    assert list(KeepRecent(5).keep([StepInfo(1, 10)], 15)) == [1]
    assert list(KeepEverySeconds(5).keep([StepInfo(1, 10), StepInfo(2, 14), StepInfo(3, 15)], 20)) == [1, 3]


def test_metrics_may_be_nested_or_computed() -> None:
    steps = [StepInfo(1, 0, {"eval": {"loss": 3}}), StepInfo(2, 0, {"eval": {"loss": 2}, "eval/loss": 9})]

    assert best_of(steps, "eval/loss", "min") == 1
    assert best_of(steps, lambda metrics: metrics["eval"]["loss"], "min") == 2
    assert best_of(steps, "eval", "min") is None
    assert best_of([StepInfo(1, 0, {"loss": "low"})], "loss", "min") is None


def test_what_a_policy_ranks_by_is_found_in_it() -> None:
    assert ranking_of(KeepLast(1) | (KeepAll() & KeepBest(2, "acc", "max"))) == ("acc", "max")
    assert ranking_of(KeepLast(1) | KeepAll()) is None
    assert awaits_preemption(Always() | (OnPreemption() & FirstSave()))
    assert not awaits_preemption(Always() | FirstSave())


@pytest.mark.parametrize(
    "make",
    [
        lambda: EverySteps(0),
        lambda: EverySeconds(0),
        lambda: EverySeconds(math.nan),
        lambda: KeepLast(-1),
        lambda: KeepEvery(0),
        lambda: KeepEverySeconds(-1),
        lambda: KeepBest(-1, "loss"),
        lambda: KeepBest(1, "loss", "least"),  # type: ignore[arg-type]  # the point of the test
    ],
)
def test_impossible_arguments_of_policies_are_refused(make: Any) -> None:
    with pytest.raises(SpecError):
        make()
