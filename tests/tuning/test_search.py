"""What is chosen, on made-up machines, whose runs take no time: see tests/reports/simulated_runs.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from tests.reports.simulated_runs import DEFAULTS, MIB, Machine

from penstock import RestoreReport
from penstock.kernel.memory.regulator import Flow
from penstock.reports.diagnosis import Settings
from penstock.tuning import (
    CODECS,
    DISK,
    ROUNDS,
    Measured,
    Options,
    Space,
    Tuned,
    given_candidate,
    profile_text,
    search,
    space_of,
    tuned_svg,
)

pytestmark = pytest.mark.anyio

MACHINES = {
    "latency": Machine(latency_s=0.05),
    "each": Machine(stream_rate=8e6),
    "all": Machine(total_rate=32e6),
    "each, up to a total": Machine(latency_s=0.01, stream_rate=8e6, total_rate=64e6),
    "fast": Machine(),
    "slow copies": Machine(copy_rate=100 * MIB),
}
BUDGETS = (1024 * MIB, 16 * MIB)


@dataclass
class Runs:
    """Measures on a made-up machine, with noise, and counts the seconds that pass there.

    Attributes:
        save: The factor of a save's time that options next to the settings make.
        restore: Seconds of a restore.
    """

    machine: Machine
    settings: Settings = DEFAULTS
    noise: float = 0.03
    save: Callable[[Options], float] = lambda options: 1.0
    restore: Callable[[Options], float] = lambda options: 1.0
    seconds: float = 0.0
    random: Random = field(default_factory=lambda: Random(0))
    tried: list[tuple[Flow, Options]] = field(default_factory=list[tuple[Flow, Options]])

    async def measure(self, flow: Flow, options: Options) -> Measured:
        self.tried.append((flow, options))
        if flow == "restore":
            self.seconds += self.restore(options)
            return Measured(self.restore(options), RestoreReport("/made/up", 0, 0))

        report = self.machine.save(self.settings.with_options("save", options))
        noise = self.random.uniform(1 - self.noise, 1 + self.noise)
        seconds = report.wall_s * self.save(options) * noise
        self.seconds += seconds
        return Measured(seconds, report)

    def saves_in(self, options: Options) -> float:
        """Return what a save takes without noise."""
        return self.machine.save(self.settings.with_options("save", options)).wall_s

    async def tuned(self, space: Space, limit_s: float = 60.0) -> Tuned:
        return await search(self.measure, space, spent=lambda: self.seconds / limit_s if limit_s else 1.0)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
async def test_in_a_minute_it_is_as_fast_as_the_best_of_a_grid(machine: Machine, budget: int) -> None:
    runs = Runs(machine, replace(DEFAULTS, limit_bytes=budget))

    found = await runs.tuned(Space(most_memory=2048 * MIB))

    grid = [
        replace(DEFAULTS, concurrency=workers, piece_bytes=nbytes * MIB, limit_bytes=limit)
        for workers in (4, 16, 64)
        for nbytes in (1, 4, 16, 64)
        for limit in {budget, 1024 * MIB}
    ]
    assert runs.saves_in(found.options) <= 1.08 * min([machine.save(each).wall_s for each in grid])
    assert runs.seconds <= 63  # the run that is under way at the end is not cut off


async def test_what_helps_only_together_is_found() -> None:
    runs = Runs(MACHINES["each"])
    alone = [{"save.write.concurrency": 16}, {"save.piece_bytes": MIB}]
    assert all(runs.saves_in(each) > 0.92 * runs.saves_in({}) for each in alone)

    found = await runs.tuned(Space())

    assert found.options == {"save.write.concurrency": 64, "save.piece_bytes": MIB}
    assert found.complete
    save, restore = found.final
    assert save.ratio < 0.15
    assert restore.ratio == 1.0


async def test_saves_that_are_slow_as_they_are_leave_time_for_restores() -> None:
    read = {"restore.read.concurrency": 64}
    slow = Runs(MACHINES["each"])
    times = 5.0 / slow.saves_in({})  # five seconds: ten such runs are most of the minute
    runs = Runs(
        MACHINES["each"],
        save=lambda _: times,
        restore=lambda options: 0.5 if {**options, **read} == options else 5.0,
    )

    found = await runs.tuned(Space(extras=[("restore", read)]))

    assert found.options == {"save.write.concurrency": 64, "save.piece_bytes": MIB, **read}
    assert [len(each.seconds) for each in found.final] == [1, 1]  # so far apart that once more is enough
    assert runs.seconds <= 63


async def test_noise_is_not_taken_for_a_gain() -> None:
    for seed in range(12):
        runs = Runs(MACHINES["all"], noise=0.1, random=Random(seed))

        found = await runs.tuned(Space(extras=DISK), limit_s=300)

        assert found.options == {}
        assert {each.is_kept for each in found.tried} <= {False}


async def test_an_option_next_to_the_settings_is_tried_with_the_best_of_them() -> None:
    direct = {"store.io": "direct"}
    runs = Runs(
        MACHINES["each"],
        save=lambda options: 0.5 if {**options, **direct} == options and len(options) > 1 else 1.0,
    )

    found = await runs.tuned(Space(extras=DISK))

    assert found.options == {"save.write.concurrency": 64, "save.piece_bytes": MIB, **direct}


async def test_what_makes_restores_slower_is_not_kept_for_saves() -> None:
    def restore(options: Options) -> float:
        return 2.0 if options.get("store.io") == "direct" else 1.0

    runs = Runs(MACHINES["slow copies"], noise=0.0, restore=restore)
    runs.save = lambda options: 0.5 if options.get("store.io") == "direct" else 1.0

    found = await runs.tuned(Space(extras=DISK))

    verdicts = [each.verdict for each in found.tried if each.options.get("store.io") == "direct"]
    assert any("rejected: in the end, all together, saves took 0.5" in verdict for verdict in verdicts)
    assert found.options == {}
    assert "Nothing is faster" in profile_text("x", found, [])


async def test_how_leaves_are_saved_may_slow_their_restores_down_and_is_not_kept_then() -> None:
    runs = Runs(MACHINES["each"], restore=lambda options: 2.0 if "save.piece_bytes" in options else 1.0)

    found = await runs.tuned(Space())

    assert any("restores took 2.00 of the time" in each.verdict for each in found.tried)
    assert "save.piece_bytes" not in found.options


async def test_what_is_not_faster_in_the_end_is_dropped() -> None:
    runs = Runs(MACHINES["slow copies"])
    runs.save = lambda options: 0.5 if options and len(runs.tried) <= 99 else 1.0

    found = await runs.tuned(Space(given=[("save", {"store.io": "direct"})]))
    assert found.options == {"store.io": "direct"}

    # The first run and that with the option, one more and five more, and one restore: then it helps no more.
    fading = Runs(MACHINES["slow copies"])
    fading.save = lambda options: 0.5 if len(fading.tried) <= 9 and options else 1.0
    found = await fading.tuned(Space(given=[("save", {"store.io": "direct"})]))
    assert ["in the end" in each.verdict for each in found.tried] == [True]
    assert found.options == {}


async def test_a_restore_is_tried_with_what_was_found_for_saves() -> None:
    runs = Runs(MACHINES["slow copies"], save=lambda options: 0.5 if options else 1.0)
    runs.restore = lambda options: 0.5 if "restore.read.concurrency" in options else 1.0
    given = [("save", {"store.io": "direct"}), ("restore", {"restore.read.concurrency": 8})]

    found = await runs.tuned(Space(given=given))  # type: ignore[arg-type]

    assert found.options == {"store.io": "direct", "restore.read.concurrency": 8}
    assert ("restore", {"store.io": "direct", "restore.read.concurrency": 8}) in runs.tried


async def test_of_what_is_as_fast_the_least_change_is_kept_and_every_rejection_has_a_reason() -> None:
    runs = Runs(MACHINES["each"])

    found = await runs.tuned(Space())

    assert all(each.is_kept or each.verdict.startswith("rejected: ") for each in found.tried)
    (kept,) = [each for each in found.tried if each.is_kept]
    assert kept.verdict == f"kept: faster in 100% of {2 * ROUNDS} pairs"
    others = [each.verdict for each in found.tried if not each.is_kept]
    assert any("what is kept takes" in verdict for verdict in others)


async def test_a_search_without_time_tries_nothing_and_says_so() -> None:
    runs = Runs(MACHINES["each"])

    found = await runs.tuned(Space(), limit_s=0.0)

    assert (runs.tried, found.options, found.complete) == ([], {}, False)
    assert "# There was no time for all that was worth a try." in profile_text("x", found, ["about"])


async def test_a_search_ends_when_its_time_is_up() -> None:
    runs = Runs(MACHINES["each"])

    found = await runs.tuned(Space(), limit_s=12.0)

    assert (found.complete, found.options) == (False, {})
    assert any(each.verdict == "rejected: too little time to be sure" for each in found.tried)
    assert runs.seconds < 20
    for each in found.tried:
        assert len(each.seconds) <= 2


async def test_the_profile_has_the_figures_how_sure_they_are_and_the_picture_a_bar_for_each() -> None:
    found = await Runs(MACHINES["each"], noise=0.0).tuned(Space())

    text = profile_text("pod", found, ["Measured."])
    assert text.startswith("# Measured.\n")
    assert (
        '# save, save.write.concurrency = 64, save.piece_bytes = "1MiB": 2.14 s (2 runs, 2.14 to 2.14) -> '
        "0.231 s (5 runs, 0.231 to 0.231); kept: faster in 100% of 10 pairs\n" in text
    )
    assert "# All together: saves take 0.11 of the time without (2.14 s -> 0.231 s)." in text
    assert '[profiles.pod.save]\npiece_bytes = "1MiB"\n' in text
    assert tuned_svg(found).count("<rect") == len(found.tried)
    assert tuned_svg(found).count("#2563eb") == 1


def test_candidates_are_options_that_there_are() -> None:
    from penstock.config.option_reference import every_option

    known = {entry.key for entry in every_option()}
    assert {key for _, options in (*DISK, *CODECS) for key in options} <= known
    for flow in ("save", "restore"):
        other = Settings(1, 1, 1, 1)
        assert set(DEFAULTS.options(flow, other)) <= known
        assert other.with_options(flow, DEFAULTS.options(flow, other)) == DEFAULTS


def test_a_bucket_has_no_page_cache_and_a_budget_that_is_set_is_tried_larger() -> None:
    plain = space_of(is_bucket=False, own_tree=False, limit_bytes=None, free_bytes=1 << 40)
    assert plain == Space(list(DISK))
    own = space_of(is_bucket=True, own_tree=True, limit_bytes=None, free_bytes=1 << 40)
    assert own == Space(list(CODECS))
    assert space_of(is_bucket=True, own_tree=False, limit_bytes=1, free_bytes=32) == Space([], 16)


@pytest.mark.parametrize(
    ("text", "candidate"),
    [
        ("save.write.concurrency=8", ("save", {"save.write.concurrency": 8})),
        ("restore.piece_bytes=8MiB", ("restore", {"restore.piece_bytes": "8MiB"})),
        ("store.io=direct", ("save", {"store.io": "direct"})),
    ],
)
def test_a_candidate_may_be_given(text: str, candidate: object) -> None:
    assert given_candidate(text) == candidate


@pytest.mark.parametrize("text", ["", "=", "store.io", "store.io=", "io=direct"])
def test_what_is_no_candidate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"SECTION\.OPTION=VALUE"):
        given_candidate(text)
