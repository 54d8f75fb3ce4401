"""What is chosen, with timings of a machine that is made up."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest

from penstock.tuning import (
    BUCKET_CANDIDATES,
    CANDIDATES,
    CODECS,
    PAIRS,
    Options,
    Timing,
    Tuned,
    candidates_for,
    given_candidate,
    profile_text,
    search,
    tuned_svg,
)

FAST_READ: Options = {"restore.read.concurrency": 16}
FAST_WRITE: Options = {"store.io": "direct"}


def always() -> bool:
    return True


async def tuned_with(
    save: Callable[[Options], float], restore: Callable[[Options], float], **limits: Any
) -> Tuned:
    async def measure(options: Options) -> Timing:
        return Timing(save(options), restore(options))

    given: dict[str, Any] = {"has_time": always, **limits}
    return await search(measure, CANDIDATES, **given)


@pytest.mark.anyio
async def test_what_is_faster_is_kept_and_the_fastest_of_one_key() -> None:
    found = await tuned_with(
        lambda options: 8 / options.get("save.write.concurrency", 4),  # type: ignore[operator]
        lambda options: 0.5 if options.get("restore.piece_bytes") == 128 << 20 else 1.0,
    )

    assert found.options == {"save.write.concurrency": 16, "restore.piece_bytes": 128 << 20}
    assert found.complete
    assert found.final is not None
    assert (found.final.ratio("save"), found.final.ratio("restore")) == (0.25, 0.5)


@pytest.mark.anyio
async def test_noise_is_not_taken_for_a_gain() -> None:
    noise = cycle([1.0, 0.8, 1.1, 0.9, 0.7, 1.2])  # in one of three pairs the candidate is slower

    found = await tuned_with(lambda options: next(noise), lambda options: 1.0)

    assert (found.options, found.final) == ({}, None)
    assert len(found.tried) == len(CANDIDATES)


@pytest.mark.anyio
async def test_what_makes_restores_slower_is_not_kept_for_saves() -> None:
    found = await tuned_with(
        lambda options: 0.5 if options.get("store.io") == "direct" else 1.0,
        lambda options: 2.0 if options.get("store.io") == "direct" else 1.0,
    )

    assert found.options == {}


@pytest.mark.anyio
async def test_what_is_not_faster_in_the_end_is_dropped() -> None:
    n_saves = 0

    def save(options: Options) -> float:
        nonlocal n_saves
        n_saves += 1
        in_the_end = n_saves > 2 * PAIRS * len(CANDIDATES)
        return (
            0.5 if options.get("store.io") == "direct" and not in_the_end else 1.0 + in_the_end * len(options)
        )

    found = await tuned_with(save, lambda options: 1.0)

    assert found.options == {}
    assert "Nothing is faster" in profile_text("x", found, [])


@pytest.mark.anyio
async def test_what_slows_restores_down_in_the_end_is_dropped() -> None:
    n_runs = 0

    def restore(options: Options) -> float:
        nonlocal n_runs
        n_runs += 1
        in_the_end = n_runs > 2 * PAIRS * len(CANDIDATES)
        return 1.5 if in_the_end and "store.io" in options else 1.0

    found = await tuned_with(lambda options: 0.5 if options.get("store.io") == "direct" else 1.0, restore)

    assert found.tried[1].is_faster
    assert found.options == {}


@pytest.mark.anyio
async def test_a_search_ends_and_says_so_when_its_time_is_up() -> None:
    left = iter([True, True, False])
    shown: list[tuple[int, str]] = []

    found = await tuned_with(
        lambda options: 1.0,
        lambda options: 1.0,
        has_time=lambda: next(left),
        tell=lambda done, text: shown.append((done, text)),
    )

    assert not found.complete
    assert shown == [(0, "store.io = buffered"), (1, "store.io = direct")]
    assert "# There was no time for every candidate." in profile_text("x", found, ["about"])


@pytest.mark.anyio
async def test_the_profile_has_the_figures_and_the_picture_a_bar_for_each() -> None:
    found = await tuned_with(
        lambda options: 0.5 if options.get("save.piece_bytes") == 4 << 20 else 1.0, lambda options: 1.0
    )

    text = profile_text("pod", found, ["Measured."])
    assert text.startswith("# Measured.\n")
    assert '# save, save.piece_bytes = "4MiB": 1.000 s -> 0.500 s, kept\n' in text
    assert '[profiles.pod.save]\npiece_bytes = "4MiB"\n' in text
    assert tuned_svg(found).count("<rect") == len(CANDIDATES)
    assert tuned_svg(found).count("#2563eb") == 1


def test_candidates_are_options_that_there_are() -> None:
    from penstock.config.option_reference import every_option

    known = {entry.key for entry in every_option()}
    assert {key for _, options in (*CANDIDATES, *BUCKET_CANDIDATES, *CODECS) for key in options} <= known


def test_a_bucket_has_candidates_of_its_own_and_a_small_budget_is_tried_larger() -> None:
    plain = candidates_for(is_bucket=False, own_tree=False, limit_bytes=None, free_bytes=1 << 40)
    assert plain == list(CANDIDATES)
    own = candidates_for(is_bucket=False, own_tree=True, limit_bytes=None, free_bytes=1 << 40)
    assert own == [*CANDIDATES, *CODECS]

    for free, larger in ((32, [16]), (31, [4]), (7, [])):
        found = candidates_for(is_bucket=True, own_tree=False, limit_bytes=1, free_bytes=free)
        tried = [("save", {"memory.limit_bytes": limit}) for limit in larger]
        assert found == [*tried, *BUCKET_CANDIDATES]


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
