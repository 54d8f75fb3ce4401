"""Failures of a job, what they cost it, and how often to save into each tier.

A failure costs the work since the newest step that survives it, and the time to start again. Saves cost
time, too. For one tier the interval with the least of both is Young's, in Daly's form. With several, each
tier is there for the failures that no nearer one survives, and its interval follows from those. `simulate`
counts what is lost with some intervals, without such a formula, and so says whether others would do better.
"""

from __future__ import annotations

__all__ = (
    "ASSUMED",
    "DAY_S",
    "PUBLISHED",
    "Failures",
    "Intervals",
    "JobTime",
    "TierCosts",
    "costs_of_run",
    "daly_interval",
    "in_steps",
    "plan_intervals",
    "simulate",
    "step_seconds",
    "tier_tables",
)

import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from random import Random
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Final, TypeAlias, final

from penstock.kernel.errors import SpecError

if TYPE_CHECKING:
    from penstock.reports.kept_reports import Kept, KeptReport

DAY_S: Final = 86_400.0

PUBLISHED: Final = 3.8
"""Failures of a thousand hosts in a day: Llama 3, 419 unexpected ones in 54 days of 2,048 hosts. Others have
published 2.3 and 6.5 (Meta's research clusters)."""

Intervals: TypeAlias = Mapping[str, float]
"""Seconds of training between two saves, by the names of tiers. `math.inf`: it is needed for no failure."""

_NEAR: Final = 1e-9  # of an interval: two moments of a training that are one


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """The rate at which a job fails, and the causes.

    Attributes:
        mean_s: Seconds from one failure to the next, on average. They come independently of each other.
        shares: Of all failures, by kind; their sum is 1.
        restart_s: Seconds to notice one, to replace what is broken, and to start all processes again.
        while_restarting: Whether hosts fail while the job restarts, too.

    Raises:
        SpecError: If a number does not fit.
    """

    mean_s: float
    shares: Mapping[str, float] = field(
        default_factory=lambda: {"process": 0.75, "host": 0.23, "hosts": 0.015, "site": 0.005}
    )
    """By default: 75 % of failures end processes (DLRover's figure), 23 % a host. That of the rest three
    quarters are of several neighbouring hosts, and a quarter of all, is assumed."""
    restart_s: float = 120.0
    while_restarting: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.mean_s < math.inf or not 0 <= self.restart_s < math.inf:
            raise SpecError(f"a time between failures is positive, not {self.mean_s!r}")
        if not self.shares or min(self.shares.values()) < 0 or abs(sum(self.shares.values()) - 1) > 1e-6:
            raise SpecError(f"the shares of the kinds of failures add up to 1, not {dict(self.shares)!r}")

    @classmethod
    def of_hosts(cls, n_hosts: int, per_1000_host_days: float = PUBLISHED) -> Failures:
        """Return the failures of a job on so many hosts, with everything else as published."""
        if n_hosts < 1 or not 0 < per_1000_host_days < math.inf:
            raise SpecError(f"{n_hosts!r} hosts with {per_1000_host_days!r} failures per 1,000 days of one")

        return cls(mean_s=DAY_S * 1000 / (n_hosts * per_1000_host_days))


@final
@dataclass(frozen=True, slots=True)
class TierCosts:
    """The time that a tier takes, and the failures that its steps survive.

    Attributes:
        name: As `memory`.
        save_s: Seconds of training that each save there costs.
        copy_s: Seconds from the beginning of a save until a failure leaves the step there.
        restore_s: Seconds to restore from there.
        survives: Kinds of failures.
        with_nearer: Whether each step of the tier before comes here at once, as to peers: then both have one
            interval.
    """

    name: str
    save_s: float
    copy_s: float
    restore_s: float
    survives: frozenset[str]
    with_nearer: bool = False


ASSUMED: Final[Mapping[str, TierCosts]] = {
    tier.name: tier
    for tier in (
        TierCosts("memory", 0.1, 0.5, 5.0, frozenset({"process"})),
        TierCosts("peers", 0.3, 10.0, 15.0, frozenset({"process", "host"}), with_nearer=True),
        TierCosts("disk", 0.2, 20.0, 30.0, frozenset({"process"})),  # a host that is replaced takes its disk
        TierCosts("root", 2.0, 300.0, 300.0, frozenset({"process", "host", "hosts", "site"})),
    )
}
"""Figures of a large job, where there are no measured ones, the nearest tier first; the root is a bucket."""


