"""`penstock tune --failures`: how often to save into each tier, by how often hosts fail and what it costs."""

from __future__ import annotations

__all__ = ("configure_failures", "is_about_failures", "run_failures")

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

from penstock.cli.completers import completed
from penstock.cli.terminal import CommandError, Output, Table, Toned, format_bytes
from penstock.failures import (
    ASSUMED,
    PUBLISHED,
    Failures,
    Intervals,
    JobTime,
    TierCosts,
    costs_of_run,
    in_steps,
    plan_intervals,
    simulate,
    step_seconds,
    tier_tables,
)
from penstock.inspection.step_listing import step_number_in
from penstock.inspection.texts import format_number
from penstock.kernel.errors import SpecError
from penstock.kernel.options import parse_seconds
from penstock.kernel.words import counted, hint_at
from penstock.reports.kept_reports import read_reports
from penstock.steps.tier_record import levels_of
from penstock.stores.store_finder import store_of

_SETS: Final = (("root",), ("disk", "root"), ("memory", "root"), ("memory", "peers", "root"))
"""Tiers that a job may have, to be compared."""

_COSTS: Final = {"save": "save_s", "copy": "copy_s", "restore": "restore_s"}
_OF_FAILURES: Final = ("hosts", "rate", "kinds", "restart", "tiers", "costs", "step_time", "seed")


