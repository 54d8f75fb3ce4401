"""All interleavings of three processes with a crash and a pause keep what is promised, and make the table.

The explorer raises if any of this is broken, with the steps that lead there:

- there is one verdict of an operation;
- it is published once at most, and only after the verdict that it is;
- only a process that crashed or was paused is named as silent;
- nobody waits for ever;
- what the caller of a save is told is so, also of one that comes late, or wakes;
- the keys of an operation that was forgotten do not come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.coordination.interleavings import BrokenPromiseError, Row, Scenario, Used, explored

from penstock.kernel.coordination import procedures
from penstock.kernel.coordination.operation_keys import Joining, OperationKeys
from penstock.kernel.coordination.procedures import Call, Member, Procedure
from penstock.kernel.coordination.verdicts import Verdict

PAGE = Path(__file__).parents[3] / "docs/reference/coordination.md"
HEAD = "| who | has called | and heard | then |\n| --- | --- | --- | --- |\n"

SHORT = {
    "nothing": Scenario(),
    "process 0 crashes": Scenario(crashes=0),
    "process 1 crashes": Scenario(crashes=1),
    "process 0 fails, and all save again": Scenario(fails=0, n_saves=2),
    "process 1 fails, and all save again": Scenario(fails=1, n_saves=2),
}
LONG = {
    "process 1 is paused": Scenario(pauses=1),
    "process 0 is paused": Scenario(pauses=0),
    "process 1 is paused and crashes": Scenario(pauses=1, crashes=1),
    "process 1 is paused, 2 crashes": Scenario(pauses=1, crashes=2),
    "process 1 is paused, 0 crashes": Scenario(pauses=1, crashes=0),
    "process 0 is paused, 1 crashes": Scenario(pauses=0, crashes=1),
    "process 0 is paused and crashes": Scenario(pauses=0, crashes=0),
    "process 0 is paused with the service": Scenario(pauses=0, with_service=True, longest_s=12.0),
    "process 1 is paused, 2 fails, and all save again": Scenario(pauses=1, fails=2, n_saves=2),
}


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

    assert set(_lines(rows)) <= set(_table())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_one_crash_and_one_pause_break_no_promise_and_the_table_is_what_was_seen() -> None:
    rows = set[Row]()
    for scenario in (*SHORT.values(), *LONG.values()):
        rows |= explored(scenario).rows

    assert list(_lines(rows)) == _table()


def _table() -> list[str]:
    return PAGE.read_text().partition(HEAD)[2].splitlines()


def _lines(rows: set[Row]) -> Iterator[str]:
    for who, call, heard, then in sorted(rows):
        yield f"| {who} | `{call}` | {heard} | `{then}` |"


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
    joining = Joining(keys.identity, member.group, member.about, path)
    yield Call("put", member.join_key(path), joining.encoded(), replace=True)
    yield from procedures.begin(member, path, keys, first)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(pauses=0, used=Used(claim=_replacing)),
        Scenario(pauses=1, used=Used(end=_not_looking)),
        Scenario(pauses=0, used=Used(begin=_hasty)),
    ],
    ids=["a verdict replaces another", "who leaves does not look again", "the join key comes first"],
)
@pytest.mark.timeout(120)
def test_a_mutant_is_found(scenario: Scenario) -> None:
    with pytest.raises(BrokenPromiseError):
        explored(scenario)
