"""`_sharding`: the sharding of each jax.Array, as a JSON text within a JSON document.

What the texts mean is the array handler's business.

Source:
    ORBAX_FORMAT.md §1.3.
"""

from __future__ import annotations

__all__ = ("decode", "encode")

import json
from base64 import urlsafe_b64encode
from binascii import a2b_base64
from collections.abc import Iterable
from typing import cast

from penstock.handlers.formats.common.checked_json import as_string, parse_object
from penstock.handlers.formats.common.json_slices import SLICE, slices
from penstock.kernel.errors import CorruptCheckpointError


def encode(shardings: Iterable[tuple[str, str]]) -> bytes:
    """Encode stored names with their sharding texts.

    Orbax fails to restore an array that the file lacks while the file is there, so either every
    jax.Array is in it or there is no file.
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
        CorruptCheckpointError: If it is not what such a document would be.
    """
    found: dict[str, str] = {}
    for document in _parts(path, data):
        for encoded, text in document.items():
            try:
                name = a2b_base64(encoded.replace("-", "+").replace("_", "/")).decode()
            except ValueError as error:
                raise CorruptCheckpointError(path, f"the key {encoded!r} is not base64 of a name") from error

            if type(text) is not str:
                as_string(path, f"the sharding of {name!r}", text)

            found[name] = cast("str", text)

    return found


def _parts(path: str, data: bytes) -> list[dict[str, object]]:
    """Parse a long document part by part, if it is of the usual form: each text an object's."""
    if len(data) > SLICE:
        try:
            text = data.decode()
            mark = '}", "' if '}", "' in text else '}","'
            parts = slices(text, 1, len(text) - 1, mark, 2)
            if text[0] == "{" and text[-1] == "}":
                return [parse_object(path, f"{{{part}}}".encode()) for part in parts]
        except (UnicodeDecodeError, CorruptCheckpointError):
            pass  # the whole of it tells better what is wrong

    return [parse_object(path, data)]
