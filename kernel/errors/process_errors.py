"""Errors of what the processes of a job do together, and who is to blame for them."""

from __future__ import annotations

__all__ = (
    "CoordinationError",
    "NotOnThisDiskError",
    "NotSharedError",
    "OutcomeUnknownError",
    "PeerError",
    "PeerFailedError",
    "PeerSilentError",
    "PlansDifferError",
    "StageFailedError",
)

from collections.abc import Mapping, Sequence
from typing import final

from penstock.kernel.errors.families import PenstockError, SpecError


class PeerError(PenstockError):
    """Another process ended what the job did together. Nothing was published; all may begin again.

    Attributes:
        processes: Who is to blame, by index.
        peer_stage: The stage in which the first of them was heard of last; None if that is not known.
    """

    processes: tuple[int, ...] = ()
    peer_stage: str | None = None


@final
class PeerFailedError(PeerError):
    """Another process raised an error, or was cancelled.

    Attributes:
        reason: What it said.
    """

    def __init__(self, process: int, stage: str | None, key_path: str | None, reason: str) -> None:
        where = f" in stage {stage!r}" if stage else ""
        leaf = f" (leaf {key_path})" if key_path else ""
        super().__init__(f"process {process} ended{where}{leaf}: {reason}")
        self.processes, self.peer_stage, self.key_path, self.reason = (process,), stage, key_path, reason


@final
class PeerSilentError(PeerError):
    """Other processes were not heard of for too long, or never came.

    Attributes:
        seen: Where each of them was heard of last, by index; None for one that never came.
        limit_s: Seconds that were waited for it.
    """

    def __init__(self, seen: Mapping[int, str | None], limit_s: float) -> None:
        told = [
            f"process {index} never came" if stage is None else f"process {index}, last in stage {stage!r}"
            for index, stage in sorted(seen.items())[:8]
        ]
        more = f" and {len(seen) - 8} others" if len(seen) > 8 else ""
        super().__init__(f"nothing was heard for {limit_s:g} s: {'; '.join(told)}{more}")
        self.seen, self.limit_s = dict(seen), limit_s
        self.processes = tuple(sorted(seen))
        self.peer_stage = seen[self.processes[0]] if seen else None


@final
class PlansDifferError(PeerError, SpecError):
    """The processes were not asked for the same thing: their paths, trees or options differ.

    Attributes:
        differences: What the primary has and what the other process has, a line for each leaf or option.
        asked: The path that each of them asks for, by index, if these differ; otherwise empty. Nothing is
            said of processes that have not come yet.
    """

    def __init__(
        self, process: int, differences: Sequence[str], asked: Mapping[int, str] | None = None
    ) -> None:
        shown = "; ".join(differences[:5]) or "no leaf differs"
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        said = f"process {process} is asked for something else than the primary: {shown}{more}"
        if asked:
            said = f"the processes ask for different things, and wait for each other: {shown}{more}"

        super().__init__(said)
        self.processes, self.differences, self.asked = (process,), tuple(differences), dict(asked or {})

    @classmethod
    def of_paths(cls, process: int, asked: Mapping[int, str]) -> PlansDifferError:
        """Say who asks for what.

        Args:
            process: The one that is not with the primary.
            asked: The path that each process asks for, by index.
        """
        by_path: dict[str, list[str]] = {}
        for index, path in sorted(asked.items()):
            by_path.setdefault(path, []).append(str(index))

        lines = [
            f"process{'es' if len(who) > 1 else ''} {', '.join(who[:8])}"
            f"{f' and {len(who) - 8} others' if len(who) > 8 else ''} for {path!r}"
            for path, who in by_path.items()
        ]
        return cls(process, lines, asked)


@final
class NotOnThisDiskError(SpecError):
    """A restore needs what another process wrote to a disk of its own.

    Attributes:
        path: The directory that holds the tree.
        process: Who wrote what is here, by index.
        processes: Who saved together.
    """

    def __init__(self, path: str, key_path: str, process: int, processes: Sequence[int]) -> None:
        others = ", ".join(map(str, processes))
        super().__init__(
            f"{path!r} holds what process {process} wrote to its own disk, of what processes {others} saved, "
            f"and not all that is asked for of the leaf {key_path}: restore on the same processes and devices"
        )
        self.path, self.key_path = path, key_path
        self.process, self.processes = process, tuple(processes)


@final
class NotSharedError(SpecError):
    """The processes save to one path, and this one does not see where process 0 builds.

    Attributes:
        path: Of the checkpoint.
        place: The directory that the primary has made.
    """

    def __init__(self, path: str, place: str) -> None:
        super().__init__(
            f"the primary builds {path!r} in {place!r}, and this process does not see that directory: "
            "save to a file system that all processes see, or say that each has a disk of its own, with "
            "JobOptions(local_root=...) or PENSTOCK_JOB__LOCAL_ROOT"
        )
        self.path, self.place = path, place


@final
class OutcomeUnknownError(PenstockError):
    """The primary fell silent, or its store did, at a time when it may or may not have published.

    Or this process stood still until the others had forgotten how it ended. Look at the path: if a checkpoint
    is there, it is whole. The next job removes what is not.

    Attributes:
        path: What was to be published.
        processes: Who fell silent, by index: the primary, or this process.
        peer_stage: The stage in which it was heard of last; None if that is not known.
    """

    def __init__(self, path: str, reason: str, primary: int = 0, peer_stage: str | None = None) -> None:
        super().__init__(
            f"it is not known whether {path!r} was published: {reason}. "
            "If a checkpoint is there, it is whole; the next save removes what was left behind"
        )
        self.path, self.reason, self.peer_stage = path, reason, peer_stage
        self.processes = (primary,)


@final
class CoordinationError(PenstockError):
    """The service by which the processes of a job agree is absent, or cannot be reached."""


@final
class StageFailedError(PenstockError):
    """A stage of a save by several processes raised an error that is not one of these: its own is the cause.

    The others raise a `PeerFailedError` with the same stage and the same words.
    """

    def __init__(self, stage: str, error: BaseException) -> None:
        super().__init__(f"stage {stage!r} failed: {type(error).__name__}: {error}")
        self.stage = stage
        self.key_path = getattr(error, "key_path", None)
