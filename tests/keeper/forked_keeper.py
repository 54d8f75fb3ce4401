"""Keepers that are forks of a process that has imported what they need."""

from __future__ import annotations

__all__ = ("Process", "fork_a_keeper")

from collections.abc import Sequence

from tests.forked_program import Process, fork

from penstock.keeper.process import main

IMPORTED = ["penstock.keeper.process", "anyio._backends._asyncio"]


def fork_a_keeper(given: Sequence[str]) -> Process:
    """Run a keeper with these arguments and this process's environment."""
    return fork(main, given, IMPORTED)
