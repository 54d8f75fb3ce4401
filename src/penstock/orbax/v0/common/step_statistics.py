"""What a manager measures of its saves and restores, and the loggers that it tells."""

from __future__ import annotations

__all__ = (
    "AbstractLogger",
    "CompositeLogger",
    "RestoreStepStatistics",
    "SaveStepStatistics",
    "StandardLogger",
    "log_restore",
    "log_save",
)

import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

from penstock.kernel.events import get_logger


@dataclass
class SaveStepStatistics:
    """What Orbax measures of a save: times in seconds since the epoch, and durations in seconds.

    penstock gives a manager's logger those that it has; `SaveReport` says more.
    """

    step: int | None = None
    event_type: str | None = "save"
    directory: str | None = None
    reached_preemption: bool | None = False
    preemption_received_at: float | None = None
    synchronous: bool | None = False
    wait_for_prev_start_time: float | None = None
    wait_for_prev_duration_secs: float | None = None
    time_between_consecutive_saves_sec: float | None = None
    checkpointer_blocking_start_time: float | None = None
    checkpointer_blocking_duration_secs: float | None = None
    get_old_steps_start_time: float | None = None
    get_old_steps_duration_secs: float | None = None
    checkpoint_manager_blocking_start_time: float | None = None
    checkpoint_manager_blocking_duration_secs: float | None = None


@dataclass
class RestoreStepStatistics:
    """What Orbax measures of a restore: times in seconds since the epoch, and durations in seconds."""

    step: int | None = None
    event_type: str | None = "restore"
    directory: str | None = None
    checkpointer_start_time: float | None = None
    checkpointer_duration_secs: float | None = None
    checkpoint_manager_start_time: float | None = None
    checkpoint_manager_duration_secs: float | None = None


class AbstractLogger(ABC):
    """Is told of each save and restore of a manager."""

    @abstractmethod
    def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Take an entry: a dict of `SaveStepStatistics` or `RestoreStepStatistics`."""


class StandardLogger(AbstractLogger):
    """Writes entries to penstock's log, as the event `orbax.step`."""

    def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log an entry."""
        get_logger().info("orbax.step", entry=msg, **kwargs)


class CompositeLogger(AbstractLogger):
    """Passes entries to several loggers; what is no logger, or is a `CompositeLogger`, is left out."""

    def __init__(self, *loggers: AbstractLogger) -> None:
        self._loggers = [one for one in loggers if _is_single_logger(one)]

    def log_entry(self, entry: Any) -> None:
        """Pass an entry on."""
        for logger in self._loggers:
            logger.log_entry(entry)


def log_save(logger: Any, step: int, directory: Any, began: float, *, synchronous: bool) -> None:
    """Tell a manager's logger, if it has one, of a save that began at a time in seconds since the epoch."""
    if logger is not None:
        statistics = SaveStepStatistics(
            step=step,
            directory=str(directory),
            synchronous=synchronous,
            checkpoint_manager_blocking_start_time=began,
            checkpoint_manager_blocking_duration_secs=time.time() - began,
        )
        logger.log_entry(asdict(statistics))


def log_restore(logger: Any, step: int, directory: Any, began: float, reading_began: float) -> None:
    """Tell a manager's logger, if it has one, of a restore that has just ended.

    Args:
        logger: Has `log_entry`; or None.
        step: The step.
        directory: The directory of steps that it was read from.
        began: When the manager was called, in seconds since the epoch.
        reading_began: When it began to read.
    """
    if logger is not None:
        now = time.time()
        statistics = RestoreStepStatistics(
            step=step,
            directory=str(directory),
            checkpointer_start_time=reading_began,
            checkpointer_duration_secs=now - reading_began,
            checkpoint_manager_start_time=began,
            checkpoint_manager_duration_secs=now - began,
        )
        logger.log_entry(asdict(statistics))


def _is_single_logger(logger: object) -> bool:
    single = isinstance(logger, AbstractLogger) and not isinstance(logger, CompositeLogger)
    if not single:
        get_logger().warning("orbax.logger_left_out", logger=repr(logger))

    return single
