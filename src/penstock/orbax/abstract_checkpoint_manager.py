"""The interface of managers of a directory of steps, under Orbax's names."""

from __future__ import annotations

__all__ = ("AbstractCheckpointManager",)

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class AbstractCheckpointManager(Protocol):
    """Saves and restores steps in one directory. `CheckpointManager` is one."""

    @property
    @abstractmethod
    def directory(self) -> Any:
        """The directory of the steps."""

    @abstractmethod
    def all_steps(self, read: bool = False) -> Sequence[int]:
        """Return every step; with `read`, after listing the directory again."""

    @abstractmethod
    def latest_step(self) -> int | None:
        """Return the last step; None if there is none."""

    @abstractmethod
    def best_step(self) -> int | None:
        """Return the step with the best metrics; None if no step has any."""

    @abstractmethod
    def reload(self) -> None:
        """List the directory again."""

    @abstractmethod
    def reached_preemption(self, step: int) -> bool:
        """Return whether the job is to end after this step."""

    @abstractmethod
    def should_save(self, step: int) -> bool:
        """Return whether `save` would save a step."""

    @abstractmethod
    def delete(self, step: int) -> None:
        """Delete a step."""

    @abstractmethod
    def save(self, step: int, *args: Any, force: bool | None = False, **kwargs: Any) -> bool:
        """Save a step; return whether it is saved."""

    @abstractmethod
    def restore(self, step: int, *args: Any, **kwargs: Any) -> Any:
        """Return what was saved as a step."""

    @abstractmethod
    def item_metadata(self, step: int) -> Any:
        """Return what is known of the objects of a step."""

    @abstractmethod
    def metadata(self, step: int | None = None) -> Any:
        """Describe a step, or the directory."""

    @abstractmethod
    def metrics(self, step: int) -> Any:
        """Return the metrics of a step; None if it has none."""

    @abstractmethod
    def wait_until_finished(self) -> None:
        """Wait until no save is running."""

    @abstractmethod
    def check_for_errors(self) -> None:
        """Raise the failure of a save in the background."""

    @abstractmethod
    def close(self) -> None:
        """Wait until nothing is running, and end."""
