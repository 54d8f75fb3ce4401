"""Puts the memory of leaves that are too small for huge pages of their own together."""

from __future__ import annotations

__all__ = ("join_memory",)

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from penstock.kernel.messages.packs import ReadLeaf
from penstock.kernel.protocols.reads import Joining
from penstock.stages.common.batching import grouped

LEAST: Final = 64 * 1024
"""Bytes. What is smaller is read in packs, or costs less than its share of a page."""

OWN_FROM: Final = 4 * 2**20
"""Bytes. What is larger has huge pages of its own. Without them each 4 KiB costs a page fault, which takes
twice as long as reading them."""

TOGETHER: Final = 16 * 2**20
"""Bytes of one allocation: what the last of its leaves may keep from the system."""


def join_memory(leaves: Sequence[ReadLeaf]) -> None:
    """Have neighbouring leaves of medium size share allocations, if their values keep the memory."""
    regions = (
        region
        for leaf in leaves
        if not leaf.target.staging_bytes
        for region in leaf.target.regions
        if isinstance(region, Joining) and LEAST <= region.nbytes < OWN_FROM
    )
    for alike in _runs_of_one_class(regions):
        for group in grouped(alike, TOGETHER):
            if len(group) > 1:
                group[0].join(group[1:])


def _runs_of_one_class(regions: Iterable[Joining]) -> Iterator[list[Joining]]:
    found: dict[type, list[Joining]] = {}
    for region in regions:
        found.setdefault(type(region), []).append(region)

    yield from found.values()
