"""Who is silent, by the clock of the one that judges, which may itself have stood still."""

from __future__ import annotations

import pytest

from penstock.handlers.coordinators.silence import MOST_ANEW, AwakeLimit, FailureDetector, Heartbeat

LIMIT_S, BEAT_S = 5.0, 1.0


def beats(count: int, *processes: int) -> dict[int, bytes]:
    return {index: Heartbeat(count, "write").encoded() for index in processes}


def detector() -> FailureDetector:
    return FailureDetector(LIMIT_S, BEAT_S, 0.0)


def looks(found: FailureDetector, start_s: float, end_s: float) -> FailureDetector:
    """Look every half a beat, and hear nothing new, as the service answers at once."""
    at = start_s
    while at <= end_s:
        found, at = found.hear({}, at, at), at + BEAT_S / 2

    return found


@pytest.mark.parametrize("by_answers", [True, False])
def test_silent_is_who_said_nothing_new_for_longer_than_the_limit(by_answers: bool) -> None:
    found = detector().hear(beats(1, 1, 2), 0.5, 0.5)
    found = looks(found, 1.0, 3.0).hear(beats(1, 1) | beats(2, 2), 3.5, 3.5)

    found = looks(found, 4.0, 5.5)
    assert found.silent(by_answers=by_answers) == {}
    found = looks(found, 6.0, 6.0)
    assert found.silent(by_answers=by_answers) == {1: "write"}
    found = looks(found, 6.5, 9.0)
    assert found.silent(by_answers=by_answers) == {1: "write", 2: "write"}
    assert found.hear(beats(3, 1, 2), 9.5, 9.5).silent(by_answers=by_answers) == {}


@pytest.mark.parametrize("pause_s", [2.5, 5.5, 60.0, 3600.0])
def test_after_a_standstill_silence_begins_anew(pause_s: float) -> None:
    found = looks(detector().hear(beats(1, 1), 0.0, 0.0), 0.5, 1.0)
    woken_s = 1.0 + pause_s
    found = found.look(woken_s)
    assert found.silent(by_answers=False) == {}
    assert looks(found, woken_s, woken_s + LIMIT_S).silent(by_answers=True) == {}
    assert looks(found, woken_s, woken_s + LIMIT_S + 0.5).silent(by_answers=True) == {1: "write"}


def test_an_answer_that_was_asked_for_before_the_standstill_is_no_evidence() -> None:
    found = looks(detector().hear(beats(1, 1), 0.0, 0.0), 0.5, 1.0)
    found = found.hear(beats(1, 1), 1.2, 61.0)
    assert found.silent(by_answers=True) == {}
    assert not found.is_unanswered


def test_who_judges_by_answers_blames_the_service_and_no_process_if_none_comes() -> None:
    found = detector().hear(beats(1, 1), 0.0, 0.0)
    for at in range(1, 20):
        found = found.look(at / 2)

    assert found.silent(by_answers=True) == {}
    assert found.is_unanswered
    assert found.silent(by_answers=False) == {1: "write"}
    assert not found.hear({}, 10.0, 10.0).is_unanswered


def test_a_program_that_stands_still_again_and_again_judges_nevertheless() -> None:
    found, at = detector().hear(beats(1, 1, 2), 0.0, 0.0), 0.0
    for n in range(1, MOST_ANEW + 2):
        at += 3 * BEAT_S
        found = found.hear(beats(n, 2), at, at)
        assert found.silent(by_answers=True) == {}

    assert found.hear(beats(100, 2), at + 3 * BEAT_S, at + 3 * BEAT_S).silent(by_answers=True) == {1: "write"}


def test_where_a_process_was_is_known_if_it_was_heard_of() -> None:
    found = detector().hear(beats(1, 1), 0.0, 0.0).hear({3: b"what is this"}, 0.0, 0.0)
    assert [found.stage_of(index) for index in (1, 2, 3)] == ["write", None, "unknown"]


@pytest.mark.parametrize("limit_s", [4.0, 600.0])
def test_a_limit_that_runs_out_in_a_standstill_begins_anew(limit_s: float) -> None:
    limit = AwakeLimit.begin(limit_s, BEAT_S, 0.0).look(0.5)
    woken_s = limit_s + 100.0
    limit = limit.look(woken_s)
    fresh_s = min(limit_s, 10.0)
    assert limit.left_s(woken_s) == fresh_s
    assert limit.look(woken_s + BEAT_S).left_s(woken_s + fresh_s) == 0.0


def test_a_limit_runs_out_for_a_program_that_stands_still_again_and_again() -> None:
    limit, at = AwakeLimit.begin(LIMIT_S, BEAT_S, 0.0), 0.0
    for _ in range(MOST_ANEW + 1):
        at += 10 * LIMIT_S
        limit = limit.look(at)

    assert limit.left_s(at) == 0.0


def test_a_limit_that_runs_out_awake_is_over() -> None:
    limit, at = AwakeLimit.begin(LIMIT_S, BEAT_S, 0.0), 0.0
    while at < LIMIT_S:
        at += BEAT_S
        limit = limit.look(at)

    assert limit.left_s(at) == 0.0
