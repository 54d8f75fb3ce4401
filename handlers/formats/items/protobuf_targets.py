"""Protobuf messages as restore targets. A message is stored as text, which does not name its class."""

from __future__ import annotations

__all__ = ("message_target",)

import sys
from collections.abc import Callable
from typing import Any

from penstock.kernel.errors import CorruptCheckpointError


def message_target(like: Any, path: str) -> tuple[Any, Callable[[Any], Any]]:
    """Return the target to restore to, and a function from the restored value to the result.

    Args:
        like: A target. A message, or a class of messages, stands for a message of that class. Any other
            target is returned as it is.
        path: What is restored, for the error.
    """
    protobuf = sys.modules.get("google.protobuf.message")  # a caller that has a message has imported protobuf
    cls: type = like if isinstance(like, type) else type(like)
    if protobuf is None or not issubclass(cls, protobuf.Message):
        return like, _same

    return str, lambda text: _parse(text, cls, path)


def _same(value: Any) -> Any:
    return value


def _parse(text: str, cls: type, path: str) -> Any:
    from google.protobuf import text_format

    try:
        return text_format.Parse(text, cls())
    except text_format.ParseError as error:
        raise CorruptCheckpointError(path, f"holds no text of a {cls.__name__}: {error}") from error
