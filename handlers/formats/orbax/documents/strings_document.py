r"""`_strings.json`: the string leaves, each at the JSON pointer that its name spells.

The name is not escaped, so a `/` in it nests, and `~0` and `~1` in it stand for `~` and `/`.

Source:
    ORBAX_FORMAT.md §1.8; RFC 6901; the names that TensorStore refuses were tested with 0.1.86.
"""

from __future__ import annotations

__all__ = ("decode", "encode", "find")

import json
import re
from collections.abc import Iterable
from typing import Final, cast

from msgspec.json import Decoder

from penstock.handlers.formats.common.checked_json import parse_object
from penstock.handlers.formats.common.json_slices import UnusualFormError, decode_object
from penstock.kernel.errors import CorruptCheckpointError, InvalidLeafError
from penstock.kernel.protocols.leaf import ParamInfo

_BOUNDARY: Final = b'","'
_MEMBERS: Final = Decoder(dict[str, object])
_BAD_ESCAPE: Final = re.compile("~(?![01])")


def encode(leaves: Iterable[tuple[ParamInfo, str]]) -> bytes:
    """Encode the document for the string leaves of a checkpoint: the place and the value of each.

    Raises:
        InvalidLeafError: If the name of a leaf is not a JSON pointer, or leads through another string.
    """
    document: dict[str, object] = {}
    for info, text in leaves:
        name = info.name
        if _BAD_ESCAPE.search(name):
            problem = "a string cannot be stored under a name in which '~' is not followed by 0 or 1"
            raise InvalidLeafError(info.key_path, f"{problem}: {name!r}")

        *outer, last = _steps(name)
        place = document
        for step in outer:
            below = place.setdefault(step, {})
            if not isinstance(below, dict):
                raise _collision(info, step)
            place = cast("dict[str, object]", below)

        if last in place:
            raise _collision(info, last)
        place[last] = text

    return json.dumps(document, separators=(",", ":")).encode()


def decode(path: str, data: bytes) -> dict[str, object]:
    """Read the document, for `find`.

    Raises:
        CorruptCheckpointError: If it is not a JSON object.
    """
    try:
        return decode_object(_MEMBERS, data, _BOUNDARY)
    except UnusualFormError:
        return parse_object(path, data)  # strings within objects, or damage


def find(path: str, document: dict[str, object], name: str, key_path: str) -> str:
    """Look up one string leaf by its stored name.

    Raises:
        CorruptCheckpointError: If there is no string at that place; names the leaf.
    """
    place: object = document
    for step in _steps(name):
        place = _member(place, step)

    if not isinstance(place, str):
        problem = "is missing" if place is None else "is not a string"
        raise CorruptCheckpointError(path, f"the string {name!r} {problem}", key_path=key_path)

    return place


def _steps(name: str) -> list[str]:
    if "~" not in name:
        return name.split("/")

    return [step.replace("~1", "/").replace("~0", "~") for step in name.split("/")]


def _member(place: object, step: str) -> object:
    return cast("dict[str, object]", place).get(step) if isinstance(place, dict) else None


def _collision(info: ParamInfo, step: str) -> InvalidLeafError:
    problem = f"its stored name {info.name!r} collides at {step!r} with that of another string"
    return InvalidLeafError(info.key_path, f"{problem} ('/' in a name nests); rename one")
