"""Some faults of `make tiers-proof`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
from tests.proofs.kill_matrix import POINTS, VICTIMS, words_of
from tests.proofs.tiers import Found, Lost, _sent_by_all, promised

from penstock.handlers.stores.keeper import messages

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(400)
@pytest.mark.parametrize("on", ["--hosts=4 --processes=8", "--hosts=1 --processes=1"])
def test_what_broken_jobs_leave_is_found_again(on: str) -> None:
    """Also of one process alone, which has no peers."""
    command = [sys.executable, "-m", "tests.proofs.tiers", "--faults=8", "--seed=1", *on.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "8 faults, 8 recoveries" in done.stdout


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(2000)
def test_who_is_killed_at_any_point_of_the_protocol_costs_no_step_that_is_promised() -> None:
    command = [sys.executable, "-m", "tests.proofs.kill_matrix"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert f"{len(VICTIMS) * len(POINTS) * 2} kills at {len(POINTS)} points" in done.stdout


def test_each_question_that_a_keeper_knows_is_a_point_of_the_matrix() -> None:
    asked_otherwise = {messages.Prepare, messages.Release, messages.Status, messages.Stop, messages.TakeOver}
    kinds = set(get_args(messages.Request)) - asked_otherwise - {messages.Move}

    assert {words_of(kind) for kind in kinds} | {"publish", "rename"} == {
        point for point in POINTS if not point.startswith("of a peer: ")
    }


def found(**more: object) -> Found:
    """Return what two processes said that resumed from step 5, sent 7, and kept 8."""
    given = {"resumed": 5, "kept": 8, "disk": 6, "sent": 7, "durable": 4, **more}
    return Found(**given)  # type: ignore[arg-type]  # each has its type above


@pytest.mark.parametrize(
    ("said", "lost", "least"),
    [
        (found(), Lost(), 8),
        (found(), Lost({0}), 7),  # of its process the peer has 7, and so has the keeper of the other
        (found(kept=11), Lost({0}), 7),  # also if that has kept two since
        (found(), Lost({0}, {0}), 7),
        (found(), Lost({0, 1}), 6),  # both keepers; each disk has 6
        (found(), Lost({0, 1}, {0}), 4),
        (found(sent=6), Lost({0, 1}, {1}), 4),
        (found(sent=-1, disk=-1), Lost({0}, {0}), 4),
        (found(kept=5, sent=-1, disk=-1), Lost(), 5),
    ],
)
def test_what_the_next_job_must_find(said: Found, lost: Lost, least: int) -> None:
    assert promised(said, (0, 1), lost, ([1], [0])) == least


@pytest.mark.parametrize(
    ("sent", "n_peers", "step"),
    [
        (([6, 7], [6, 7]), 1, 7),
        (([6, 7], [6]), 1, 6),
        (([6, 7], []), 1, -1),
        (([6, 6, 7], [6, 6, 7, 7]), 2, 6),
        (([], []), 0, -1),
    ],
)
def test_a_step_was_sent_by_all_if_each_peer_of_each_process_has_it(
    sent: Sequence[Sequence[int]], n_peers: int, step: int
) -> None:
    assert _sent_by_all(sent, n_peers) == step
