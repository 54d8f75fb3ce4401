"""The steps that there are, the same for all managers of a job."""

from __future__ import annotations

__all__ = ("agreed_steps",)

import json
import zlib
from base64 import b85decode, b85encode
from collections.abc import Awaitable, Callable, Mapping
from itertools import accumulate, pairwise
from typing import TypeAlias

from penstock.kernel.errors import CoordinationError
from penstock.kernel.protocols.coordinator import Operation

NameOf: TypeAlias = Callable[[int], str]


async def agreed_steps(
    operation: Operation, find: Callable[[], Awaitable[Mapping[int, str]]], name_of: NameOf
) -> Mapping[int, str]:
    """Return the steps that the primary finds, the same in all processes: number to name, ascending.

    What another process finds does not count: on a network a directory may be seen there later.

    Args:
        operation: Not joined yet. All processes come, or all raise.
        find: Makes the root ready in each process, and lists it in the primary.
        name_of: Names the directory of a step.

    Raises:
        PeerError: If another process failed, or did not come.
        CoordinationError: If the service cannot be reached.
    """
    found: Mapping[int, str] = {}
    async with operation.running():
        operation.at("open")
        found = await find()
        await operation.agree(b"steps", list)
        if operation.is_primary:
            await operation.begin(_encoded(found, name_of))
        else:
            told, _ = await operation.wait_begun(b"steps", list)
            found = _decoded(told, name_of)

    return found


def _encoded(steps: Mapping[int, str], name_of: NameOf) -> str:
    """Return a text that stays short for many steps: most follow at equal distances, under plain names."""
    apart = [later - earlier for earlier, later in pairwise([0, *steps])]
    odd = {step: name for step, name in steps.items() if name_of(step) != name}
    return b85encode(zlib.compress(json.dumps([apart, odd]).encode(), 1)).decode()


def _decoded(told: str, name_of: NameOf) -> dict[int, str]:
    try:
        apart, odd = json.loads(zlib.decompress(b85decode(told)))
        return {step: odd.get(str(step)) or name_of(step) for step in accumulate(apart)}
    except (ValueError, TypeError, zlib.error) as error:
        raise CoordinationError(f"the steps that the primary found cannot be read: {error}") from error
