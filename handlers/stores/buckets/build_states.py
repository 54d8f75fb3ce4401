"""What a process knows of a save that builds in a bucket, and of its claim."""

from __future__ import annotations

__all__ = ("MARK", "STAGED", "Build", "Claim", "Found", "staging")

from dataclasses import dataclass, field
from threading import Lock
from typing import Final, Literal, TypeAlias, final

from penstock.handlers.stores.buckets.claim_records import CLAIM

MARK: Final = "commit_success.txt"
"""Publishes the prefix that it lies in. Orbax looks for this name in buckets, too."""

STAGED: Final = ".d"
"""Ends the prefix in which lies what a save is not done with: a single file until it is copied to where it is
published, and what long files are made of."""

Found: TypeAlias = Literal["nothing", "leftovers", "committing"]


@final
@dataclass(slots=True)
class Claim:
    """A claim on a key, as its owner or a process that writes beside it knows it."""

    key: str
    token: str
    tag: str | None  #: by which it is swapped; None if it was lost, or is another process's
    found: Found  #: what lay there when it was taken
    mark: bytes = b""  #: of a save that had only its mark to put


@final
@dataclass(slots=True)
class Build:
    """One save that builds. Thread-safe."""

    final: str  #: the key that will be published
    place: str  #: the path to build at, by which the store knows it
    file: str | None  #: the one file at the place that becomes `final`
    claim: Claim
    phase: Literal["building", "committing", "ended"] = "building"
    mark: bytes | None = None  #: what the save wrote as its mark, kept back until it is published
    created: set[str] = field(default_factory=set[str])  #: keys whose objects are this save's
    met: set[str] = field(default_factory=set[str])  #: keys with the right content that it may not own
    lock: Lock = field(default_factory=Lock)
    is_shared: bool = False  #: whether several processes write into it
    is_joined: bool = False  #: whether another process holds its claim

    @property
    def prefix(self) -> str:
        """What the keys of its objects begin with."""
        return self.final if self.file is None else self.staging

    @property
    def staging(self) -> str:
        """What the keys of objects begin with that will not be published. No other save has it."""
        return staging(self.final, self.claim.token)

    def published_mark(self) -> bytes:
        """Return the content of the mark. It names the save, so that no two marks are equal."""
        said = (self.mark or b"").rstrip()
        return (said + b"\n" if said else b"") + f"published by {self.claim.token}\n".encode()


def staging(final: str, token: str) -> str:
    """Return the prefix of what is not published, of a save to `final`."""
    return f"{final}{CLAIM}{STAGED}/{token}"