def daly_interval(save_s: float, mean_s: float) -> float:
    """Return the seconds of training between two saves that lose the least time.

    Args:
        save_s: That a save costs.
        mean_s: Between two failures.

    Source:
        J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006,
        equation 37. Its first term is Young's, 1974.
    """
    if save_s >= 2 * mean_s:
        return mean_s

    ratio = save_s / (2 * mean_s)
    return math.sqrt(2 * save_s * mean_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def plan_intervals(tiers: Sequence[TierCosts], failures: Failures) -> Intervals:
    """Return the interval of each tier: Daly's, from the failures that no nearer tier survives.

    It is never below the time that a copy takes, as a tier takes one step at a time.

    Args:
        tiers: The nearest first; the last one survives every failure.
        failures: Of the job.

    Raises:
        SpecError: If nothing survives some failure.
    """
    _check(tiers, failures)
    found: dict[str, float] = {}
    survived: frozenset[str] = frozenset()
    for group in _groups(tiers):
        kinds = frozenset[str]().union(*[tier.survives for tier in group]) - survived
        share = sum([failures.shares.get(kind, 0.0) for kind in kinds])
        cost, copy = sum([tier.save_s for tier in group]), max([tier.copy_s for tier in group])
        best = max(copy, daly_interval(cost, failures.mean_s / share)) if share else math.inf
        found |= dict.fromkeys([tier.name for tier in group], best)
        survived |= kinds

    return found


def in_steps(tiers: Sequence[TierCosts], intervals: Intervals, step_s: float) -> Mapping[str, int]:
    """Return intervals as numbers of steps, for `save_every`.

    Each is a multiple of the one before. So a step that goes to a far tier is in all nearer ones, too, and
    the training waits for the nearest alone. None is below the time of a copy. A tier that is not needed is
    left out.

    Args:
        tiers: The nearest first.
        intervals: Of each.
        step_s: Seconds that a step of the training takes.

    Raises:
        SpecError: If a step takes no time.
    """
    if not 0 < step_s < math.inf:
        raise SpecError(f"a step of the training takes more than {step_s!r} s")

    found: dict[str, int] = {}
    before = 1
    for group in _groups(tiers):
        seconds = intervals[group[0].name]
        if seconds < math.inf:
            unit = before * step_s
            least = math.ceil(max([tier.copy_s for tier in group]) / unit - _NEAR)
            before *= max(round(seconds / unit), least, 1)
            found |= dict.fromkeys([tier.name for tier in group], before)

    return found


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """The use of a job's time, in shares of it that add up to 1.

    Attributes:
        useful: Training that was not lost.
        saving: Training that stood still for saves.
        lost: Training that was done again.
        lost_from: The part of `lost` after which each tier was restored from.
        restarting: Everything until the training went on.
        runs: What `useful` was in each run of the simulation.
    """

    useful: float
    saving: float
    lost: float
    lost_from: Mapping[str, float]
    restarting: float
    runs: Sequence[float]

    @property
    def error(self) -> float:
        """The standard error of `useful`."""
        return stdev(self.runs) / math.sqrt(len(self.runs))

    def gain_over(self, other: JobTime) -> tuple[float, float]:
        """Return how much more is useful than in another simulation with this seed, and the standard error.

        Both have the same failures, so the difference has less chance in it than either has alone.
        """
        more = [mine - its for mine, its in zip(self.runs, other.runs, strict=True)]
        return fmean(more), stdev(more) / math.sqrt(len(more))


def simulate(
    tiers: Sequence[TierCosts],
    intervals: Intervals,
    failures: Failures,
    *,
    n_failures: int = 250,
    n_runs: int = 20,
    seed: int = 0,
) -> JobTime:
    """Simulate a job that saves in some intervals, from failure to failure.

    A failure ends the training at any moment, also in a save or a restart. What tiers lose by it is gone, and
    the newest step that is left is restored, from the nearest tier that has it. From there it is copied to
    those further on. A tier that a copy takes longer than its interval leaves out what comes meanwhile.

    Args:
        tiers: The nearest first; the last one survives every failure.
        intervals: Of each; those of other names do not count.
        failures: Of the job.
        n_failures: Of each run.
        n_runs: Independent of each other. The same seed gives the same failures, whatever the intervals are,
            until the job is in another state by them.
        seed: Of the random numbers.

    Raises:
        SpecError: If nothing survives some failure, or nothing would be measured.
    """
    _check(tiers, failures)
    if n_failures < 1 or n_runs < 2:
        raise SpecError("a simulation takes two runs or more, with a failure each")

    runs = [_Run(tiers, intervals, failures) for _ in range(n_runs)]
    for number, run in enumerate(runs):
        random = Random(f"{seed}/{number}")
        for _ in range(n_failures):
            run.go_on(random)

    total = sum([run.total for run in runs])
    lost_from = {tier.name: sum([run.lost[tier.name] for run in runs]) / total for tier in tiers}
    return JobTime(
        useful=sum([run.useful for run in runs]) / total,
        saving=sum([run.saving for run in runs]) / total,
        lost=sum(lost_from.values()),
        lost_from=lost_from,
        restarting=sum([run.restarting for run in runs]) / total,
        runs=tuple([run.useful / run.total for run in runs]),
    )


@final
class _Run:
    """One run of the simulation. `work` is counted in seconds of training since the beginning."""

    def __init__(self, tiers: Sequence[TierCosts], intervals: Intervals, failures: Failures) -> None:
        self._tiers, self._failures = tiers, failures
        self._kinds, self._upto = list(failures.shares), list(accumulate(failures.shares.values()))
        # Steps that come while a copy is under way are left out, but for the newest.
        self._every = [
            interval if interval == math.inf else interval * max(math.ceil(tier.copy_s / interval), 1)
            for tier in tiers
            for interval in (intervals[tier.name],)
        ]
        self._slope = 1 + sum([t.save_s / every for t, every in zip(tiers, self._every, strict=True)])
        self._newest = [0.0] * len(tiers)  # the work that each tier has; -1.0 for nothing
        self._newest[:-1] = [-1.0] * (len(tiers) - 1)
        self._work = self._down_s = 0.0  # where the training goes on, and how long it takes until it does
        self.useful = self.total = self.saving = self.restarting = 0.0
        self.lost = {tier.name: 0.0 for tier in tiers}  #: seconds of training, by where it went on from

    def go_on(self, random: Random) -> None:
        """Go on until the next failure, and restore."""
        until = random.expovariate(1 / self._failures.mean_s)
        kind = self._kinds[min(bisect(self._upto, random.random()), len(self._kinds) - 1)]
        down = self._down_s
        if not self._failures.while_restarting:
            until += down

        self.total += until
        self.restarting += min(until, down)
        reached = self._train(until - down) if until > down else self._work
        for at, tier in enumerate(self._tiers):
            if kind not in tier.survives:
                self._newest[at] = -1.0

        back = max(self._newest)
        source = self._tiers[self._newest.index(back)]
        self.lost[source.name] += reached - back
        self.useful += back - self._work
        self._work = back
        self._down_s = self._failures.restart_s + source.restore_s

    def _train(self, seconds: float) -> float:
        """Train for so long, with saves, and return the work that was reached."""
        start, taken, before = self._work, 0.0, tuple(self._newest)
        made = [math.floor(start / every + _NEAR) for every in self._every]  # saves of each tier so far
        saves = [
            (tier.save_s, every, n) for tier, every, n in zip(self._tiers, self._every, made, strict=True)
        ]

        def elapsed(work: float) -> float:
            """Return the seconds of training and of saves until so much work is done."""
            paid = work - start
            for save_s, every, n in saves:
                more = math.ceil(work / every - _NEAR) - 1 - n
                if more > 0:
                    paid += save_s * more

            return paid

        def last(at: int, within: float) -> int:
            """Return the number of a tier's last save that begins in so many seconds, or of one before."""
            every, first = self._every[at], made[at] + 1
            number = max(math.floor((start + within / self._slope) / every) + 1, first)
            while number >= first and elapsed(number * every) > within:
                number -= 1

            while number >= first and elapsed((number + 1) * every) <= within:
                number += 1

            return number

        for at, (tier, every) in enumerate(zip(self._tiers, self._every, strict=True)):
            if every == math.inf:
                continue

            # A step that was restored from a nearer tier is brought here first.
            if before[at] < start and start in before[:at] and tier.copy_s <= seconds:
                self._newest[at] = start

            whole = last(at, seconds - max(tier.copy_s, tier.save_s))
            if whole > made[at]:
                self._newest[at] = whole * every

            begun = last(at, seconds)
            if begun > made[at]:  # the last of them may not have ended
                paid = tier.save_s * (begun - made[at] - 1)
                taken += paid + min(tier.save_s, seconds - elapsed(begun * every))

        taken = min(taken, seconds)
        self.saving += taken
        return start + seconds - taken


def costs_of_run(kept: Kept) -> Mapping[str, Mapping[str, float]]:
    """Return what the reports of a run say about its tiers: medians, by tier and field of `TierCosts`.

    What a copy to a further tier takes from the training is in no report.
    """
    found: dict[str, dict[str, list[float]]] = {}

    def note(tier: str, name: str, seconds: float | None) -> None:
        if seconds is not None and 0 < seconds < math.inf:
            found.setdefault(tier, {}).setdefault(name, []).append(seconds)

    for report in kept.reports:
        if report.kind == "save":
            note(report.tier, "save_s", report.staged_s)
            note(report.tier, "copy_s", report.seconds)
        else:
            note(report.tier, "restore_s", report.seconds)

    for event in kept.events:
        if event.what == "promoted":
            note(event.tier, "copy_s", event.lag_s)

    return {tier: {name: median(all_) for name, all_ in of.items()} for tier, of in found.items()}


def step_seconds(saves: Iterable[KeptReport], numbers: Mapping[str, int]) -> float | None:
    """Return how long a step of the training takes, by the times of saves; None if they do not say.

    Args:
        saves: Of a run.
        numbers: The step that each name of a checkpoint stands for.
    """
    ended = [(report.ended_at, numbers[report.name]) for report in saves if report.name in numbers]
    ended.sort()
    rates = [
        (late - early) / (after - before)
        for (early, before), (late, after) in pairwise(ended)
        if after > before and late > early
    ]
    return median(rates) if rates else None


def tier_tables(steps: Mapping[str, int], paths: Mapping[str, str]) -> str:
    """Return the tables of a configuration that save each so many steps.

    Args:
        steps: Of each tier, as `in_steps`.
        paths: Of tiers on disks or in buckets.
    """
    lines: list[str] = []
    for name, every in steps.items():
        if name in {"root", "peers"}:
            continue

        where = ['kind = "memory"'] if name == "memory" else [f'path = "{paths.get(name, "/nvme/run")}"']
        peers = ["peers = 1"] if name == "memory" and "peers" in steps else []
        lines += ["[[tier]]", *where, *peers, f"save_every = {every}", ""]

    return "\n".join(lines[:-1])


def _groups(tiers: Sequence[TierCosts]) -> Sequence[Sequence[TierCosts]]:
    """Return the tiers that are saved to at the same moments."""
    groups: list[list[TierCosts]] = []
    for tier in tiers:
        if tier.with_nearer and groups:
            groups[-1].append(tier)
        else:
            groups.append([tier])

    return groups


def _check(tiers: Sequence[TierCosts], failures: Failures) -> None:
    kinds = {kind for kind, share in failures.shares.items() if share}
    lasting = tiers[-1].survives if tiers else frozenset[str]()
    if not kinds <= lasting:
        raise SpecError(f"no step survives a failure of kind {min(kinds - lasting)!r}: name a tier that does")
    for tier in tiers:
        if min(tier.save_s, tier.copy_s, tier.restore_s) < 0 or max(tier.save_s, tier.copy_s) <= 0:
            raise SpecError(f"saves to the tier {tier.name!r} take time, or there is no best interval")
