"""What the claim on a path of a bucket says, and what is done about one that lies there. Pure."""

from __future__ import annotations

__all__ = ("CLAIM", "ClaimRecord", "Purpose", "what_to_do")

import json
import uuid
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast, final, get_args

from penstock.kernel.concurrency.process_identity import ProcessIdentity

CLAIM: Final = ".penstock-saving"
"""Ends the key of the claim, which lies beside what it claims."""

Purpose: TypeAlias = Literal["saving", "committing", "removing", "left"]
"""`saving`: objects are being written. `committing`: all are there, and the mark comes next. `removing`: what
lies there is no checkpoint, or will be none. `left`: the processes of a job gave it up, and whoever comes
takes it; it hides what one of them that was stopped may still write."""


@final
@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """Whose a claim is and what for."""

    token: str  #: unique to one save or removal
    purpose: Purpose
    owner: ProcessIdentity | None  #: None if that cannot be read
    mark: bytes = b""  #: what the mark will say, once `purpose` is `committing`

    def lives_here(self, mine: ProcessIdentity) -> bool:
        """Whether its process is on this machine, so that it is known whether it has ended. Pure."""
        return self.owner is not None and self.owner.is_beside(mine)

    def encode(self, owner: ProcessIdentity) -> bytes:
        """Return it as JSON that differs from every other, also from the same claim written twice."""
        return owner.encode(
            id=self.token,
            purpose=self.purpose,
            mark=b64encode(self.mark).decode(),
            written=uuid.uuid4().hex,
        )

    @classmethod
    def decode(cls, data: bytes) -> ClaimRecord:
        """Return what `encode` made these bytes of; without an owner, if it did not."""
        try:
            found: Any = json.loads(data)
            members = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
            token, purpose = str(members["id"]), members["purpose"]
            mark = b64decode(str(members["mark"]), validate=True)
        except (ValueError, KeyError, Base64Error):
            return cls("", "saving", None)

        if purpose not in get_args(Purpose):
            return cls(token, "saving", None)

        return cls(token, purpose, ProcessIdentity.decode(data), mark)


def what_to_do(
    record: ClaimRecord, mine: ProcessIdentity, given_up: Collection[str] = ()
) -> Literal["wait", "take", "finish"]:
    """Say what whoever finds a claim does about it. Blocking: looks for the process.

    A claim is taken only from a process that is known to have ended, or that gave it up: the objects that a
    live one writes would come to lie among those of whoever took it.

    Args:
        record: What the claim says.
        mine: The calling process.
        given_up: Tokens of claims that the calling process left behind.

    Returns:
        `wait` if its process may be at work; `take` if what it claimed is no checkpoint and can be removed;
        `finish` if only the mark is absent.
    """
    if record.purpose == "left":
        return "take"
    if record.token not in given_up and (record.owner is None or not record.owner.has_ended(mine)):
        return "wait"

    return "finish" if record.purpose == "committing" else "take"
