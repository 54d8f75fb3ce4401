"""Measurements of saves and restores: entries for the loggers of a manager, and reports to `jax.monitoring`.

The reports have the names that Orbax uses, so that existing listeners keep working. Durations of steps that
penstock does not have, such as merging the files of processes, are not reported.

Source:
    The names are those that Orbax 0.12.8 uses.
"""

from __future__ import annotations

__all__ = (
    "AbstractLogger",
    "CloudLogger",
    "CloudLoggerOptions",
    "CompositeLogger",
    "RestoreStepStatistics",
    "SaveStepStatistics",
    "StandardLogger",
    "step_statistics",
)

import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Final, TypeVar, cast

import jax

from penstock import kernel
from penstock.orbax import logging as step_statistics  # Orbax has the measurements in a module of this name

T = TypeVar("T")


@dataclass
class SaveStepStatistics:
    """Orbax's measurements of a save: times in seconds since the epoch, and durations in seconds.

    The time between two saves is not measured; a `SaveReport` of penstock says where the time of one went.
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
    """Orbax's measurements of a restore: times in seconds since the epoch, and durations in seconds."""

    step: int | None = None
    event_type: str | None = "restore"
    directory: str | None = None
    checkpointer_start_time: float | None = None
    checkpointer_duration_secs: float | None = None
    checkpoint_manager_start_time: float | None = None
    checkpoint_manager_duration_secs: float | None = None


class AbstractLogger(ABC):
    """Gets an entry for each save and restore of a manager."""

    @abstractmethod
    def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Take an entry: a dict of `SaveStepStatistics` or `RestoreStepStatistics`."""


class StandardLogger(AbstractLogger):
    """Writes entries to penstock's log, as the event `orbax.step`."""

    def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log an entry."""
        kernel.get_logger().info("orbax.step", entry=msg, **kwargs)


@dataclass
class CloudLoggerOptions:
    """The options of a `CloudLogger`.

    Attributes:
        job_name: Is in each entry.
        logger_name: Of the log.
        client: A `google.cloud.logging.Client`; None for one that is made.
        checkpoint_metadata: Has no effect.
    """

    job_name: str = "checkpoint_job"
    logger_name: str = "checkpoint_logger"
    client: Any = None
    checkpoint_metadata: Any = None


class CloudLogger(AbstractLogger):
    """Writes entries to a log of Google Cloud.

    Args:
        options: Which log, and by which client.

    Raises:
        ImportError: If there is no client, and google-cloud-logging is not installed.
    """

    def __init__(self, options: CloudLoggerOptions = CloudLoggerOptions()) -> None:
        self.job_name, self.log_name, self.options = options.job_name, options.logger_name, options
        self.logging_client = options.client or _cloud_client()
        self._logger = self.logging_client.logger(self.log_name)

    def log_entry(self, entry: Any, severity: str | None = "INFO") -> None:
        """Write an entry, with the name of the job in it."""
        known = severity in ("DEBUG", "WARNING", "ERROR", "CRITICAL")
        self._logger.log_struct({**entry, "job_name": self.job_name}, severity=severity if known else "INFO")


def _cloud_client() -> Any:
    try:
        logging = import_module("google.cloud.logging")
    except ImportError as error:
        text = "CloudLogger needs a client, or google-cloud-logging, which is not installed"
        raise ImportError(text) from error

    return logging.Client()


class CompositeLogger(AbstractLogger):
    """Passes entries to several loggers; what is no logger, or is a `CompositeLogger`, is left out."""

    def __init__(self, *loggers: AbstractLogger) -> None:
        self._loggers = [one for one in loggers if _is_single_logger(one)]

    def log_entry(self, entry: Any) -> None:
        """Pass an entry on."""
        for logger in self._loggers:
            logger.log_entry(entry)


class SaveTimes:
    """The time at which each part of a save began, and its duration."""

    def __init__(self) -> None:
        self._began = time.time()
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Measure what is done inside, as a part of this name in `SaveStepStatistics`."""
        self._parts[f"{name}_start_time"] = began = time.time()
        yield
        self._parts[f"{name}_duration_secs"] = time.time() - began

    def statistics(self, step: int, directory: Any, *, synchronous: bool) -> SaveStepStatistics:
        """Return what was measured until now."""
        return SaveStepStatistics(
            step=step,
            directory=str(directory),
            synchronous=synchronous,
            checkpoint_manager_blocking_start_time=self._began,
            checkpoint_manager_blocking_duration_secs=time.time() - self._began,
            **self._parts,  # type: ignore[arg-type]  # the names of its parts
        )


def log_save(logger: Any, step: int, directory: Any, times: SaveTimes, *, synchronous: bool) -> None:
    """Pass to a manager's logger, if it has one, the measurements of a save that no longer blocks."""
    if logger is not None:
        logger.log_entry(asdict(times.statistics(step, directory, synchronous=synchronous)))


def log_restore(logger: Any, step: int, directory: Any, began: float, reading_began: float) -> None:
    """Pass to a manager's logger, if it has one, the measurements of a restore that has just ended.

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
        kernel.get_logger().warning("orbax.logger_left_out", logger=repr(logger))

    return single


READ: Final = "/jax/orbax/read/"
WRITE: Final = "/jax/orbax/write/"
WRITE_ASYNC: Final = ("/jax/orbax/write/async/", "/jax/checkpoint/write/async/")


@contextmanager
def recorded(prefix: str) -> Generator[None]:
    """Report the start of an operation and, unless it raises, its duration and its success."""
    _record(f"{prefix}start")
    with timed(f"{prefix}blocking_duration_secs", f"{prefix}total_duration_secs"):
        yield

    _record(f"{prefix}success")


@contextmanager
def timed(*names: str) -> Generator[None]:
    """Report the duration of the block in seconds, unless it raises."""
    since = time.perf_counter()
    yield
    _record_duration(time.perf_counter() - since, *names)


def record_async_save(begun: float | None = None) -> None:
    """Report the start of a save in the background or, given its `time.perf_counter()` then, its success."""
    if begun is None:
        _record(f"{WRITE_ASYNC[0]}start")
        return

    taken = time.perf_counter() - begun
    _record_duration(taken, *[f"{prefix}total_duration_secs" for prefix in WRITE_ASYNC])
    _record(f"{WRITE}success")


def record_saved_duration(checkpoint_start_time: float) -> None:
    """Report how much of the program's time a checkpoint covers: since the one before, or the start.

    Args:
        checkpoint_start_time: When its save began, in seconds since the epoch.
    """
    covered = checkpoint_start_time - _LATEST_SAVE.began
    _LATEST_SAVE.began = checkpoint_start_time
    _record_duration(covered, "/jax/checkpoint/write/duration_since_last_checkpoint_secs")


class _LatestSave:
    """The time at which the latest save of this process began, or the process itself."""

    def __init__(self) -> None:
        self.began = time.time()


_LATEST_SAVE: Final = _LatestSave()
"""`record_saved_duration` reports of the process: the function takes nothing that could hold it."""


def _record(name: str) -> None:
    cast("Any", jax.monitoring).record_event(name)


def _record_duration(seconds: float, *names: str) -> None:
    for name in names:
        cast("Any", jax.monitoring).record_event_duration_secs(name, seconds)
