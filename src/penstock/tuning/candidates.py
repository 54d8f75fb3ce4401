"""Which options `penstock tune` tries."""

from __future__ import annotations

__all__ = (
    "BUCKET_CANDIDATES",
    "CANDIDATES",
    "CODECS",
    "Candidate",
    "candidates_for",
    "given_candidate",
    "nested_tables",
)

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from penstock.tuning.search import Flow, Options

Candidate: TypeAlias = "tuple[Flow, Options]"

CANDIDATES: Final[Sequence[Candidate]] = (
    ("save", {"store.io": "buffered"}),
    ("save", {"store.io": "direct"}),
    ("save", {"save.write.concurrency": 2}),
    ("save", {"save.write.concurrency": 8}),
    ("save", {"save.write.concurrency": 16}),
    ("save", {"save.piece_bytes": 4 << 20}),
    ("save", {"save.piece_bytes": 64 << 20}),
    ("restore", {"restore.read.concurrency": 1}),
    ("restore", {"restore.read.concurrency": 4}),
    ("restore", {"restore.read.concurrency": 8}),
    ("restore", {"restore.read.concurrency": 16}),
    ("restore", {"restore.piece_bytes": 8 << 20}),
    ("restore", {"restore.piece_bytes": 128 << 20}),
)
BUCKET_CANDIDATES: Final[Sequence[Candidate]] = (
    *[("save", {"save.write.concurrency": n}) for n in (4, 8, 32, 64)],
    *[("restore", {"restore.read.concurrency": n}) for n in (4, 8, 32, 64)],
)
"""A bucket has no page cache, and what waits for a network may do much at once."""

CODECS: Final[Sequence[Candidate]] = (
    ("save", {"format.codec": "auto"}),
    ("save", {"format.codec": "zstd:1"}),
)
"""Tried with a checkpoint of the user's own alone: how well a made-up one compresses says nothing."""

_TIMES: Final = (16, 4)


def candidates_for(
    *, is_bucket: bool, own_tree: bool, limit_bytes: int | None, free_bytes: int
) -> Sequence[Candidate]:
    """Return what is tried on a store.

    Args:
        is_bucket: Whether it is one.
        own_tree: Whether a checkpoint of the user's own is saved.
        limit_bytes: The memory budget, if the configuration sets one. A larger one is tried first, if there
            is room: a budget that is too small slows down whatever else is set.
        free_bytes: Memory that the process can still get. At most half of it is tried as a budget.
    """
    found: list[Candidate] = []
    if limit_bytes is not None:
        larger = [times * limit_bytes for times in _TIMES if times * limit_bytes <= free_bytes // 2]
        found.extend(("save", {"memory.limit_bytes": limit}) for limit in larger[:1])

    found += BUCKET_CANDIDATES if is_bucket else CANDIDATES
    return [*found, *(CODECS if own_tree else ())]


def given_candidate(text: str) -> Candidate:
    """Return the candidate of `KEY=VALUE`, as in `save.write.concurrency=8`.

    Raises:
        ValueError: If it is not of that form.
    """
    key, equals, value = text.partition("=")
    if not equals or "." not in key or not value:
        raise ValueError(f"{text!r} is not of the form SECTION.OPTION=VALUE")

    flow: Flow = "restore" if key.startswith("restore.") else "save"
    return flow, {key: int(value) if value.isdecimal() else value}


def nested_tables(options: Options) -> dict[str, Any]:
    """Return dotted keys as nested tables."""
    tables: dict[str, Any] = {}
    for key, value in options.items():
        *sections, name = key.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})

        table[name] = value

    return tables
