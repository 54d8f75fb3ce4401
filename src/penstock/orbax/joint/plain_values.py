"""Values that every process of a job has whole, in words: one line that differs if they do."""

from __future__ import annotations

__all__ = ("described_json", "described_message", "digest_of_lines")

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Final

SHOWN: Final = 200
"""Characters of a value that are told to the other processes as they are."""


def described_json(value: Any) -> str:
    """Describe a JSON value; one that JSON cannot hold in no detail, since its handler says what is wrong."""
    try:
        text = json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return "JSON"

    return f"JSON {text if len(text) <= SHOWN else f'{text[:SHOWN]}… {_digest(text.encode())}'}"


def described_message(message: Any) -> str:
    """Describe a protobuf message."""
    return f"a message {_digest(message.SerializeToString(deterministic=True))}"


def digest_of_lines(lines: Iterable[str]) -> bytes:
    """Return what tells at once whether all processes ask the same, which `lines` describe."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).digest()


def _digest(data: bytes) -> str:
    return f"with the SHA-256 {hashlib.sha256(data).hexdigest()}"
