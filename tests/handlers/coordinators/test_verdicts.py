"""What the other processes are told of a failure."""

from __future__ import annotations

from penstock.errors import PeerFailedError
from penstock.handlers.coordinators.procedures import verdict_of


def test_who_failed_in_an_operation_within_this_one_is_blamed_and_not_who_passes_it_on() -> None:
    error = PeerFailedError(2, "write", "['x']", "OSError: no room")

    told = verdict_of(error, 0, "handlers").error()

    assert isinstance(told, PeerFailedError)
    assert (told.processes, told.peer_stage, told.key_path) == ((2,), "write", "['x']")
    assert str(told) == str(error)
