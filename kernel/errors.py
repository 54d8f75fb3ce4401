"""Every error that penstock raises: one base, and four families by what the caller can do.

`SpecError` is about the call, `HandlerError` about a leaf type without a handler or a handler that failed,
`StorageError` about the medium, `CorruptCheckpointError` about the data on it. Where Python has an error
of that kind (`FileNotFoundError`, `TypeError`), the class inherits from it, too.
"""

from __future__ import annotations

# One name to a line would be longer than the rest of the file.
# fmt: off
__all__ = (
    "AccessDeniedError",
    "AmbiguousHandlerError",
    "BuildChangedError",
    "ChangedLeafError",
    "ChecksumError",
    "ClaimLostError",
    "ClosedError",
    "ConfigError",
    "CoordinationError",
    "CorruptCheckpointError",
    "DeletedLeafError",
    "DestinationExistsError",
    "DuplicateNameError",
    "ExpansionError",
    "ForkedError",
    "HandlerError",
    "HandlerFailedError",
    "InUseError",
    "InactiveProcessError",
    "IncompleteCheckpointError",
    "IncompletePipelineError",
    "InsufficientMemoryError",
    "InvalidLeafError",
    "KeeperLostError",
    "LeaseTooLargeError",
    "LinkOutsideError",
    "MissingExtraError",
    "MissingFileError",
    "NoHandlerError",
    "NoSpaceError",
    "NoThreadError",
    "NotACheckpointError",
    "NotAFileError",
    "NotDurableError",
    "NotOnThisDiskError",
    "NotSharedError",
    "OlderStepError",
    "OutcomeUnknownError",
    "PathError",
    "PeerError",
    "PeerFailedError",
    "PeerSilentError",
    "PenstockError",
    "PipelineError",
    "PlansDifferError",
    "ReplacedError",
    "ResultTypeError",
    "RootInUseError",
    "RulesError",
    "RunningLoopError",
    "SaveCancelledError",
    "SpecError",
    "StageFailedError",
    "StepExistsError",
    "StorageError",
    "StructureMismatchError",
    "ThrottledError",
    "TreeDifference",
    "TruncatedDataError",
    "UnknownMetricError",
    "UnreachableError",
    "UnsupportedByStoreError",
    "UnsupportedFormatError",
)
# fmt: on

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from penstock.kernel.words import hint_at

_PUBLIC: Final = "penstock.errors"
"""Callers find the classes there."""


class PenstockError(Exception):
    """Base of everything penstock raises on purpose.

    Attributes:
        key_path: The leaf concerned, as `jax.tree_util.keystr` prints it; None if no single leaf is.
        stage: The pipeline stage that raised, filled in by the driver; None outside a pipeline.
    """

    key_path: str | None = None
    stage: str | None = None

    def __init_subclass__(cls, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        if cls.__module__ == __name__:
            cls.__module__ = _PUBLIC  # what a traceback prints before the name

    def __str__(self) -> str:
        said = super().__str__()
        return said if self.stage is None else f"in stage {self.stage!r}: {said}"


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

    operation: str
    path: str
    errno: int | None
    problem: str

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

    path: str
    problem: str

    def __init__(self, path: str, problem: str, *, key_path: str | None = None) -> None:
        super().__init__(f"{path}: {problem}" + (f" (leaf {key_path})" if key_path else ""))
        self.path, self.problem, self.key_path = path, problem, key_path


REPLACED_AT_ONCE: Final = "pass overwrite=True to replace it atomically"


@final
class ConfigError(SpecError):
    """An option is unknown, has the wrong type or unit, or is out of range.

    Attributes:
        key: The dotted name of the option, as in `save.write.concurrency`.
        source: Where it came from: a file name, an environment variable, `argument`.
    """

    key: str
    problem: str
    source: str

    def __init__(self, key: str, problem: str, source: str = "argument") -> None:
        super().__init__(f"{key}: {problem} (from {source})")
        self.key, self.problem, self.source = key, problem, source


@final
class PipelineError(SpecError):
    """A pipeline was put together wrongly: an unknown or repeated stage name, an empty pipeline."""

    @classmethod
    def unknown_stage(cls, name: str, known: Sequence[str]) -> PipelineError:
        """Say that no stage is called `name`, and which name is near; if none is, all of them."""
        return cls(f"no stage is called {name!r}; {hint_at(name, known)}")


@final
class PathError(SpecError):
    """A `path`, as it was given, that cannot name a checkpoint."""

    path: str

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path!r} {problem}")
        self.path = path


