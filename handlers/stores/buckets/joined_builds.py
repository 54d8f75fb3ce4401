"""The save of another process that this one writes into, in a bucket.

The process that began it holds the claim, publishes, and removes what all wrote. The others know the claim by
its token. The page "Commits in a bucket" of docs/design tells what each step is for.
"""

from __future__ import annotations

__all__ = ("is_current", "join", "take_back")

from typing import Final

from penstock.handlers.stores.buckets.build_states import Build, Claim
from penstock.handlers.stores.buckets.claim_records import CLAIM, ClaimRecord
from penstock.handlers.stores.buckets.objects import Objects
from penstock.kernel.concurrency.process_identity import ProcessIdentity

_TRIES: Final = 4
"""The claim may change while it is looked at."""


def join(final: str, place: str, token: str) -> Build:
    """Return a build that writes where the owner of the claim `token` publishes. Asks nobody."""
    claim = Claim(final + CLAIM, token, None, "nothing")
    return Build(final, place, None, claim, is_shared=True, is_joined=True)


def is_current(client: Objects, build: Build) -> bool:
    """Whether the save still claims its path. Blocking.

    Raises:
        StorageError: If the server does not say.
    """
    there = client.read(build.claim.key)
    if there is None:
        return False

    record = ClaimRecord.decode(there[0])
    return record.token == build.claim.token and record.purpose in ("saving", "committing")


def take_back(client: Objects, build: Build, mine: ProcessIdentity) -> bool:
    """Give the claim up for the process that holds it, and is silent. Blocking.

    The owner swaps its claim before it puts the mark. So of two swaps the first decides, without a word to
    anybody: this one, or that of the owner when it wakes.

    Returns:
        Whether it is sure that the owner publishes nothing any more.

    Raises:
        StorageError: If the server does not say.
    """
    for _ in range(_TRIES):
        there = client.read(build.claim.key)
        if there is None or there[1] is None:
            return False  # it was published, or removed

        record = ClaimRecord.decode(there[0])
        if record.token != build.claim.token or record.purpose == "committing":
            return False
        if record.purpose != "saving":
            return True  # somebody else was faster, or the owner itself gave it up

        data = ClaimRecord(record.token, "left", mine).encode(mine)
        if client.swap(build.claim.key, data, there[1]) is not None:
            return True

    return False