def configure_failures(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments that are about failures."""
    group = parser.add_argument_group(
        "how often to save",
        "With --failures nothing is saved: from how often hosts fail, and from what saves and restores take, "
        "follows how often to save into each tier. PATH is a run, whose reports say what they took; without "
        "it, and for what they do not say, figures of a large job are assumed. A simulation of the failures "
        "shows what half and twice each interval would gain.",
    )
    group.add_argument("--failures", action="store_true", help="tell how often to save")
    group.add_argument("--hosts", type=int, metavar="N", help="that the job runs on")
    group.add_argument(
        "--rate", type=float, metavar="R", help=f"failures of 1,000 hosts in a day ({PUBLISHED}, published)"
    )
    group.add_argument(
        "--kinds", metavar="KIND=PERCENT,...",
        help="of the failures: what ends processes alone, one host, several neighbouring ones, all "
        "(process=75,host=23,hosts=1.5,site=0.5)",
    )  # fmt: skip
    group.add_argument("--restart", metavar="TIME", help="until a restore begins after a failure (2min)")
    tiers = group.add_argument(
        "--tiers", metavar="TIER,...",
        help="the nearest first, of memory, peers, disk and root; by default those of the run, or "
        "memory,peers,root",
    )  # fmt: skip
    completed(tiers, _tier_sets)
    costs = group.add_argument(
        "--costs", action="append", metavar="TIER:KEY=TIME,...",
        help="your figures, as root:save=2s,copy=5min,restore=5min: what a save takes from the training, "
        "until a failure leaves it there, what a restore takes; repeatable",
    )  # fmt: skip
    completed(costs, _tier_names)
    group.add_argument(
        "--step-time", metavar="TIME", help="of a step of the training; by default as the run's saves say"
    )
    group.add_argument("--seed", type=int, metavar="N", help="of the simulation (0)")


def is_about_failures(options: argparse.Namespace) -> bool:
    """True if `--failures` is given.

    Raises:
        CommandError: If other options are given that mean nothing with or without it.
    """
    given = [name for name in _OF_FAILURES if getattr(options, name) is not None]
    if given and not options.failures:
        raise CommandError(f"--{given[0].replace('_', '-')} is for --failures")

    others = [name for name in ("like", "tried", "picture") if getattr(options, name) is not None]
    if others and options.failures:
        raise CommandError(f"--{others[0].replace('tried', 'try')} is for measuring a store, not --failures")

    return bool(options.failures)


@final
@dataclass(frozen=True, slots=True)
class _Run:
    """Figures that a run keeps about itself."""

    tiers: Sequence[str] = ()
    paths: Mapping[str, str] = field(default_factory=dict[str, str])  # by tier
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    step_s: float | None = None
    nbytes: int = 0  # of the last step
    n_reports: int = 0


def run_failures(options: argparse.Namespace, output: Output) -> int:
    """Tell how often to save, and why.

    Raises:
        CommandError: If an argument does not fit.
        StorageError: If the run cannot be read.
    """
    try:
        failures = _failures(options)
        run = _Run() if options.path is None else _read(options.path)
        named = (options.tiers or "").split(",") if options.tiers else run.tiers or _SETS[-1]
        given = dict(map(_given_costs, options.costs or ()))
        step_s = run.step_s if options.step_time is None else parse_seconds(options.step_time)
        tiers = [_costs_of(name, run, given) for name in named]
        _check(tiers, given)
        plan = plan_intervals(tiers, failures)
        steps: Mapping[str, int] = {}
        if step_s is not None:
            steps = in_steps(tiers, plan, step_s)
            plan = {name: steps[name] * step_s if name in steps else math.inf for name in plan}

        seed = options.seed or 0
        found = simulate(tiers, plan, failures, seed=seed)
    except (SpecError, ValueError) as error:
        raise CommandError(str(error)) from None

    _say_job(options, failures, run, output)
    _say_sets(
        [*_SETS, tuple(named)] if tuple(named) not in _SETS else _SETS, failures, run, given, seed, output
    )
    output.headline(f"{', '.join(named)}: useful {_percent(found.useful)} ± {_percent(found.error, 2)}")
    output.note(
        f"saving {_percent(found.saving, 2)} · done again {_percent(found.lost, 2)} · restarting "
        f"{_percent(found.restarting, 2)}"
    )
    sure = _say_tiers(tiers, plan, steps, failures, run, given, found, seed, output)
    if sure is not None:
        output.note(sure)

    output.note("")
    output.say(_settings(steps, plan, run))
    return 0


def _failures(options: argparse.Namespace) -> Failures:
    if options.hosts is None:
        raise CommandError("--failures needs --hosts N: how many the job runs on")

    failures = Failures.of_hosts(options.hosts, PUBLISHED if options.rate is None else options.rate)
    if options.restart is not None:
        failures = replace(failures, restart_s=parse_seconds(options.restart))
    if options.kinds is not None:
        kinds = {kind: _number(text) / 100 for kind, text in _pairs(options.kinds, "--kinds")}
        unknown = kinds.keys() - failures.shares.keys()
        if unknown:
            raise CommandError(f"--kinds: {hint_at(min(unknown), list(failures.shares))}")

        failures = replace(failures, shares=kinds)

    return failures


def _read(path: str) -> _Run:
    """Return what a run says.

    Raises:
        CommandError: If there is no directory.
        StorageError: If the medium refuses.
    """
    store, root = store_of(path)
    if store.kind(root) != "directory":
        raise CommandError(f"{path!r} is no directory of steps")

    levels, kept = levels_of(store, root), read_reports(store, root)
    numbers = {report.name: step_number_in(report.name) for report in kept.reports}
    saves = [report for report in kept.reports if report.kind == "save"]
    known = {name: number for name, number in numbers.items() if number is not None}
    return _Run(
        [level.label for level in levels],
        {level.label: level.path for level in levels},
        costs_of_run(kept),
        step_seconds(saves, known),
        saves[-1].nbytes if saves else 0,
        len(kept.reports),
    )


def _costs_of(name: str, run: _Run, given: Mapping[str, Mapping[str, float]]) -> TierCosts:
    """Return what a tier costs: as given, as measured, as assumed."""
    kind = name.rstrip("0123456789")
    if kind not in ASSUMED and name not in run.tiers:
        raise CommandError(f"--tiers: {hint_at(name, list(ASSUMED))}")

    assumed = ASSUMED.get(kind, ASSUMED["root"])  # a bucket that is no root is one, too
    known = {**run.measured.get(name, {}), **given.get(name, {})}
    return replace(
        assumed,
        name=name,
        save_s=known.get("save_s", assumed.save_s),
        copy_s=known.get("copy_s", assumed.copy_s),
        restore_s=known.get("restore_s", assumed.restore_s),
    )


def _given_costs(text: str) -> tuple[str, Mapping[str, float]]:
    name, separator, rest = text.partition(":")
    if not separator:
        raise CommandError(f"--costs {text!r}: write it as root:save=2s,copy=5min,restore=5min")

    found: dict[str, float] = {}
    for key, value in _pairs(rest, "--costs"):
        if key not in _COSTS:
            raise CommandError(f"--costs {text!r}: {hint_at(key, list(_COSTS))}")

        found[_COSTS[key]] = parse_seconds(value)

    return name, found


def _check(tiers: Sequence[TierCosts], given: Mapping[str, object]) -> None:
    names = [tier.name for tier in tiers]
    if len({*names}) < len(names):
        raise CommandError("--tiers: each tier once")
    if "peers" in names and names[: names.index("peers")][-1:] != ["memory"]:
        raise CommandError("--tiers: peers get what is in memory, so they come right after it")

    unknown = sorted(given.keys() - {*names, *[name for each in _SETS for name in each]})
    if unknown:
        raise CommandError(f"--costs: {hint_at(unknown[0], names)}")


def _say_job(options: argparse.Namespace, failures: Failures, run: _Run, output: Output) -> None:
    rate = PUBLISHED if options.rate is None else options.rate
    output.headline(
        f"{counted(options.hosts, 'host')}, {format_number(rate)} failures of 1,000 in a day: "
        f"one each {_time(failures.mean_s)}"
    )
    if run.n_reports:
        size = f", {format_bytes(run.nbytes)} a step" if run.nbytes else ""
        output.note(f"measured by {counted(run.n_reports, 'report')} of the run{size}")


def _say_sets(
    sets: Iterable[Sequence[str]],
    failures: Failures,
    run: _Run,
    given: Mapping[str, Mapping[str, float]],
    seed: int,
    output: Output,
) -> None:
    """Compare tiers that the job may have."""
    rows: list[Sequence[str]] = []
    for names in sets:
        tiers = [_costs_of(name, run, given) for name in names]
        plan = plan_intervals(tiers, failures)
        found = simulate(tiers, plan, failures, seed=seed)
        every = ", ".join(dict.fromkeys(_time(plan[tier.name]) for tier in tiers if not tier.with_nearer))
        useful = f"{_percent(found.useful)} ± {_percent(found.error, 2)}"
        rows.append((", ".join(names), useful, every))

    output.table(Table(("tiers", "useful", "each"), rows, n_left=3))


def _say_tiers(
    tiers: Sequence[TierCosts],
    plan: Intervals,
    steps: Mapping[str, int],
    failures: Failures,
    run: _Run,
    given: Mapping[str, Mapping[str, float]],
    found: JobTime,
    seed: int,
    output: Output,
) -> str | None:
    """Say what each tier takes and gives; return what other intervals say about these."""
    rows: list[Sequence[str]] = []
    better: list[str] = []
    for tier in tiers:
        known = {**run.measured.get(tier.name, {}), **given.get(tier.name, {})}
        figures = [
            _time(getattr(tier, name)) if name in known else f"({_time(getattr(tier, name))})"
            for name in _COSTS.values()
        ]
        others: list[str] = []
        for factor, word in ((0.5, "half"), (2.0, "twice")):
            if tier.with_nearer or plan[tier.name] == math.inf:
                others.append("")
                continue

            together = _together(tiers, tier)
            other = {name: each * factor if name in together else each for name, each in plan.items()}
            gain, error = simulate(tiers, other, failures, seed=seed).gain_over(found)
            others.append(Toned(_gain(gain, error), "warning") if gain > 2 * error else _gain(gain, error))
            if gain > 2 * error:
                better.append(f"{word} the interval of {tier.name}")

        n_steps = str(steps[tier.name]) if tier.name in steps else ""
        lost = _percent(found.lost_from[tier.name], 2)
        rows.append((tier.name, _time(plan[tier.name]), n_steps, *figures, lost, *others))

    columns = ("tier", "each", "steps", "save", "copy", "restore", "lost", "half", "twice")
    output.table(Table(columns, rows, spare=("restore", "copy")))
    output.note(
        "save: time of the training · copy: until a failure leaves it there · lost: work, as a share of all "
        "time · in parentheses: assumed"
    )
    if better:
        return f"by the simulation better: {', '.join(better)}; a step that is being copied makes it so"

    return "half and twice each interval gain nothing beyond the error of the simulation"


def _together(tiers: Sequence[TierCosts], tier: TierCosts) -> frozenset[str]:
    """Return the names of the tiers that have one interval with this one."""
    after = tiers[tiers.index(tier) + 1 :]
    follow = [each.name for each in after[:1] if each.with_nearer]
    return frozenset([tier.name, *follow])


def _settings(steps: Mapping[str, int], plan: Intervals, run: _Run) -> str:
    """Return what to write where."""
    if not steps:
        every = ", ".join(f"{name} each {_time(each)}" for name, each in plan.items() if each < math.inf)
        return f"# {every}; --step-time makes steps of them"

    tables = tier_tables(steps, run.paths)
    root = f"# in the program: CheckpointManager(..., save_when={steps['root']})" if "root" in steps else ""
    return "\n\n".join(filter(None, (tables, root)))


def _pairs(text: str, option: str) -> Sequence[tuple[str, str]]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(key and separator and value for key, separator, value in pairs):
        raise CommandError(f"{option} {text!r}: write it as KEY=VALUE,KEY=VALUE")

    return [(key.strip(), value) for key, _, value in pairs]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CommandError(f"{text!r} is no number") from None


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _gain(share: float, error: float) -> str:
    return f"{100 * share:+.2f} ± {100 * error:.2f} %"


def _time(seconds: float) -> str:
    """Return a duration in words, such as `38 min`."""
    if seconds == math.inf:
        return "never"

    for unit, length in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"

    return f"{seconds:.3g} s"


def _tier_names(**_: object) -> Sequence[str]:
    return [f"{name}:" for name in ASSUMED]


def _tier_sets(**_: object) -> Sequence[str]:
    return [",".join(names) for names in _SETS]