@final
class DestinationExistsError(SpecError, FileExistsError):
    """The destination of a save, `path`, exists, and `overwrite` was not asked for.

    `advice` says what to pass to replace it.
    """

    path: str
    advice: str

    def __init__(self, path: str, advice: str = REPLACED_AT_ONCE) -> None:
        super().__init__(f"{path!r} exists; {advice}")
        self.path, self.advice = path, advice


@final
class UnsupportedByStoreError(SpecError):
    """The store cannot carry out `operation` at `path`, and nothing was written.

    `store` is the name of its type, and `capability` what it lacks: a kind of store, or a method. `advice`,
    which may be empty, says what would do instead.
    """

    operation: str
    path: str
    advice: str
    store: str
    capability: str

    def __init__(
        self, operation: str, path: str, store: object, capability: type | str, advice: str = ""
    ) -> None:
        self.operation, self.path, self.advice = operation, path, advice
        self.store = type(store).__name__
        self.capability = capability.__name__ if isinstance(capability, type) else capability
        said = f"{self.store} cannot {operation} {path!r}: it lacks {self.capability}"
        super().__init__(f"{said}; {advice}" if advice else said)


@final
class StepExistsError(SpecError, FileExistsError):
    """The step exists and `overwrite` was not asked for, or it is being saved.

    Attributes:
        step: Its number.
        advice: What to pass to replace it.
        tier: The directory that has it, if that is a tier and the root has not got it; else empty.
    """

    step: int
    advice: str
    tier: str

    def __init__(self, step: int, advice: str = REPLACED_AT_ONCE, tier: str = "") -> None:
        super().__init__(f"step {step} exists{_in_tier(tier)}; {advice}")
        self.step, self.advice, self.tier = step, advice, tier


@final
class OlderStepError(SpecError):
    """The step to be saved is older than the latest one, and `overwrite` was not asked for.

    Attributes:
        step: Its number.
        latest: The latest.
        tier: The directory that has the latest, if that is a tier and the root has not got it; else empty.
    """

    step: int
    latest: int
    tier: str

    def __init__(self, step: int, latest: int, tier: str = "") -> None:
        said = f"step {step} is older than the latest, {latest}{_in_tier(tier)}"
        super().__init__(f"{said}; pass overwrite=True to save it")
        self.step, self.latest, self.tier = step, latest, tier


def _in_tier(tier: str) -> str:
    return f" (in the tier {tier!r}, where an earlier run may have left it)" if tier else ""


@final
class RootInUseError(SpecError):
    """Another CheckpointManager, in this process or another, writes into the directory of steps `root`.

    Attributes:
        root: The directory of steps.
        more: Whose claim it is and how that ends, where nothing can be locked; else empty.
    """

    root: str
    more: str

    def __init__(self, root: str, more: str = "") -> None:
        problem = "is in use by another CheckpointManager that writes there"
        advice = "leave that one first, or open this one with read_only=True"
        super().__init__(f"{root!r} {problem}; {advice}{more and f' ({more})'}")
        self.root, self.more = root, more


@final
class UnknownMetricError(SpecError):
    """Steps are to be ranked by `metric`, which none of them has; `known` are the names that there are.

    Of a save these are the names of the metrics given.
    """

    metric: str
    known: tuple[str, ...]

    def __init__(self, metric: str, known: Sequence[str], *, at_save: bool = False) -> None:
        problem, advice = f"no step has the metric {metric!r}", ""
        if at_save:
            problem += " that the policy ranks by, and these metrics lack it"
            advice = " Where it is not known yet, give NaN, or no metrics at all"

        super().__init__(f"{problem}; {hint_at(metric, known)}{advice}")
        self.metric, self.known = metric, tuple(known)


