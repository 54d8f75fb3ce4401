"""Every error that penstock raises: one base, and four families by what the caller can do.

`SpecError` is about the call, `HandlerError` about a leaf type without a handler or a handler that failed,
`StorageError` about the medium, `CorruptCheckpointError` about the data on it. Where Python has an error
of that kind (`FileNotFoundError`, `TypeError`), the class inherits from it, too.
"""

from __future__ import annotations

# One name to a line would take a tenth of the file.
# fmt: off
__all__ = (
    "AmbiguousHandlerError", "ChangedLeafError", "ChecksumError", "ClosedError", "ConfigError",
    "CorruptCheckpointError", "DeletedLeafError", "DestinationExistsError", "DuplicateNameError",
    "ForkedError", "HandlerError", "HandlerFailedError", "IncompleteCheckpointError",
    "IncompletePipelineError", "InvalidLeafError", "LeaseTooLargeError", "MissingFileError",
    "NoHandlerError", "NotACheckpointError", "OlderStepError", "PathError", "PenstockError",
    "PipelineError", "ResultTypeError", "RunningLoopError", "SaveCancelledError", "SpecError",
    "StepExistsError", "StorageError", "StructureMismatchError", "TreeDifference", "TruncatedDataError",
    "UnsupportedByStoreError", "UnsupportedFormatError",
)
# fmt: on

import errno as errno_codes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


class PenstockError(Exception):
    """Base of everything penstock raises on purpose.

    Attributes:
        key_path: The leaf concerned, as `jax.tree_util.keystr` prints it; None if no single leaf is.
        stage: The pipeline stage that raised, filled in by the driver; None outside a pipeline.
    """

    key_path: str | None = None
    stage: str | None = None


class SpecError(PenstockError, ValueError):
    """The call asks for something that cannot be done; nothing was written. Change the call."""


class HandlerError(PenstockError):
    """A type has no handler, or a handler failed."""


class StorageError(PenstockError, OSError):
    """The medium refused an operation.

    Attributes:
        path: What the operation was about.
        operation: Its name, as in `write`, `fsync`, `rename`.
        errno: The operating system's number, or None.
    """

    def __init__(self, operation: str, path: str, problem: str, errno: int | None = None) -> None:
        super().__init__(f"{operation} {path!r}: {problem}")
        self.operation, self.path, self.errno = operation, path, errno

    @classmethod
    def of(cls, operation: str, path: str, error: OSError) -> StorageError:
        """Translate an `OSError`, keeping its number and its words."""
        problem = error.strerror or str(error) or type(error).__name__
        if error.errno == errno_codes.ENOSPC:
            problem += " (the save is undone; earlier checkpoints are untouched)"

        return cls(operation, path, problem, error.errno)


class CorruptCheckpointError(PenstockError, ValueError):
    """The data on the medium is not a finished, undamaged checkpoint.

    Attributes:
        path: The checkpoint, or the file in it.
        problem: What is wrong with it.
    """

    def __init__(self, path: str, problem: str, *, key_path: str | None = None) -> None:
        super().__init__(f"{path}: {problem}" + (f" (leaf {key_path})" if key_path else ""))
        self.path, self.problem, self.key_path = path, problem, key_path


@final
class ConfigError(SpecError):
    """An option is unknown, has the wrong type or unit, or is out of range.

    Attributes:
        key: The dotted name of the option, as in `save.write.concurrency`.
        source: Where it came from: a file name, an environment variable, `argument`.
    """

    def __init__(self, key: str, problem: str, source: str = "argument") -> None:
        super().__init__(f"{key}: {problem} (from {source})")
        self.key, self.problem, self.source = key, problem, source


@final
class PipelineError(SpecError):
    """A pipeline was put together wrongly: an unknown or repeated stage name, an empty pipeline."""


@final
class PathError(SpecError):
    """A `path`, as it was given, that cannot name a checkpoint."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path!r} {problem}")
        self.path = path


@final
class DestinationExistsError(SpecError, FileExistsError):
    """The destination of a save, `path`, exists, and `overwrite` was not asked for."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path!r} exists; pass overwrite=True to replace it atomically")
        self.path = path


@final
class UnsupportedByStoreError(SpecError):
    """The store cannot carry out `operation` at `path`, and nothing was written.

    `store` is the name of its type, and `capability` that of the protocol it lacks.
    """

    def __init__(self, operation: str, path: str, store: object, capability: type) -> None:
        self.operation, self.path = operation, path
        self.store, self.capability = type(store).__name__, capability.__name__
        super().__init__(f"{self.store} cannot {operation} {path!r}: it lacks {self.capability}")


