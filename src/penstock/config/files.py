"""The file of the configuration: what names it, and whether there is anything to read."""

from __future__ import annotations

__all__ = (
    "FILE_NAME",
    "FILE_VARIABLE",
    "PROFILE_VARIABLE",
    "FoundFile",
    "find_file",
    "has_options",
)

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from penstock.kernel.errors import ConfigError
from penstock.kernel.options import ENVIRONMENT_PREFIX

FILE_NAME: Final = "penstock.toml"
FILE_VARIABLE: Final = f"{ENVIRONMENT_PREFIX}CONFIG"
PROFILE_VARIABLE: Final = f"{ENVIRONMENT_PREFIX}PROFILE"
_ANYBODY_WRITES: Final = 0o002


@final
@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of options, and what named it: `argument`, an environment variable, or the search upwards."""

    path: str
    told_by: str


def find_file(path: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> FoundFile | None:
    """Return the file that an argument or `PENSTOCK_CONFIG` names, or the nearest `penstock.toml` upwards.

    `PENSTOCK_CONFIG` that is set and empty means none. Blocking.

    Raises:
        ConfigError: If everybody may write to what was found upwards: it could be anybody's.
    """
    if path is not None:
        return FoundFile(os.fspath(path), "argument")

    named = environ.get(FILE_VARIABLE)
    if named is not None:
        return FoundFile(named, FILE_VARIABLE) if named else None

    try:
        directory = os.getcwd()
    except OSError:  # it was deleted
        return None

    while True:
        found = os.path.join(directory, FILE_NAME)
        if os.path.isfile(found):
            _check_ours(found)
            return FoundFile(found, "the working directory")

        directory, before = os.path.dirname(directory), directory
        if directory == before:
            return None


def has_options(environ: Mapping[str, str]) -> bool:
    """True if a file or a variable may set an option; else all have their defaults. Blocking.

    What only looks asks this first: to read the options, all of them are loaded.

    Raises:
        ConfigError: As `find_file`.
    """
    named = any(name.startswith(ENVIRONMENT_PREFIX) for name in environ)
    return named or find_file(None, environ) is not None


def _check_ours(path: str) -> None:
    if os.stat(path).st_mode & _ANYBODY_WRITES:
        problem = f"everybody may write to {path!r}; name it by {FILE_VARIABLE}, or take that right away"
        raise ConfigError("config", problem, "the working directory")