@final
class LeaseTooLargeError(SpecError):
    """More bytes were asked for (`nbytes`) than the whole budget holds (`limit`): no wait could end."""

    nbytes: int
    limit: int

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

    pid: int

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

    process: int
    active: tuple[int, ...]

    def __init__(self, process: int, active: Sequence[int]) -> None:
        others = ", ".join(map(str, active))
        problem = f"process {process} takes no part: job.active_processes are {others}"
        super().__init__(f"{problem}. Call this in those processes alone, or let {process} be one of them")
        self.process, self.active = process, tuple(active)


@final
class RunningLoopError(SpecError, RuntimeError):
    """`penstock.sync` was called inside a running event loop, which it would block.

    Or a `Checkpointer` was used from the event loop of another thread than its own.
    """


@final
class DuplicateNameError(SpecError):
    """The leaves with the key paths `first` and `second` would both be stored under `name`."""

    name: str
    first: str
    second: str

    def __init__(self, name: str, first: str, second: str) -> None:
        super().__init__(f"{first} and {second} would both be stored as {name!r}; rename one")
        self.name, self.first, self.second = name, first, second
        self.key_path = second


def _leaf(key_path: str) -> str:
    """Name a leaf; one that is all of the tree has no keys."""
    return key_path or "the whole tree"


@final
class InvalidLeafError(SpecError, TypeError):
    """The value of a leaf cannot be stored, although its type is handled: an object array, a too large int.

    Attributes:
        key_path: The leaf.
        problem: What is wrong with it, and what to do.
    """

    problem: str

    def __init__(self, key_path: str, problem: str) -> None:
        super().__init__(f"{_leaf(key_path)}: {problem}")
        self.key_path, self.problem = key_path, problem


@final
class DeletedLeafError(SpecError, RuntimeError):
    """A jax.Array was donated or deleted before its bytes were taken."""

    def __init__(self, key_path: str) -> None:
        problem = "was deleted or donated before it was staged; await save.staged() before donating it"
        super().__init__(f"{_leaf(key_path)}: the array {problem}")
        self.key_path = key_path


@final
class ChangedLeafError(SpecError):
    """A stage changed a leaf's dtype, shape or length and had not declared that: nothing was published.

    Attributes:
        key_path: The leaf.
        planned: How it was to be stored.
        found: What it has become.
    """

    planned: str
    found: str

    def __init__(self, key_path: str, planned: str, found: str) -> None:
        advice = "a stage that changes leaves declares that by a method resolve_spec, and keeps to it"
        super().__init__(f"{key_path} was planned as {planned} and has become {found}; {advice}")
        self.key_path, self.planned, self.found = key_path, planned, found


@dataclass(frozen=True, slots=True)
class TreeDifference:
    """One way in which a restore target and a checkpoint disagree."""

    kind: str
    """"missing" (target only), "unexpected" (checkpoint only), "shape", "dtype", "type"; "sharding" and
    "rule" if what the target asks for cannot be done."""
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
        elif self.kind in ("rule", "sharding"):  # of the target alone: it cannot be carried out
            text = f"{self.kind:<11} {self.key_path}: {self.in_like}"

        return text + (f"; did you mean {self.suggestion}?" if self.suggestion else "")


def _accepting(path: str, differences: Sequence[TreeDifference]) -> list[str]:
    """Return lines that say which options would accept differences; none for a broken rule."""
    kinds = {difference.kind for difference in differences}
    if not kinds or "rule" in kinds:
        return []
    if "sharding" in kinds:
        return [
            "each axis of a mesh must divide the axes of the array that it cuts; others get None in the spec"
        ]

    options: list[str] = []
    advice: list[str] = []
    other = [difference.key_path for difference in differences if difference.kind in {"shape", "type"}]
    if other:
        shown = ", ".join(f"{key_path!r}: None" for key_path in other[:3])
        options.append(f"rename={{{shown}{', ...' if len(other) > 3 else ''}}}")
        advice.append("rename leaves out what is stored there (strict=False pads arrays or cuts them off)")
    if "dtype" in kinds:
        options.append('dtype="like"')
        advice.append('dtype="like" casts to the dtypes of the target')
    if other or "missing" in kinds:
        options.append('on_missing="keep"')
        advice.append('on_missing="keep" keeps what the target has and the checkpoint has not')
    if "unexpected" in kinds:
        options.append('on_unexpected="skip"')
        advice.append('on_unexpected="skip" leaves out what only the checkpoint has')

    return [f"accepted by: restore({path!r}, like=..., {', '.join(options)})", *advice]


