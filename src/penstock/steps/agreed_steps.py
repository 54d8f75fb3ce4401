"""The steps that there are, the same for all managers of a job."""

from __future__ import annotations

__all__ = (
    "OwnStep",
    "agreed_steps",
    "common_steps",
)

import json
import zlib
from base64 import b85decode, b85encode
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias, cast, final

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

    async def begin(_: Mapping[int, bytes]) -> tuple[str, bytes]:
        return _encoded(found, name_of), b""

    async with operation.running():
        operation.at("open")
        found = await find()
        told, _ = await operation.agree(b"steps", list, begin)
        if not operation.is_primary:  # which has them at hand
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

    async def begin(_: Mapping[int, bytes]) -> tuple[str, bytes]:
        return "", b""

    async with operation.running():
        operation.at("open")
        found = await find()
        saves = {step: own.save for step, own in found.items() if own.save is not None}
        await operation.agree(b"steps on local disks", list, begin)
        common = set(_decoded_saves(await operation.combine(_encoded_saves(saves), _saves_of_all)))

    return (
        {step: own.name for step, own in found.items() if step in common},
        {step: own.name for step, own in found.items() if step not in common and own.is_part},
    )


def _saves_of_all(parts: Mapping[int, bytes]) -> bytes:
    """Return the steps that every process has from the same save."""
    first, *others = [_decoded_saves(part) for part in parts.values()]
    return _encoded_saves(
        {step: save for step, save in first.items() if all(other.get(step) == save for other in others)}
    )


def _encoded_saves(saves: Mapping[int, str]) -> bytes:
    return zlib.compress(json.dumps(list(saves.items())).encode(), 1)


def _decoded_saves(told: bytes) -> dict[int, str]:
    try:
        rows = cast("list[tuple[int, str]]", json.loads(zlib.decompress(told)))
        return {int(step): str(save) for step, save in rows}
    except (ValueError, TypeError, zlib.error) as error:
        raise CoordinationError(f"the steps of another process cannot be read: {error}") from error
