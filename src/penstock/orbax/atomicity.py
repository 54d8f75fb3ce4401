"""Orbax's classes of temporary paths: names of the ways that a checkpoint becomes visible.

penstock builds and publishes by itself, and asks a class only which way it stands for.
"""

from __future__ import annotations

__all__ = (
    "COMMIT_SUCCESS_FILE",
    "TMP_DIR_SUFFIX",
    "AtomicRenameTemporaryPath",
    "CommitFileTemporaryPath",
    "TemporaryPath",
    "get_default_temporary_path_class",
    "get_item_default_temporary_path_class",
)

import os
from typing import Any, ClassVar, Final, cast

from penstock.embedding import file_names
from penstock.errors import ConfigError
from penstock.orbax.installation import ORBAX
from penstock.orbax.item_files import bucket_url
from penstock.orbax.options import AtomicityMode, AtomicityOptions

COMMIT_SUCCESS_FILE: Final = file_names.COMMIT_MARK
TMP_DIR_SUFFIX: Final = file_names.TEMPORARY_SUFFIX


class TemporaryPath:
    """Base of the classes that stand for a way to publish. They have no instances here."""

    MODE: ClassVar[AtomicityMode]


class AtomicRenameTemporaryPath(TemporaryPath):
    """Stands for `AtomicityMode.ATOMIC_RENAME`."""

    MODE = AtomicityMode.ATOMIC_RENAME


class CommitFileTemporaryPath(TemporaryPath):
    """Stands for `AtomicityMode.COMMIT_FILE`."""

    MODE = AtomicityMode.COMMIT_FILE


_CLASSES: Final = {one.__name__: one for one in (AtomicRenameTemporaryPath, CommitFileTemporaryPath)}
_STEPS: Final = frozenset(
    {
        *("create", "finalize", "from_final", "from_temporary", "get", "get_awaitable_path", "get_final"),
        *("validate", "validate_final"),
    }
)
"""What Orbax calls of such a class."""


def chosen_atomicity(temporary_path_class: Any, options: AtomicityOptions | None) -> AtomicityOptions | None:
    """Return how a checkpoint becomes visible: what the class stands for, if there is one, or the options.

    Args:
        temporary_path_class: Ours or Orbax's, or derived from one of these; None for none.
        options: Of the caller; None for the defaults.

    Raises:
        ConfigError: If the class builds or publishes by itself. It is a ValueError.
    """
    if temporary_path_class is None:
        return options

    own: set[str] = set()
    for base in getattr(temporary_path_class, "__mro__", ()):
        known = _CLASSES.get(base.__name__) if base.__module__.startswith((__name__, ORBAX)) else None
        if known is None:
            own |= _STEPS & cast("dict[str, Any]", vars(base)).keys()
        elif own:
            break
        else:
            legacy = options is not None and options.allow_legacy_atomic_rename
            return AtomicityOptions(known.MODE, legacy)

    shown = getattr(temporary_path_class, "__qualname__", repr(temporary_path_class))
    what = f"has its own {', '.join(sorted(own))}" if own else "is no class of temporary paths"
    raise ConfigError(
        "temporary_path_class",
        f"{shown} {what}: penstock builds and publishes checkpoints itself, as {' or '.join(_CLASSES)}, "
        "or a class derived from one that replaces none of its steps",
    )


def get_default_temporary_path_class(
    path: str | os.PathLike[str], *, atomicity_options: AtomicityOptions | None = None
) -> type[TemporaryPath]:
    """Return the class that stands for the way of the options; by default for what the place has."""
    mode = AtomicityMode.AUTO if atomicity_options is None else atomicity_options.mode
    if mode is AtomicityMode.AUTO:
        mode = AtomicityMode.ATOMIC_RENAME if bucket_url(path) is None else AtomicityMode.COMMIT_FILE

    return next(one for one in _CLASSES.values() if one.MODE is mode)


get_item_default_temporary_path_class = get_default_temporary_path_class