@final
class StructureMismatchError(SpecError):
    """The restore target and the checkpoint differ; every difference is listed.

    Attributes:
        path: The checkpoint.
        differences: All of them: first missing, then unexpected leaves, then those that differ.
    """

    path: str
    differences: tuple[TreeDifference, ...]

    SHOWN = 40

    def __init__(self, path: str, differences: Sequence[TreeDifference]) -> None:
        lines = [str(difference) for difference in differences[: self.SHOWN]]
        if len(differences) > self.SHOWN:
            lines.append(f"... and {len(differences) - self.SHOWN} more")

        lines += _accepting(path, differences)
        super().__init__("\n  ".join([f"the target does not fit {path}:", *lines]))
        self.path, self.differences = path, tuple(differences)


@final
class RulesError(SpecError):
    """The rules and the checkpoint do not fit, or a rule cannot do what it says; every problem is listed.

    Attributes:
        path: The checkpoint.
        problems: What rules name that no source gives, what no rule takes, and what cannot be done.
    """

    path: str
    problems: tuple[str, ...]

    SHOWN = 40

    def __init__(self, path: str, problems: Sequence[str]) -> None:
        lines = list(problems[: self.SHOWN])
        if len(problems) > self.SHOWN:
            lines.append(f"... and {len(problems) - self.SHOWN:,} more")

        super().__init__("\n  ".join([f"the rules do not fit {path}:", *lines]))
        self.path, self.problems = path, tuple(problems)


@final
class ResultTypeError(SpecError, TypeError):
    """The result is not of the type that `as_type` asked for.

    Attributes:
        path: The checkpoint.
        as_type: The type asked for.
        found: The type of what was restored.
    """

    path: str
    as_type: object
    found: type

    def __init__(self, path: str, as_type: object, result: object) -> None:
        wanted = as_type.__name__ if isinstance(as_type, type) else str(as_type)
        super().__init__(f"{path} was restored as a {type(result).__name__}, and as_type asks for {wanted}")
        self.path, self.as_type, self.found = path, as_type, type(result)


@final
class NoHandlerError(HandlerError, TypeError):
    """No handler is registered for the type of a leaf, or for a stored type name.

    Attributes:
        key_path: The leaf.
        type_name: Its Python type, or the type name found on disk.
    """

    type_name: str

    def __init__(
        self,
        key_path: str,
        type_name: str,
        known: Sequence[str] = (),
        *,
        is_function: bool = False,
        is_dataclass: bool = False,
    ) -> None:
        advice = (
            "Register one with registry.register(Type, handler) and pass the registry to the Checkpointer"
            + (f"; handled here: {', '.join(known)}" if known else "")
        )
        if is_function:
            advice = (
                "It is a function, and belongs to the code: save the rest, in equinox "
                "`eqx.filter(model, eqx.is_array)`, and put both together after a restore, in equinox "
                "`eqx.combine(restored, model)`"
            )

        if is_dataclass:
            advice = (
                "It is a dataclass that jax does not know as a node of a tree: decorate it with "
                "`jax.tree_util.register_dataclass`, `flax.struct.dataclass` or the like"
            )

        super().__init__(f"{_leaf(key_path)}: no handler for {type_name}. {advice}")
        self.key_path = key_path
        self.type_name = type_name


