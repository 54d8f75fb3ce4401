"""Errors that name the options of the command line, where they name arguments of Python."""

from __future__ import annotations

__all__ = ("in_options",)

import re
import shlex
from collections.abc import Callable
from typing import Final


def _bare(name: str) -> str:
    """Match an argument's name in a sentence, and not in a path, a key path or a quoted text."""
    return rf"(?<![\w'\"\[/.]){name}(?:=[0-9]+)?(?![\w'\"\]/])"


# What errors of the library say, and what is said here. The first that fits a place counts.
_OPTIONS: Final[tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]] = (
    (r"pass overwrite=True", "give --overwrite"),
    (r"\bitem=(['\"])(.*?)\1", lambda found: f"--item {found[2]}"),
    (r"pass format='safetensors'", "give --format safetensors"),
    (r"pass split=None", "give --flat"),
    (r"\bsplit=(['\"])(.*?)\1", lambda found: f"--split {found[2]}"),
    (r"\boverwrite=True\b", "--overwrite"),
    (r"\bdtype=(['\"])(.*?)\1", lambda found: f"--dtype {found[2]}"),
    (r"\brename=\{(['\"])(.*?)\1: None\}", lambda found: f"--rename {shlex.quote(found[2] + '=')}"),
    (_bare("max_shard_bytes"), "--max-shard-bytes"),
    (_bare("max_expansion"), "--max-expansion"),
    (_bare("custom_metadata"), "--metadata"),
    (_bare("save_format"), "--codec, --zarr or --directories"),
    (_bare("memory_limit"), "--memory"),
    (r"\brename names it, but", "--rename names it, but"),
    (r"\bdtype names (?=['\"])", "--dtype names "),
)


def in_options(text: str) -> str:
    """Return the text of an error with the command line's names for what it advises."""
    for pattern, said in _OPTIONS:
        text = re.sub(pattern, said, text)

    return text
