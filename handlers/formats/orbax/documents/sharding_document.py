"""`_sharding`: the sharding of each jax.Array, as JSON as text within JSON.

Only the array handler interprets the texts.

Source:
    ORBAX_FORMAT.md §1.3.
"""

from __future__ import annotations

__all__ = ("decode", "encode")

import json
from base64 import urlsafe_b64encode
from binascii import a2b_base64
from collections.abc import Iterable
from typing import Final

from msgspec.json import Decoder

from penstock.handlers.formats.common.checked_json import as_string, parse_distinct
from penstock.handlers.formats.common.json_slices import UnusualFormError, decode_object
from penstock.kernel.errors import CorruptCheckpointError

_BOUNDARY: Final = b'}","'  # each text is that of a JSON object
_TEXTS: Final = Decoder(dict[str, str])


def encode(shardings: Iterable[tuple[str, str]]) -> bytes:
    """Encode stored names with their sharding texts.

    If the file exists, Orbax fails to restore arrays that are not in it. So either every jax.Array is in it,
    or there is no file.
    """
    quoted: dict[str, str] = {}  # many arrays, few shardings
    entries: list[str] = []
    for name, text in shardings:
        value = quoted.get(text)
        if value is None:
            value = quoted[text] = json.dumps(text)

        entries.append(f'"{urlsafe_b64encode(name.encode()).decode()}": {value}')

    return f"{{{', '.join(entries)}}}".encode()


def decode(path: str, data: bytes) -> dict[str, str]:
    """Read the document: stored name to sharding text.

    Raises:
        CorruptCheckpointError: If it is not JSON, a member is not a text, or a name occurs twice.
    """
    try:
        texts = decode_object(_TEXTS, data, _BOUNDARY)
    except UnusualFormError:
        members = parse_distinct(path, data)
        texts = {name: as_string(path, f"the sharding of {name!r}", members[name]) for name in members}

    found: dict[str, str] = {}
    for encoded, text in texts.items():
        try:
            found[a2b_base64(encoded.replace("-", "+").replace("_", "/")).decode()] = text
        except ValueError as error:
            raise CorruptCheckpointError(path, f"the key {encoded!r} is not base64 of a name") from error

    return found