@final
class AmbiguousHandlerError(HandlerError, TypeError):
    """Two handlers fit a type equally well.

    Attributes:
        type_name: The type looked up.
        candidates: Both handlers, as `module.QualName`.
    """

    type_name: str
    candidates: tuple[str, str]

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

    handler: str

    def __init__(self, key_path: str, handler: str, problem: str) -> None:
        super().__init__(f"{_leaf(key_path)}: {handler} failed: {problem}")
        self.key_path = key_path
        self.handler = handler


@final
class NoSpaceError(StorageError):
    """The medium has no room for what a save has to write. Its files are removed; earlier checkpoints stay.

    Its `key_path` is that of the first leaf without room, where that is known.

    Attributes:
        bytes_needed: What had to be written: all of the save, or the rest of it.
        bytes_free: What was free then; None if the store cannot tell. More than is needed means that
            something else was full: a quota, or the number of files.
    """

    bytes_needed: int
    bytes_free: int | None

    def __init__(
        self,
        operation: str,
        path: str,
        bytes_needed: int,
        bytes_free: int | None,
        key_path: str | None,
        said: str = "No space left",
    ) -> None:
        free = "" if bytes_free is None else f" and {bytes_free} are free"
        leaf = "" if key_path is None else f", from leaf {key_path} on"
        problem = f"{said}: {bytes_needed} bytes are needed{free}{leaf}"
        problem += " (the save is undone; earlier checkpoints are untouched)"
        super().__init__(operation, path, problem, errno.ENOSPC)
        self.bytes_needed, self.bytes_free, self.key_path = bytes_needed, bytes_free, key_path


@final
class AccessDeniedError(StorageError, PermissionError):
    """The server refuses the credentials, or what they ask for. Mend those; trying again does not help."""

    def __init__(self, operation: str, path: str, problem: str) -> None:
        StorageError.__init__(self, operation, path, problem, errno.EACCES)


@final
class ThrottledError(StorageError):
    """The server answered that it is too busy, also when it was asked again. Save or restore later."""

    def __init__(self, operation: str, path: str, problem: str) -> None:
        super().__init__(operation, path, problem, errno.EAGAIN)


@final
class UnreachableError(StorageError, ConnectionError):
    """The server does not answer, or not in time. Look at the endpoint and at the network."""

    def __init__(self, operation: str, path: str, problem: str) -> None:
        StorageError.__init__(self, operation, path, problem, errno.EHOSTUNREACH)


@final
class KeeperLostError(StorageError, ConnectionError):
    """No keeper of this user answers on this host, or not in time. Its steps may be in other tiers.

    Start one, with `penstock keeper run`, or look at why it stands still. What an ended one held is gone.

    Attributes:
        is_absent: Whether nobody listens there; else somebody does, and does not answer as a keeper.
    """

    is_absent: bool

    def __init__(self, socket: str, problem: str, number: int | None = None) -> None:
        advice = "; `penstock keeper run` starts one" if number == errno.ECONNREFUSED else ""
        StorageError.__init__(self, "ask the keeper at", socket, f"{problem}{advice}", number)
        self.is_absent = number == errno.ECONNREFUSED


@final
class MissingExtraError(SpecError, ImportError):
    """The path asks for a part of penstock whose packages are not installed.

    Attributes:
        path: What was asked for.
        extra: What to install: `pip install 'penstock[<extra>]'`.
    """

    extra: str

    def __init__(self, path: str, extra: str) -> None:
        super().__init__(f"{path!r} needs packages that are not installed: pip install 'penstock[{extra}]'")
        self.path, self.extra = path, extra


@final
class InUseError(StorageError):
    """Somebody else builds, reads or deletes a checkpoint at the path right now. Try again later.

    Attributes:
        more: Whose claim it is and how that ends, where nothing can be locked; else empty.
    """

    more: str

    def __init__(self, path: str, more: str = "") -> None:
        problem = "somebody builds, reads or deletes a checkpoint here"
        super().__init__("hold", path, f"{problem}; {more}" if more else problem, errno.EBUSY)
        self.more = more


