"""Orbax's emergency and replicator managers, by name: programs import them, and few make one."""

from __future__ import annotations

__all__ = (
    "CheckpointManager",
    "CheckpointManagerOptions",
    "LocalCheckpointOptions",
    "NotThereYetError",
    "PersistentCheckpointOptions",
    "ReplicatorCheckpointManager",
    "ReplicatorCheckpointManagerOptions",
    "initialize_multi_tier_checkpointing",
)

from typing import Any, NoReturn, final

from penstock.errors import PenstockError


@final
class NotThereYetError(PenstockError, NotImplementedError):
    """A program asks for checkpoints in several tiers, which penstock does not have yet.

    Attributes:
        name: What it asked for.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name}: penstock has no emergency checkpoints yet, on local disks and in several tiers; "
            "save with penstock.orbax.CheckpointManager"
        )
        self.name = name


class _NotThereYet:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotThereYetError(type(self).__name__)


class CheckpointManager(_NotThereYet):
    """Refuses to be made: see `NotThereYetError`."""


class CheckpointManagerOptions(_NotThereYet):
    """Refuses to be made: see `NotThereYetError`."""


class LocalCheckpointOptions(_NotThereYet):
    """Refuses to be made: see `NotThereYetError`."""


class PersistentCheckpointOptions(_NotThereYet):
    """Refuses to be made: see `NotThereYetError`."""


class ReplicatorCheckpointManager(_NotThereYet):
    """Refuses to be made: see `NotThereYetError`."""


class ReplicatorCheckpointManagerOptions(_NotThereYet):
    """Refuses to be made: see `NotThereYetError`."""


def initialize_multi_tier_checkpointing(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse.

    Raises:
        NotThereYetError: Always.
    """
    raise NotThereYetError("initialize_multi_tier_checkpointing")
