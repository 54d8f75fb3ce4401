"""The verdict on an operation of several processes. The first one that is set holds for all."""

from __future__ import annotations

__all__ = ("Verdict", "VerdictKind", "verdict_of")

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias, final

from penstock.kernel.errors import (
    CoordinationError,
    OutcomeUnknownError,
    PeerError,
    PeerFailedError,
    PeerSilentError,
    PenstockError,
    PlansDifferError,
    StageFailedError,
)

VerdictKind: TypeAlias = Literal["commit", "failed", "silent", "differs", "unknown"]

MOST_TEXT = 2000
MOST_DIFFERENCES = 20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The end of an operation, told in one small value."""

    kind: VerdictKind
    process: int  #: who failed or differs; of a commit, the primary
    stage: str | None = None
    key_path: str | None = None
    text: str = ""
    seen: Mapping[int, str | None] = field(
        default_factory=dict[int, "str | None"]
    )  #: of those who are silent
    limit_s: float = 0.0
    differences: tuple[str, ...] = ()
    asked: Mapping[int, str] = field(default_factory=dict[int, str])  #: paths, by process, if they differ

    def encoded(self) -> bytes:
        """Return the value to store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Verdict:
        """Read what `encoded` made.

        Raises:
            CoordinationError: If something else is stored there.
        """
        try:
            fields = json.loads(data)
            fields["seen"] = {int(index): stage for index, stage in fields["seen"].items()}
            fields["differences"] = tuple(fields["differences"])
            fields["asked"] = {int(index): path for index, path in fields["asked"].items()}
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CoordinationError(
                f"{data[:80]!r} is no verdict: do all processes run one penstock?"
            ) from error

    def error(self) -> PeerError:
        """Return the error that every process but the one that failed raises. Not for a commit."""
        if self.kind == "silent":
            return PeerSilentError(self.seen, self.limit_s)
        if self.kind == "differs":
            return PlansDifferError(self.process, self.differences, self.asked)

        return PeerFailedError(self.process, self.stage, self.key_path, self.text)


def verdict_of(error: BaseException, process: int, stage: str) -> Verdict:
    """Return what tells the others that `error` ended this process's part.

    Args:
        error: A cancellation, or what was raised.
        process: The index of this one.
        stage: Where it was, if the error does not say.
    """
    if isinstance(error, PeerSilentError):
        return Verdict(kind="silent", process=process, seen=error.seen, limit_s=error.limit_s)
    if isinstance(error, OutcomeUnknownError):
        return Verdict(kind="unknown", process=process, stage=stage, text=error.reason[:MOST_TEXT])
    if isinstance(error, PlansDifferError):
        lines = tuple([line[:MOST_TEXT] for line in error.differences[:MOST_DIFFERENCES]])
        return Verdict(kind="differs", process=error.processes[0], differences=lines, asked=error.asked)
    if isinstance(error, PeerFailedError):
        return Verdict(
            kind="failed",
            process=error.processes[0],
            stage=error.peer_stage,
            key_path=error.key_path,
            text=error.reason,
        )
    if not isinstance(error, Exception):
        return Verdict(kind="failed", process=process, stage=stage, text="it was cancelled")

    at, key_path = stage, None
    if isinstance(error, PenstockError):
        at, key_path = error.stage or stage, error.key_path

    said: BaseException = error
    if isinstance(error, StageFailedError) and error.__cause__ is not None:
        said = error.__cause__  # the verdict has the stage already

    text = f"{type(said).__name__}: {said}"[:MOST_TEXT]
    return Verdict(kind="failed", process=process, stage=at, key_path=key_path, text=text)
