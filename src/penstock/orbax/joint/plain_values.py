"""Values that every process of a job has whole, in words: one line that differs if they do."""

from __future__ import annotations

__all__ = ("described_json", "described_message")

import hashlib
import json
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


def _digest(data: bytes) -> str:
    return f"with the SHA-256 {hashlib.sha256(data).hexdigest()}"
