"""To whom a process sends its parts."""

from __future__ import annotations

import pytest

from penstock.config import TierOptions
from penstock.errors import ConfigError, SpecError
from penstock.steps import Memory
from penstock.steps.peers import Peer, chosen_peers, next_to_send


def on(*hosts: str) -> dict[int, Peer]:
    return {index: Peer(host, "10.0.0.1", 1) for index, host in enumerate(hosts)}


@pytest.mark.parametrize(
    ("hosts", "count", "chosen"),
    [
        ("ab", 1, [[1], [0]]),
        ("aabb", 1, [[2], [2], [0], [0]]),
        ("abc", 1, [[1], [2], [0]]),
        ("abc", 2, [[1, 2], [2, 0], [0, 1]]),
        ("aab", 2, [[2], [2], [0]]),
        ("aaa", 1, [[], [], []]),
        ("a", 3, [[]]),
    ],
)
def test_peers_are_the_next_processes_on_other_hosts(hosts: str, count: int, chosen: list[list[int]]) -> None:
    peers = on(*hosts)
    assert [list(chosen_peers(index, peers, count)) for index in peers] == chosen


def test_a_number_of_peers_that_is_none_is_refused() -> None:
    for peers in (-1, "one"):
        with pytest.raises(SpecError, match="peers"):
            Memory(peers=peers)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="peers"):
        TierOptions(path="/nvme", peers=1)


@pytest.mark.parametrize(
    ("said", "step", "whole"),
    [
        ([(1, None), (1, None)], 1, None),
        ([(3, 2), (4, 2)], 3, 2),  # who has a newer one sends that afterwards
        ([(3, 2), (3, None)], 3, None),  # one could not send it
        ([(3, 2), (3, 1)], 3, None),
        ([(7, 6)], 7, 6),
    ],
)
def test_all_send_the_newest_step_that_waits_in_all(
    said: list[tuple[int, int | None]], step: int, whole: int | None
) -> None:
    assert next_to_send(said) == (step, whole)
