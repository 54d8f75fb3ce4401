"""Splits names into key paths. Pure."""

from __future__ import annotations

__all__ = ("empty_marker", "split_name")

from typing import Any, cast

from penstock.handlers.formats.safetensors.penstock_metadata import Steps, keys_and_kinds
from penstock.kernel.protocols.leaf import KeyKind, KeyPath


def split_name(name: str, separator: str, recorded: Steps | None) -> tuple[KeyPath, tuple[KeyKind, ...]]:
    """Return the key path that a name stands for, which is `recorded` if that is known."""
    if recorded is not None:
        return keys_and_kinds(recorded)

    keys = tuple(name.split(separator))
    return keys, (KeyKind.MAPPING,) * len(keys)


def empty_marker(value: Any) -> str | None:
    """Return the stored marker for None or an empty container; None for anything else."""
    if value is None:
        return "None"
    for type_, marker in ((tuple, "Tuple"), (list, "List"), (dict, "Dict")):
        if isinstance(value, type_) and not value:
            return "None" if hasattr(cast("object", value), "_fields") else marker

    return None
