"""`SpecError`s about the call: options, paths, steps, the order of calls. Change the call."""

from __future__ import annotations

__all__ = (
    "ClosedError",
    "ConfigError",
    "DestinationExistsError",
    "ForkedError",
    "InactiveProcessError",
    "LeaseTooLargeError",
    "OlderStepError",
    "PathError",
    "PipelineError",
    "RootInUseError",
    "RunningLoopError",
    "StepExistsError",
    "UnknownMetricError",
    "UnsupportedByStoreError",
)

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final, final

from penstock.kernel.errors.families import SpecError

REPLACED_AT_ONCE: Final = "pass overwrite=True to replace it atomically"


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

    @classmethod
    def unknown_stage(cls, name: str, known: Sequence[str]) -> PipelineError:
        """Say that no stage is called `name`, and which name is near; if none is, all of them."""
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        return cls(f"no stage is called {name!r}; {hint}")


@final
class PathError(SpecError):
    """A `path`, as it was given, that cannot name a checkpoint."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path!r} {problem}")
        self.path = path


@final
class DestinationExistsError(SpecError, FileExistsError):
    """The destination of a save, `path`, exists, and `overwrite` was not asked for.

    `advice` says what to pass to replace it.
    """

    def __init__(self, path: str, advice: str = REPLACED_AT_ONCE) -> None:
        super().__init__(f"{path!r} exists; {advice}")
        self.path, self.advice = path, advice


@final
class UnsupportedByStoreError(SpecError):
    """The store cannot carry out `operation` at `path`, and nothing was written.

    `store` is the name of its type, and `capability` that of the protocol it lacks. `advice`, which may be
    empty, says what would do instead.
    """

    def __init__(self, operation: str, path: str, store: object, capability: type, advice: str = "") -> None:
        self.operation, self.path, self.advice = operation, path, advice
        self.store, self.capability = type(store).__name__, capability.__name__
        said = f"{self.store} cannot {operation} {path!r}: it lacks {self.capability}"
        super().__init__(f"{said}; {advice}" if advice else said)


@final
class StepExistsError(SpecError, FileExistsError):
    """The step exists and `overwrite` was not asked for, or it is being saved.

    `advice` says what to pass to replace it.
    """

    def __init__(self, step: int, advice: str = REPLACED_AT_ONCE) -> None:
        super().__init__(f"step {step} exists; {advice}")
        self.step, self.advice = step, advice


@final
class OlderStepError(SpecError):
    """The step to be saved is older than the latest one, and `overwrite` was not asked for."""

    def __init__(self, step: int, latest: int) -> None:
        super().__init__(f"step {step} is older than the latest, {latest}; pass overwrite=True to save it")
        self.step, self.latest = step, latest


@final
class RootInUseError(SpecError):
    """Another CheckpointManager, in this process or another, writes into the directory of steps `root`.

    Attributes:
        root: The directory of steps.
        more: Whose claim it is and how that ends, where nothing can be locked; else empty.
    """

    def __init__(self, root: str, more: str = "") -> None:
        problem = "is in use by another CheckpointManager that writes there"
        advice = "leave that one first, or open this one with read_only=True"
        super().__init__(f"{root!r} {problem}; {advice}{more and f' ({more})'}")
        self.root, self.more = root, more


@final
class UnknownMetricError(SpecError):
    """A policy ranks steps by `metric`, which no step has and which is not among those given (`known`)."""

    def __init__(self, metric: str, known: Sequence[str]) -> None:
        near = get_close_matches(metric, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"
        problem = f"no step has the metric {metric!r} that the policy ranks by, and these metrics lack it"
        super().__init__(f"{problem}; {hint} Where it is not known yet, give NaN, or no metrics at all")
        self.metric, self.known = metric, tuple(known)


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
class InactiveProcessError(SpecError):
    """This process was asked for what only some processes of its job do together, and it is none of them.

    Attributes:
        process: Its index.
        active: Those of the others, as they were chosen.
    """

    def __init__(self, process: int, active: Sequence[int]) -> None:
        others = ", ".join(map(str, active))
        problem = f"process {process} takes no part: job.active_processes are {others}"
        super().__init__(f"{problem}. Call this in those processes alone, or let {process} be one of them")
        self.process, self.active = process, tuple(active)


@final
class RunningLoopError(SpecError, RuntimeError):
    """`penstock.sync` was called inside a running event loop, which it would block."""
