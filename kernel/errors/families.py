"""The base of all errors, and four families by what the caller can do."""

from __future__ import annotations

__all__ = (
    "CorruptCheckpointError",
    "HandlerError",
    "PenstockError",
    "SpecError",
    "StorageError",
)


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
        problem: What the medium said.
        errno: The operating system's number, or None.
    """

    def __init__(self, operation: str, path: str, problem: str, errno: int | None = None) -> None:
        super().__init__(f"{operation} {path!r}: {problem}")
        self.operation, self.path, self.errno, self.problem = operation, path, errno, problem

    @classmethod
    def of(cls, operation: str, path: str, error: OSError) -> StorageError:
        """Translate an `OSError`, keeping its number and its words."""
        return cls(operation, path, error.strerror or str(error) or type(error).__name__, error.errno)


class CorruptCheckpointError(PenstockError, ValueError):
    """The data on the medium is not a finished, undamaged checkpoint.

    Attributes:
        path: The checkpoint, or the file in it.
        problem: What is wrong with it.
    """

    def __init__(self, path: str, problem: str, *, key_path: str | None = None) -> None:
        super().__init__(f"{path}: {problem}" + (f" (leaf {key_path})" if key_path else ""))
        self.path, self.problem, self.key_path = path, problem, key_path
