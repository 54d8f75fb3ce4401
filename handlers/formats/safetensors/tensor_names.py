"""Splits names into key paths, and refuses names that cannot form one tree. Pure."""

from __future__ import annotations

__all__ = ("check_tree", "empty_marker", "split_name")

from collections.abc import Sequence
from typing import Any, cast

from penstock.handlers.formats.safetensors.penstock_metadata import Steps, keys_and_kinds
from penstock.kernel.errors import SpecError
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, ParamInfo


def split_name(name: str, separator: str, recorded: Steps | None) -> tuple[KeyPath, tuple[KeyKind, ...]]:
    """Return the key path that a name stands for, which is `recorded` if that is known."""
    if recorded is not None:
        return keys_and_kinds(recorded)

    keys = tuple(name.split(separator))
    return keys, (KeyKind.MAPPING,) * len(keys)


def check_tree(path: str, names: Sequence[ParamInfo], split: Sequence[ParamInfo], separator: str) -> None:
    """Refuse two equal key paths, and a key path that is a prefix of another.

    Args:
        path: Of the checkpoint, for the error.
        names: The leaves under their names.
        split: The same leaves, in the same order, at their key paths.
        separator: For the error.

    Raises:
        SpecError: Naming both.
    """
    owners: dict[KeyPath, str] = {}
    for flat, info in zip(names, split, strict=True):
        first = owners.setdefault(info.keys, flat.name)
        if first != flat.name:
            raise _collision(path, first, flat.name, separator)

    for flat, info in zip(names, split, strict=True):
        for depth in range(len(info.keys)):
            shorter = owners.get(info.keys[:depth])
            if shorter is not None:
                raise _collision(path, shorter, flat.name, separator)


def empty_marker(value: Any) -> str | None:
    """Return the stored marker for None or an empty container; None for anything else."""
    if value is None:
        return "None"
    for type_, marker in ((tuple, "Tuple"), (list, "List"), (dict, "Dict")):
        if isinstance(value, type_) and not value:
            return "None" if hasattr(cast("object", value), "_fields") else marker

    return None


def _collision(path: str, first: str, second: str, separator: str) -> SpecError:
    return SpecError(
        f"{path}: {first!r} and {second!r} cannot both stand in one tree when names are split at "
        f"{separator!r}; read it flat, without split"
    )
