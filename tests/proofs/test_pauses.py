"""A few of the pauses of `make pauses`."""

from __future__ import annotations

import sys

import pytest
from tests.proofs import pauses

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("role", pauses.ROLES)
def test_a_paused_process_blames_no_other_and_is_the_only_one_that_is_named(
    role: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pauses", "--pauses", "3", "--roles", role])
    assert pauses.main() == 0, capsys.readouterr().out
