"""Interleavings of three processes with a crash or a pause keep what is promised.

`make interleavings` explores all of them, with a crash and a pause, and compares the table.

The explorer raises if any of this is broken, with the steps that lead there:

- there is one verdict of an operation;
- it is published once at most, and only after the verdict that it is;
- only a process that crashed or was paused is named as silent;
- nobody waits for ever;
- what the caller of a save is told is so, also of one that comes late, or wakes;
- the keys of an operation that was forgotten do not come back.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.handlers.coordinators.interleavings import (
    LONG,
    SHORT,
    BrokenPromiseError,
    Row,
    Scenario,
    Used,
    explored,
    lines_of,
    table,
)

from penstock.handlers.coordinators import procedures
from penstock.handlers.coordinators.operation_keys import JoinRecord, OperationKeys
from penstock.handlers.coordinators.procedures import Call, Member, Procedure, Verdict


@pytest.mark.parametrize("name", SHORT)
def test_one_crash_or_failure_breaks_no_promise(name: str) -> None:
    found = explored(SHORT[name])
    assert found.n_states > 100
    assert any(each and each[-1] == "saved" for outcome in found.outcomes for each in outcome)


@pytest.mark.timeout(120)
def test_a_pause_of_a_worker_breaks_no_promise_and_the_table_has_all_that_was_seen() -> None:
    rows = set[Row]()
    for scenario in (*SHORT.values(), LONG["process 1 is paused"]):
        rows |= explored(scenario).rows

    assert set(lines_of(rows)) <= set(table())


def _not_looking(*args: Any, **options: Any) -> Procedure[Any]:
    """Be a mutant of `end` that does not look whether all is forgotten."""
    running, answer = procedures.end(*args, **options), None
    while True:
        try:
            call = running.send(answer)
        except StopIteration as end:
            return end.value

        is_look = call.kind == "wait" and call.key.endswith("/at/0")
        answer = b"it is there" if is_look else (yield call)


def _replacing(member: Member, keys: OperationKeys, verdict: Verdict) -> Procedure[Verdict]:
    """Be a mutant of `claim` that sets a verdict whether there is one or not."""
    yield Call("put", keys.verdict, verdict.encoded(), replace=True)
    yield Call("learn", value=verdict)
    return verdict


def _hasty(member: Member, path: str, keys: OperationKeys, first: bytes) -> Procedure[None]:
    """Be a mutant of `begin` that says what is to be joined before the primary has come."""
    joining = JoinRecord(keys.identity, member.group, member.about, path)
    yield Call("put", member.join_key(path), joining.encoded(), replace=True)
    yield from procedures.begin(member, path, keys, first)


@pytest.mark.parametrize(
    "scenario",
    [
        # Thousands of courses: `make interleavings` goes through them, too.
        pytest.param(Scenario(pauses=0, used=Used(claim=_replacing)), marks=pytest.mark.slow),
        Scenario(pauses=1, used=Used(end=_not_looking)),
        Scenario(pauses=0, used=Used(begin=_hasty)),
    ],
    ids=["a verdict replaces another", "who leaves does not look again", "the join key comes first"],
)
@pytest.mark.timeout(120)
def test_a_mutant_is_found(scenario: Scenario) -> None:
    with pytest.raises(BrokenPromiseError):
        explored(scenario)