@final
class ClaimLostError(StorageError):
    """Another process took over what this one had claimed at the path, and this one changed nothing since.

    A claim in a bucket ends when it is not renewed in time: this process was stopped or cut off for longer,
    or somebody had the claim removed. What the other process saves there is whole.

    Attributes:
        holder: Which process has the claim now; empty if it is not known.
    """

    holder: str

    def __init__(self, path: str, holder: str = "") -> None:
        taker = holder or "another process"
        problem = f"this process was stopped or cut off for too long, and {taker} took its claim over"
        super().__init__("hold", path, f"{problem}; open the manager again, or save again", errno.ESTALE)
        self.holder = holder


class BuildChangedError(StorageError):
    """Another program renamed, removed or replaced what a save built, or had just published.

    Nothing was deleted. Find that program (a cleaner of temporary files, `rsync --delete`), and save again.

    Attributes:
        older: Where the checkpoint is that was to be replaced, if it is not at its own path; else None.
    """

    older: str | None

    def __init__(self, operation: str, path: str, problem: str, older: str | None = None) -> None:
        where = f"; the earlier checkpoint is {older!r} now" if older else ""
        super().__init__(operation, path, f"{problem}{where}", errno.ESTALE)
        self.older = older


@final
class NotDurableError(StorageError):
    """A new checkpoint is at its path, whole; but the medium failed to make its name there durable.

    If the power fails now, it may be gone, or the one that it replaced may be back. So that one is kept until
    a later save has made the name durable. Save again, with `overwrite=True`; a manager needs no `overwrite`.

    Attributes:
        published: Always True: it can be restored.
        older: Where the checkpoint is that was replaced; None if there was none.
    """

    older: str | None

    published = True

    def __init__(self, path: str, older: str | None, cause: StorageError) -> None:
        kept = "" if older is None else f"; the one that it replaced is kept as {older!r}"
        problem = f"{cause.problem}: the new checkpoint is there, but may be lost if the power fails{kept}"
        super().__init__(cause.operation, path, f"{problem}. Save again with overwrite=True", cause.errno)
        self.older = older


@final
class SaveCancelledError(PenstockError):
    """The save that was awaited was cancelled; what it wrote was removed."""


@final
class IncompletePipelineError(PenstockError):
    """Fewer leaves reached the commit than were planned, so nothing was published.

    Attributes:
        planned: Leaves counted by the first stage.
        arrived: Leaves whose every byte arrived.
    """

    planned: int
    arrived: int

    def __init__(self, planned: int, arrived: int, first_absent: str) -> None:
        found = f"{planned} leaves were planned and {arrived} arrived complete"
        super().__init__(f"{found}; first absent: {first_absent}")
        self.planned, self.arrived, self.key_path = planned, arrived, first_absent


@final
class InsufficientMemoryError(PenstockError, MemoryError):
    """The machine has less memory than the result of a restore would take, or a save would.

    Pass `only`, `mmap` or another sharding to the restore, or a lower `memory_limit` to the Checkpointer.

    Attributes:
        path: The checkpoint.
        key_path: The largest leaf; None if it is not known.
        asked: Bytes of the whole result; None if it is not known.
        available: Bytes of memory that there are; None if it is not known.
    """

    path: str
    asked: int | None
    available: int | None

    def __init__(
        self, path: str, asked: int | None = None, available: int | None = None, key_path: str | None = None
    ) -> None:
        figures = "" if asked is None else f": {asked} bytes were asked for, of {available} that there are"
        largest = f" (the largest leaf is {key_path})" if key_path is not None else ""
        super().__init__(f"{path}: there is not enough memory{figures}{largest}")
        self.path, self.asked, self.available, self.key_path = path, asked, available, key_path


