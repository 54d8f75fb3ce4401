"""Looking needs no event loop, unless something is to be waited for."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import anyio
import pytest

from penstock.errors import NotACheckpointError
from penstock.handlers import LocalStore
from penstock.inspection.looking import run_here


def test_what_only_looks_is_run_here_and_without_an_event_loop() -> None:
    async def read(threads: Any) -> tuple[int, int]:
        with pytest.raises(RuntimeError):
            anyio.get_current_task()

        return await threads.run(get_ident), await threads.run(max, 3, 5)

    assert run_here(LocalStore(), read) == (get_ident(), 5)


def test_what_has_to_wait_is_run_again_in_an_event_loop() -> None:
    calls: list[int] = []

    async def read(threads: Any) -> int:
        calls.append(await threads.run(get_ident))
        await anyio.lowlevel.checkpoint()  # as of a wait for a deletion to end
        return len(calls)

    assert run_here(LocalStore(), read) == 2
    assert calls[0] == get_ident() != calls[1]


def test_a_network_is_waited_for_in_an_event_loop() -> None:
    class FarStore(LocalStore):  # type: ignore[misc]  # final, and all but this is the same
        @property
        def over_network(self) -> bool:
            return True

    async def read(threads: Any) -> int:
        return int(await threads.run(get_ident))

    assert run_here(FarStore(), read) != get_ident()


def test_what_is_raised_is_raised_as_it_is() -> None:
    async def read(threads: Any) -> int:
        raise NotACheckpointError("there", "does not exist")

    with pytest.raises(NotACheckpointError, match="there: does not exist"):
        run_here(LocalStore(), read)
