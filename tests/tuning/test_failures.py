"""Intervals from failures: the formulas, and the simulation against closed forms and against a plain one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from penstock.errors import SpecError
from penstock.failures import (
    ASSUMED,
    Failures,
    Intervals,
    TierCosts,
    costs_of_run,
    daly_interval,
    in_steps,
    plan_intervals,
    simulate,
    step_seconds,
    tier_tables,
)
from penstock.reports.kept_reports import Kept, KeptEvent, KeptReport

ALL = frozenset({"process", "host", "hosts", "site"})
ONE = {"site": 1.0}


def tiers(names: str, *, apart: bool = False) -> list[TierCosts]:
    found = [ASSUMED[name] for name in names.split()]
    return [replace(tier, with_nearer=False) for tier in found] if apart else found


def closed_form(interval: float, tier: TierCosts, failures: Failures) -> float:
    """The useful share with one tier: Daly's, equations 9 to 13, with a step that counts when it is copied.

    Between failures, e^-late / (e^period - 1) steps come to the tier on average, in units of the mean.
    """
    mean = failures.mean_s
    down = failures.restart_s + tier.restore_s
    late = max(tier.copy_s - tier.save_s, 0.0)
    steps = math.exp(-late / mean) / math.expm1((interval + tier.save_s) / mean)
    if failures.while_restarting:
        return math.exp(-down / mean) * steps * interval / mean

    return steps * interval / (mean + down)


@pytest.mark.parametrize("while_restarting", [True, False])
@pytest.mark.parametrize("copy_s", [20.0, 90.0])
@pytest.mark.parametrize("interval", [60.0, 250.0, 1200.0])
def test_with_one_tier_the_simulation_is_within_its_error_of_dalys_closed_form(
    interval: float, copy_s: float, while_restarting: bool
) -> None:
    failures = Failures(mean_s=2000.0, shares=ONE, while_restarting=while_restarting)
    tier = TierCosts("root", 20.0, min(copy_s, max(interval, 20.0)), 200.0, ALL)

    found = simulate([tier], {"root": interval}, failures, n_failures=400, n_runs=40)

    assert found.useful == pytest.approx(closed_form(interval, tier, failures), abs=4 * found.error)
    assert found.error < 0.01
    assert found.useful + found.saving + found.lost + found.restarting == pytest.approx(1)


@pytest.mark.parametrize(("save_s", "mean_s"), [(2.0, 2274.0), (0.1, 3031.0), (60.0, 900.0), (500.0, 2000.0)])
def test_dalys_interval_is_the_best_of_the_closed_form(save_s: float, mean_s: float) -> None:
    failures, tier = Failures(mean_s=mean_s, shares=ONE), TierCosts("root", save_s, save_s, 100.0, ALL)
    best = max(
        (n * mean_s / 4000 for n in range(1, 16000)), key=lambda each: closed_form(each, tier, failures)
    )

    assert daly_interval(save_s, mean_s) == pytest.approx(best, rel=0.05)


def test_a_save_that_takes_longer_than_two_failures_are_apart_is_made_once_between_them() -> None:
    assert daly_interval(500.0, 200.0) == 200.0


def test_the_published_case() -> None:
    failures = replace(Failures.of_hosts(10_000), while_restarting=False)
    shares = {}
    for names in ("root", "disk root", "memory root", "memory peers root"):
        of = tiers(names, apart=True)
        shares[names] = round(100 * simulate(of, plan_intervals(of, failures), failures).useful)

    assert shares == {"root": 69, "disk root": 85, "memory root": 86, "memory peers root": 92}
    plan = plan_intervals(tiers("memory peers root", apart=True), failures)
    assert {name: round(each) for name, each in plan.items()} == {"memory": 25, "peers": 77, "root": 673}


def plain_simulation(
    of: Sequence[TierCosts], intervals: Intervals, failures: Failures, random: Random, n_failures: int
) -> tuple[float, float, float, float]:
    """The same job, event by event: useful, lost, saving, restarting seconds."""
    newest = {tier.name: -1.0 for tier in of} | {of[-1].name: 0.0}
    work = down = useful = lost = saving = restarting = 0.0
    for _ in range(n_failures):
        left = random.expovariate(1 / failures.mean_s)
        draw, kind = random.random(), ""
        for each, share in failures.shares.items():
            kind = kind or (each if draw < share else "")
            draw -= share

        restarting += min(left, down)
        left -= down
        now, at, counts = 0.0, work, list[tuple[float, float, str]]()  # when, which work, where
        for further, tier in enumerate(of):
            if newest[tier.name] < work and work in [newest[near.name] for near in of[:further]]:
                counts.append((tier.copy_s, work, tier.name))

        while left > now:
            every = {
                tier: intervals[tier.name] * max(1, math.ceil(tier.copy_s / intervals[tier.name]))
                for tier in of
            }
            due = min((math.floor(at / each + 1e-9) + 1) * each for each in every.values())
            if now + due - at > left:
                at, now = at + left - now, left
                break

            now, at = now + due - at, due
            saved = [tier for tier, each in every.items() if abs(round(due / each) * each - due) < 1e-6]
            for tier in saved:
                counts.append((now + max(tier.copy_s, tier.save_s), due, tier.name))

            pause = min(sum(tier.save_s for tier in saved), left - now)
            now, saving = now + pause, saving + pause

        for when, what, name in counts:
            if when <= left:
                newest[name] = max(newest[name], what)

        for tier in of:
            if kind not in tier.survives:
                newest[tier.name] = -1.0

        back = max(newest.values())
        source = next(tier for tier in of if newest[tier.name] == back)
        useful, lost, work = useful + back - work, lost + at - back, back
        down = failures.restart_s + source.restore_s

    return useful, lost, saving, restarting


@pytest.mark.parametrize("names", ["memory peers root", "memory disk root", "disk root"])
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_counting_saves_between_failures_is_the_same_as_going_from_event_to_event(
    names: str, scale: float
) -> None:
    failures, of = Failures(mean_s=700.0), tiers(names, apart=True)
    intervals = {"memory": 16.0 * scale, "disk": 30.0 * scale, "peers": 48.0 * scale, "root": 352.0 * scale}

    found = simulate(of, intervals, failures, n_failures=60, n_runs=2, seed=3)

    wholes = [plain_simulation(of, intervals, failures, Random(f"3/{run}"), 60) for run in range(2)]
    useful, lost, saving, restarting = map(sum, zip(*wholes, strict=True))
    total = useful + lost + saving + restarting
    shares = (found.useful, found.lost, found.saving, found.restarting)
    assert shares == pytest.approx(
        (useful / total, lost / total, saving / total, restarting / total), abs=1e-3
    )


def test_a_seed_gives_the_same_figures_and_another_one_others() -> None:
    failures, of = Failures.of_hosts(10_000), tiers("memory root")
    plan = plan_intervals(of, failures)
    once, again, other = (simulate(of, plan, failures, n_failures=20, seed=seed) for seed in (7, 7, 8))

    assert once == again != other


@pytest.mark.parametrize("n_hosts", [1000, 10_000])
def test_neither_half_nor_twice_the_planned_intervals_is_better_beyond_error(n_hosts: int) -> None:
    failures, of = Failures.of_hosts(n_hosts), tiers("memory peers root", apart=True)
    plan = plan_intervals(of, failures)
    found = simulate(of, plan, failures)
    for name in plan:
        for factor in (0.5, 2.0):
            other = simulate(of, {**plan, name: plan[name] * factor}, failures)
            gain, error = other.gain_over(found)
            assert gain < 2 * error, (name, factor)


def test_a_difference_of_two_simulations_has_less_error_than_each_of_them() -> None:
    failures, of = Failures.of_hosts(10_000), tiers("memory root")
    plan = plan_intervals(of, failures)
    found = simulate(of, plan, failures)
    other = simulate(of, {**plan, "memory": 2 * plan["memory"]}, failures)

    gain, error = other.gain_over(found)
    assert gain == pytest.approx(other.useful - found.useful, abs=1e-3)
    assert error < found.error / 2


def test_a_tier_is_planned_by_the_failures_that_no_nearer_one_survives() -> None:
    failures = Failures(mean_s=1000.0, shares={"process": 0.8, "host": 0.2})
    near = TierCosts("memory", 0.1, 0.1, 1.0, frozenset({"process"}))
    far = TierCosts("root", 1.0, 1.0, 1.0, ALL)

    plan = plan_intervals([near, far], failures)

    assert plan["memory"] == daly_interval(0.1, 1000 / 0.8)
    assert plan["root"] == daly_interval(1.0, 1000 / 0.2)
    useless = replace(near, name="disk")
    assert plan_intervals([near, useless, far], failures)["disk"] == math.inf


def test_no_interval_is_below_the_time_of_a_copy() -> None:
    slow = replace(ASSUMED["root"], copy_s=4000.0)
    assert plan_intervals([slow], Failures.of_hosts(10_000))["root"] == 4000.0


def test_peers_have_the_interval_of_the_memory_that_they_are_sent_from() -> None:
    failures = Failures.of_hosts(10_000)
    plan = plan_intervals(tiers("memory peers root"), failures)

    assert plan["memory"] == plan["peers"] == daly_interval(0.1 + 0.3, failures.mean_s / 0.98)


def test_intervals_in_steps_are_multiples_of_the_nearer_ones() -> None:
    of = tiers("memory peers disk root")
    steps = in_steps(of, {"memory": 25.0, "peers": 25.0, "disk": math.inf, "root": 673.0}, 1.3)

    assert steps == {"memory": 19, "peers": 19, "root": 19 * 27}
    assert in_steps(of[:1], {"memory": 0.2}, 1.3) == {"memory": 1}


def test_no_number_of_steps_takes_less_than_a_copy() -> None:
    assert in_steps(tiers("memory root"), {"memory": 25.0, "root": 300.0}, 1.3) == {
        "memory": 19,
        "root": 19 * 13,
    }


def test_what_nothing_survives_is_an_error() -> None:
    with pytest.raises(SpecError, match="no step survives a failure of kind 'host'"):
        plan_intervals(tiers("memory"), Failures(mean_s=10.0))
    with pytest.raises(SpecError, match="no step survives"):
        simulate([], {}, Failures(mean_s=10.0))


@pytest.mark.parametrize(
    "wrong", [{"mean_s": 0.0}, {"mean_s": 1.0, "shares": {"host": 0.9}}, {"mean_s": 1.0, "restart_s": -1.0}]
)
def test_a_failure_rate_that_is_none_is_an_error(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        Failures(**wrong)  # type: ignore[arg-type]  # that is the test


def saved(
    name: str, at: float, *, tier: str = "memory", staged: float = 0.02, took: float = 0.3
) -> KeptReport:
    return KeptReport(name, at, took, tier=tier, staged_s=staged)


def test_reports_of_a_run_say_what_its_tiers_cost() -> None:
    reports = (
        *[saved(str(10 * n), 100.0 + 20 * n, staged=0.01 * n) for n in range(1, 6)],
        KeptReport("50", 400.0, 1.5, "restore", "memory"),
    )
    events = tuple(KeptEvent(1.0, "promoted", "10", "", "root", lag) for lag in (3.0, 4.0, None, 9.0))
    kept = Kept(reports, (*events, KeptEvent(1.0, "opened")))

    assert costs_of_run(kept) == {
        "memory": {"save_s": pytest.approx(0.03), "copy_s": 0.3, "restore_s": 1.5},
        "root": {"copy_s": 4.0},
    }


def test_the_time_of_a_step_is_that_between_saves() -> None:
    numbers = {str(n): n for n in range(100)}
    saves = [saved("0", 100.0), saved("10", 113.0), saved("20", 126.0), saved("5", 900.0), saved("x", 1.0)]

    assert step_seconds(saves, numbers) == pytest.approx(1.3)
    assert step_seconds(saves[:1], numbers) is None


def test_the_tables_name_what_a_configuration_has() -> None:
    text = tier_tables({"memory": 33, "peers": 33, "disk": 66, "root": 528}, {"disk": "/ssd/run"})

    assert text == (
        '[[tier]]\nkind = "memory"\npeers = 1\nsave_every = 33\n\n'
        '[[tier]]\npath = "/ssd/run"\nsave_every = 66'
    )