@final
class StepExistsError(SpecError, FileExistsError):
    """The step exists and `overwrite` was not asked for, or it is being saved."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step} exists; pass overwrite=True to replace it atomically")
        self.step = step


@final
class OlderStepError(SpecError):
    """The step to be saved is older than the latest one, and `overwrite` was not asked for."""

    def __init__(self, step: int, latest: int) -> None:
        super().__init__(f"step {step} is older than the latest, {latest}; pass overwrite=True to save it")
        self.step, self.latest = step, latest


@final
class DuplicateNameError(SpecError):
    """The leaves with the key paths `first` and `second` would both be stored under `name`."""

    def __init__(self, name: str, first: str, second: str) -> None:
        super().__init__(f"{first} and {second} would both be stored as {name!r}; rename one")
        self.name, self.first, self.second = name, first, second
        self.key_path = second


@final
class InvalidLeafError(SpecError, TypeError):
    """The value of a leaf cannot be stored, although its type is handled: an object array, a too large int.

    Attributes:
        key_path: The leaf.
        problem: What is wrong with it, and what to do.
    """

    def __init__(self, key_path: str, problem: str) -> None:
        super().__init__(f"{key_path}: {problem}")
        self.key_path, self.problem = key_path, problem


@final
class DeletedLeafError(SpecError, RuntimeError):
    """A jax.Array was donated or deleted before its bytes were taken."""

    def __init__(self, key_path: str) -> None:
        problem = "was deleted or donated before it was staged; await save.staged() before donating it"
        super().__init__(f"{key_path}: the array {problem}")
        self.key_path = key_path


@dataclass(frozen=True, slots=True)
class TreeDifference:
    """One way in which a restore target and a checkpoint disagree."""

    kind: str  #: "missing" (target only), "unexpected" (checkpoint only), "shape", "dtype", "type", "rule"
    key_path: str
    in_like: str = ""  #: what the target has there
    on_disk: str = ""  #: what the checkpoint has there
    suggestion: str = ""  #: the nearest name on the other side, if one is near

    def __str__(self) -> str:
        text = f"{self.kind:<11} {self.key_path}: {self.in_like} in the target, {self.on_disk} on disk"
        if self.kind == "missing":
            text = f"missing     {self.key_path}: in the target ({self.in_like}), not on disk"
        elif self.kind == "unexpected":
            text = f"unexpected  {self.key_path}: on disk ({self.on_disk}), not in the target"
        elif self.kind == "rule":  # a rename or a transform that cannot be carried out
            text = f"rule        {self.key_path}: {self.in_like}"

        return text + (f"; did you mean {self.suggestion}?" if self.suggestion else "")


@final
class StructureMismatchError(SpecError):
    """The restore target and the checkpoint differ; every difference is listed.

    Attributes:
        path: The checkpoint.
        differences: All of them: first missing, then unexpected leaves, then those that differ.
    """

    SHOWN = 40

    def __init__(self, path: str, differences: Sequence[TreeDifference]) -> None:
        lines = [str(difference) for difference in differences[: self.SHOWN]]
        if len(differences) > self.SHOWN:
            lines.append(f"... and {len(differences) - self.SHOWN} more")

        super().__init__("\n  ".join([f"the target does not fit {path}:", *lines]))
        self.path, self.differences = path, tuple(differences)


@final
class ResultTypeError(SpecError, TypeError):
    """What was restored is not of the type that `as_type` asked for.

    Attributes:
        path: The checkpoint.
        as_type: The type asked for.
        found: The type of what was restored.
    """

    def __init__(self, path: str, as_type: object, result: object) -> None:
        wanted = as_type.__name__ if isinstance(as_type, type) else str(as_type)
        super().__init__(f"{path} was restored as a {type(result).__name__}, and as_type asks for {wanted}")
        self.path, self.as_type, self.found = path, as_type, type(result)


@final
class LeaseTooLargeError(SpecError):
    """More bytes were asked for (`nbytes`) than the whole budget holds (`limit`): no wait could end."""

    def __init__(self, nbytes: int, limit: int) -> None:
        super().__init__(f"asked for {nbytes} bytes of a budget of {limit}")
        self.nbytes, self.limit = nbytes, limit


@final
class ClosedError(SpecError, RuntimeError):
    """An object was used outside its `async with`."""


@final
class ForkedError(SpecError, RuntimeError):
    """An object was used in a fork of its process, where its event loop and its threads do not run.

    Attributes:
        pid: That process.
    """

    def __init__(self, what: str, pid: int) -> None:
        problem = "this is a fork of it, without its event loop and threads; make another Checkpointer here"
        super().__init__(f"{what} belongs to process {pid}, and {problem}")
        self.pid = pid


@final
class RunningLoopError(SpecError, RuntimeError):
    """`penstock.sync` was called inside a running event loop, which it would block."""


@final
class SaveCancelledError(PenstockError):
    """The save that was awaited was cancelled; nothing of it is left on disk."""


@final
class IncompletePipelineError(PenstockError):
    """Fewer leaves reached the commit than were planned, so nothing was published.

    Attributes:
        planned: Leaves counted by the first stage.
        arrived: Leaves whose every byte arrived.
    """

    def __init__(self, planned: int, arrived: int, first_absent: str) -> None:
        found = f"{planned} leaves were planned and {arrived} arrived complete"
        super().__init__(f"{found}; first absent: {first_absent}")
        self.planned, self.arrived, self.key_path = planned, arrived, first_absent


@final
class ChangedLeafError(SpecError):
    """A stage changed a leaf's dtype, shape or length and had not declared that: nothing was published.

    Attributes:
        key_path: The leaf.
        planned: How it was to be stored.
        found: What it has become.
    """

    def __init__(self, key_path: str, planned: str, found: str) -> None:
        advice = "a stage that changes leaves declares that by a method resolve_spec, and keeps to it"
        super().__init__(f"{key_path} was planned as {planned} and has become {found}; {advice}")
        self.key_path, self.planned, self.found = key_path, planned, found


@final
class NoHandlerError(HandlerError, TypeError):
    """No handler is registered for the type of a leaf, or for a stored type name.

    Attributes:
        key_path: The leaf.
        type_name: Its Python type, or the type name found on disk.
    """

    def __init__(self, key_path: str, type_name: str, known: Sequence[str] = ()) -> None:
        super().__init__(
            f"{key_path}: no handler for {type_name}. Register one with "
            f"registry.register(Type, handler) and pass the registry to the Checkpointer"
            + (f"; handled here: {', '.join(known)}" if known else "")
        )
        self.key_path = key_path
        self.type_name = type_name


@final
class AmbiguousHandlerError(HandlerError, TypeError):
    """Two handlers fit a type equally well.

    Attributes:
        type_name: The type looked up.
        candidates: Both handlers, as `module.QualName`.
    """

    def __init__(self, type_name: str, first: str, second: str) -> None:
        super().__init__(
            f"{type_name}: {first} and {second} fit equally well; register one for the exact type"
        )
        self.type_name = type_name
        self.candidates = (first, second)


@final
class HandlerFailedError(HandlerError):
    """A third-party handler raised; its own error is the cause.

    Attributes:
        key_path: The leaf.
        handler: The handler, as `module.QualName`.
    """

    def __init__(self, key_path: str, handler: str, problem: str) -> None:
        super().__init__(f"{key_path}: {handler} failed: {problem}")
        self.key_path = key_path
        self.handler = handler


@final
class NotACheckpointError(CorruptCheckpointError, FileNotFoundError):
    """There is nothing at the path, or nothing in a format that penstock knows."""


@final
class MissingFileError(CorruptCheckpointError, FileNotFoundError):
    """A checkpoint refers to a file that does not exist."""


@final
class IncompleteCheckpointError(CorruptCheckpointError):
    """The save of this checkpoint was interrupted; the directory was never published."""


@final
class TruncatedDataError(CorruptCheckpointError):
    """A data file is shorter than the index says.

    Attributes:
        needed: Bytes the index refers to.
        found: Bytes in the file.
    """

    def __init__(self, path: str, needed: int, found: int, *, key_path: str | None = None) -> None:
        super().__init__(path, f"ends at byte {found}, but {needed} are needed", key_path=key_path)
        self.needed, self.found = needed, found


@final
class ChecksumError(CorruptCheckpointError):
    """The bytes read differ from the bytes written."""


@final
class UnsupportedFormatError(CorruptCheckpointError):
    """A checkpoint in a format that penstock recognises and cannot read."""
