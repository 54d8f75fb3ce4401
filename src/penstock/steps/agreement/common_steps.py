"""The steps that all processes of a job have on their own disks."""

from __future__ import annotations

__all__ = ("OwnStep", "common_steps")

import json
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import cast, final

from penstock.kernel.errors import CoordinationError
from penstock.kernel.protocols.coordinator import Operation


@final
@dataclass(frozen=True, slots=True)
class OwnStep:
    """A step that one process finds on its disk."""

    name: str  #: of its directory
    save: str | None  #: what tells the save that made it; None if it is of no use to these processes
    is_part: bool  #: whether it is this process's part of what these very processes saved


async def common_steps(
    operation: Operation, find: Callable[[], Awaitable[Mapping[int, OwnStep]]]
) -> tuple[Mapping[int, str], Mapping[int, str]]:
    """Return the steps that all processes have, from one save each, and the parts here of all other steps.

    Both are number to name, ascending; the numbers of the first are the same in all processes.

    Args:
        operation: Not joined yet. All processes come, or all raise.
        find: Makes the root ready, and lists it, by number ascending. Called in each process.

    Raises:
        PeerError: If another process failed, or did not come.
        CoordinationError: If the service cannot be reached.
    """
    found: Mapping[int, OwnStep] = {}
    common: set[int] = set()
    async with operation.running():
        operation.at("open")
        found = await find()
        saves = {step: own.save for step, own in found.items() if own.save is not None}
        await operation.agree(b"steps on local disks", list)
        if operation.is_primary:
            await operation.begin("")
            others = [_decoded(part) for part in (await operation.parts()).values()]
            saves = {
                step: save for step, save in saves.items() if all(other.get(step) == save for other in others)
            }
            await operation.decide()
            await operation.tell_published(_encoded(saves))
        else:
            await operation.wait_begun(b"steps on local disks", list)
            await operation.bring(_encoded(saves))
            saves = _decoded(await operation.wait_published())

        common = set(saves)

    return (
        {step: own.name for step, own in found.items() if step in common},
        {step: own.name for step, own in found.items() if step not in common and own.is_part},
    )


def _encoded(saves: Mapping[int, str]) -> bytes:
    return zlib.compress(json.dumps(list(saves.items())).encode(), 1)


def _decoded(told: bytes) -> dict[int, str]:
    try:
        rows = cast("list[tuple[int, str]]", json.loads(zlib.decompress(told)))
        return {int(step): str(save) for step, save in rows}
    except (ValueError, TypeError, zlib.error) as error:
        raise CoordinationError(f"the steps of another process cannot be read: {error}") from error
