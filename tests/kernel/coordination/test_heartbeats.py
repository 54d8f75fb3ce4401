"""Who is silent, by the clock of the one that judges."""

from __future__ import annotations

from penstock.kernel.coordination.heartbeats import Heartbeat, SilenceJudge


def beats(count: int, *processes: int) -> dict[int, bytes]:
    return {index: Heartbeat(count, "write").encoded() for index in processes}


def test_silent_is_who_said_nothing_new_for_longer_than_the_limit() -> None:
    judge = SilenceJudge(5.0)
    assert judge.look({}, 0.0) == {}
    assert judge.look(beats(1, 1, 2), 1.0) == {}
    assert judge.look(beats(1, 1) | beats(2, 2), 4.0) == {}

    assert judge.look({}, 6.0) == {}
    assert judge.look({}, 6.1) == {1: "write"}
    assert judge.look(beats(1, 1), 9.1) == {1: "write", 2: "write"}
    assert judge.look(beats(3, 1, 2), 9.2) == {}


def test_where_a_process_was_is_known_if_it_was_heard_of() -> None:
    judge = SilenceJudge(5.0)
    judge.look(beats(1, 1), 0.0)
    judge.look({3: b"what is this"}, 0.0)

    assert [judge.stage_of(index) for index in (1, 2, 3)] == ["write", None, "unknown"]
