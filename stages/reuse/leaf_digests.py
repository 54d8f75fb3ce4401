"""Digests of the bytes of leaves, by which unchanged ones are recognised."""

from __future__ import annotations

__all__ = ("digest_name", "take_digests")

from collections.abc import Mapping, Sequence
from hashlib import sha256
from operator import attrgetter

from penstock.kernel.messages.leaves import Leaf
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.stages.messages.batching import grouped


def digest_name(run: SaveRun, name: str) -> str:
    """Return the name under which the digest of a leaf is recorded.

    Several processes that save together record one each of what they write of a leaf. It means nothing to
    another number of processes.
    """
    if run.operation.is_alone:  # as it is on disk
        return name

    index, count = run.process
    return f"{name}\0{index}/{count}"  # no stored name contains a NUL


async def take_digests(run: SaveRun, leaves: Sequence[Leaf]) -> Mapping[str, bytes]:
    """Return the SHA-256 of every leaf that has bytes, by stored name. Reads every byte.

    If several processes save together, it is that of what this one writes of a leaf.

    The bytes that must be copied to the host are leased, up to one piece at a time.
    """
    found: dict[str, bytes] = {}
    most = run.limits.piece_bytes
    for group in await run.threads.run(_groups, leaves, most):
        nbytes = min(most, sum([leaf.spec.nbytes for leaf in group]))
        lease = await run.lease(nbytes, group[0].info.key_path, prioritised=False)
        try:
            found.update(await run.threads.run(_digests, group, most))
        finally:
            lease.release()

    return found


def _groups(leaves: Sequence[Leaf], most: int) -> list[tuple[Leaf, ...]]:
    return list(grouped([leaf for leaf in leaves if leaf.spec.nbytes], most))


def _digests(leaves: Sequence[Leaf], piece_bytes: int) -> dict[str, bytes]:
    """Hash the chunks of each leaf. The digest does not depend on the size or the order of the pieces."""
    found: dict[str, bytes] = {}
    for leaf in leaves:
        digest = sha256()
        plans = leaf.handler.pieces(leaf, piece_bytes)
        for plan in sorted(plans, key=attrgetter("chunk", "start")):
            if plan.start == 0:
                digest.update(repr(plan.chunk).encode())

            digest.update(plan.take())

        found[leaf.info.name] = digest.digest()

    return found
