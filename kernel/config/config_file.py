"""Finds the TOML file of the options, and the profile in it that is chosen."""

from __future__ import annotations

__all__ = (
    "FILE_NAME",
    "FILE_VARIABLE",
    "PROFILE_VARIABLE",
    "FoundFile",
    "find_file",
    "options_in",
    "profiles_in",
)

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, cast, final

from penstock.kernel.config.option_layers import ENVIRONMENT_PREFIX, Table, merged, sourced
from penstock.kernel.errors import ConfigError

FILE_NAME: Final = "penstock.toml"
FILE_VARIABLE: Final = f"{ENVIRONMENT_PREFIX}CONFIG"
PROFILE_VARIABLE: Final = f"{ENVIRONMENT_PREFIX}PROFILE"
_PROFILES: Final = "profiles"
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


def options_in(file: FoundFile, profile: str | None, profile_told_by: str) -> Table:
    """Return the options of a file, and over them those of a profile in it. Blocking.

    Raises:
        ConfigError: If the file cannot be read or is not TOML, or it has no such profile.
    """
    toml = _read(file)
    profiles = _profiles(toml, file)
    table = sourced({name: value for name, value in toml.items() if name != _PROFILES}, file.path)
    if profile is None:
        return table
    if profile not in profiles:
        near = get_close_matches(profile, profiles, n=1) or sorted(profiles)
        known = f"{file.path!r} has {', '.join(near) or 'none'}"
        raise ConfigError(_PROFILES, f"there is no profile {profile!r}; {known}", profile_told_by)

    return merged(table, sourced(profiles[profile], file.path, f"{_PROFILES}.{profile}"))


def profiles_in(file: FoundFile) -> tuple[str, ...]:
    """Return the names of the profiles in a file. Blocking.

    Raises:
        ConfigError: If the file cannot be read or is not TOML.
    """
    return tuple(_profiles(_read(file), file))


def _profiles(toml: Mapping[str, object], file: FoundFile) -> Mapping[str, Mapping[str, object]]:
    found = toml.get(_PROFILES, {})
    if not isinstance(found, dict):
        raise ConfigError(_PROFILES, f"must be a table of tables, not {found!r}", file.path)

    profiles = cast("Mapping[str, object]", found)
    for name, profile in profiles.items():
        if not isinstance(profile, dict):
            raise ConfigError(f"{_PROFILES}.{name}", f"must be a table, not {profile!r}", file.path)

    return cast("Mapping[str, Mapping[str, object]]", profiles)


def _read(file: FoundFile) -> dict[str, object]:
    try:
        with open(file.path, "rb") as opened:
            return tomllib.load(opened)
    except OSError as error:
        raise ConfigError("config", f"cannot read {file.path!r}: {error.strerror}", file.told_by) from error
    except ValueError as error:  # not TOML, or not even UTF-8
        raise ConfigError("config", f"{file.path!r} is not TOML: {error}", file.told_by) from error


def _check_ours(path: str) -> None:
    if os.stat(path).st_mode & _ANYBODY_WRITES:
        problem = f"everybody may write to {path!r}; name it by {FILE_VARIABLE}, or take that right away"
        raise ConfigError("config", problem, "the working directory")