@final
class NoThreadError(PenstockError, RuntimeError):
    """The operating system refuses another thread. Have fewer, or raise the limit."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"no thread can be started ({problem}): have fewer threads and processes, or raise their limit "
            "(`ulimit -u`, in a container its `pids.max`)"
        )


@final
class ReplacedError(StorageError):
    """The source was replaced while it was being read, and so nothing was made of it.

    Restores and tools begin again by themselves. A stream, which has given values away, cannot.

    Attributes:
        times: How many attempts there were.
    """

    times: int

    def __init__(self, path: str, times: int = 1) -> None:
        often = "" if times == 1 else f" {times} times"
        advice = "" if times == 1 else "; read it when nobody overwrites it, or have steps saved side by side"
        super().__init__("read", path, f"was replaced{often} while it was being read{advice}")
        self.times = times


@final
class NotACheckpointError(CorruptCheckpointError, FileNotFoundError):
    """There is nothing at the path, or nothing in a format that penstock knows."""


@final
class MissingFileError(CorruptCheckpointError, FileNotFoundError):
    """A checkpoint refers to a file that does not exist."""


@final
class NotAFileError(CorruptCheckpointError):
    """Something that is no file is where a checkpoint has one: a pipe, a socket, a device. It is not read.

    Attributes:
        found: What it is.
    """

    found: str

    def __init__(self, path: str, found: str) -> None:
        super().__init__(path, f"is {found}, not a file")
        self.found = found


@final
class IncompleteCheckpointError(CorruptCheckpointError):
    """The save of this checkpoint was interrupted, or goes on; nothing was published yet.

    Attributes:
        goes_on: Whether somebody is saving it right now: try again when that is over. False on a medium that
            does not say so.
    """

    goes_on: bool

    def __init__(self, path: str, problem: str, *, goes_on: bool = False) -> None:
        super().__init__(path, problem)
        self.goes_on = goes_on


@final
class TruncatedDataError(CorruptCheckpointError):
    """A data file is shorter than the index says.

    Attributes:
        needed: Bytes the index refers to.
        found: Bytes in the file.
    """

    needed: int
    found: int

    def __init__(self, path: str, needed: int, found: int, *, key_path: str | None = None) -> None:
        super().__init__(path, f"ends at byte {found}, but {needed} are needed", key_path=key_path)
        self.needed, self.found = needed, found


@final
class ChecksumError(CorruptCheckpointError):
    """The bytes read differ from the bytes written."""


@final
class UnsupportedFormatError(CorruptCheckpointError):
    """A checkpoint in a format that penstock recognises and cannot read."""


@final
class LinkOutsideError(CorruptCheckpointError):
    """A symbolic link in a checkpoint leads out of it, and links may not. The store can allow them.

    Attributes:
        target: Where it leads.
    """

    target: str

    def __init__(self, path: str, target: str) -> None:
        advice = "allow that with LocalStore(links='any'), or links = 'any' in the table [store]"
        super().__init__(path, f"is a link out of the checkpoint, to {target!r}; {advice}")
        self.target = target


@final
class ExpansionError(CorruptCheckpointError):
    """Without a target, a restore would take far more memory than is stored. It can be allowed.

    Attributes:
        stored_bytes: What the arrays take on the medium.
        result_bytes: What they would take in memory.
        most: How many times as much the result may be.
    """

    stored_bytes: int
    result_bytes: int
    most: int

    def __init__(
        self, path: str, stored_bytes: int, result_bytes: int, most: int, key_path: str | None
    ) -> None:
        problem = f"describes arrays of {result_bytes} bytes, and stores {stored_bytes}"
        advice = f"more than {most} times as much is refused unless `like` or max_expansion allows it"
        super().__init__(path, f"{problem}; {advice}", key_path=key_path)
        self.stored_bytes, self.result_bytes, self.most = stored_bytes, result_bytes, most


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

    peer_stage: str | None
    reason: str

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

    limit_s: float
    seen: dict[int, str | None]

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

    differences: tuple[str, ...]
    asked: dict[int, str]

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
    """A restore needs what another process wrote to its own disk.

    Attributes:
        path: The directory that holds the tree.
        process: Who wrote what is here, by index.
        processes: Who saved together.
    """

    path: str
    process: int

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

    path: str
    place: str

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

    path: str
    reason: str
    peer_stage: str | None
    processes: tuple[int, ...]

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
        super().__init__(f"{type(error).__name__}: {error}")
        self.stage = stage
        self.key_path = getattr(error, "key_path", None)
