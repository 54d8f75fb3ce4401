"""What the primary finds out for all processes of a job."""

from __future__ import annotations

__all__ = ("act_on_answer",)

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from penstock.kernel.protocols.coordinator import Operation
from penstock.orbax.joint.plain_values import digest_of_lines

T = TypeVar("T")


async def act_on_answer(
    operation: Operation,
    asked: Sequence[str],
    answer: Callable[[], Awaitable[str]],
    act: Callable[[str], Awaitable[T]],
) -> T:
    """Return what `act` makes of the primary's answer, once it has in all processes.

    So what the primary refuses, all can refuse by the same error. What another process sees of a shared
    directory does not count: on a network it may be seen there later.

    Args:
        operation: Not joined yet. All processes come, or all raise.
        asked: What must be the same in all: for each leaf or option its name, a tab, and what it is.
        answer: Called in the primary, once all have asked the same; a short text.
        act: Called with it in each process. If it raises in one, the others raise, too.

    Raises:
        PeerError: If another process asks something else, failed, or does not come.
        Exception: What `answer` or `act` raises here.
    """
    plan = digest_of_lines(asked)
    found: list[T] = []
    async with operation.running():
        operation.at("ask")
        await operation.agree(plan, lambda: asked)
        if operation.is_primary:
            told = await answer()
            await operation.begin(told)
        else:
            told, _ = await operation.wait_begun(plan, lambda: asked)

        operation.at("prepare")
        found.append(await act(told))
        if operation.is_primary:
            await operation.parts()
            await operation.decide()
            await operation.tell_published()
        else:
            await operation.bring(b"")
            await operation.wait_published()

    return found[0]
