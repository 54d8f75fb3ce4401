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
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.json import Decoder

from penstock.handlers.formats.common.checked_json import as_string, parse_distinct
from penstock.handlers.formats.common.json_slices import UnusualFormError, decode_object
from penstock.kernel.concurrency.brief_steps import STEP_BYTES
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols.leaf_infos import SLICE

_BOUNDARY: Final = b'}","'  # each text is that of a JSON object
_TEXTS: Final = Decoder(dict[str, str])


def encode(names: Sequence[str], shardings: Sequence[str]) -> Iterator[bytes]:
    """Encode stored names with their sharding texts.

    If the file exists, Orbax fails to restore arrays that are not in it. So either every jax.Array is in it,
    or there is no file.

    Yields:
        Slices of the document.
    """
    quoted = {text: f'": {json.dumps(text)}'.encode() for text in set(shardings)}  # many arrays, few of them
    comma = b'"'
    yield b"{"
    # Of a job of thousands of processes each text has thousands of numbers.
    longest = max(map(len, quoted.values()), default=1)
    step = min(SLICE, max(STEP_BYTES // longest, 1))
    for at in range(0, len(names), step):
        rows = zip(names[at : at + step], shardings[at : at + step], strict=True)
        yield comma + b', "'.join([urlsafe_b64encode(name.encode()) + quoted[text] for name, text in rows])
        comma = b', "'

    yield b"}"


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
