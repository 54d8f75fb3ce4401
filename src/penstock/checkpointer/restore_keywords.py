"""The keywords of every `restore`, and the checks of what is asked."""

from __future__ import annotations

__all__ = (
    "RestoreKeywords",
    "RestoreOnceKeywords",
    "check_single_replica",
    "result_check",
)

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict, cast, get_origin, is_typeddict

from penstock.checkpointer.pipelines import First
from penstock.kernel.errors import ResultTypeError, SpecError
from penstock.kernel.messages.restore import (
    Only,
    Rename,
    RestoreReport,
    RestoreRequest,
    Transform,
)
from penstock.kernel.pipeline.observers import Observer
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.progress.shown_progress import ShowProgress


class RestoreKeywords(TypedDict, total=False):
    """Keyword arguments of every `restore` beside `like` and `as_type`; type checkers read them here.

    Those from `only` on let the result differ from what is stored; without them every difference is an
    error. The `RestoreReport` and events say what they did.

    Attributes:
        mmap: Whether leaves live in the page cache where they can; see `Checkpointer.restore`.
        verify: Whether bytes are compared with their recorded checksums: by default all that are read, and
            not those that are mapped; True for those, too; False for none. Ranges without a recorded
            checksum cannot be compared: `penstock verify` names them.
        split: What separates the keys in the names of a safetensors file.
        item: Which item of the checkpoint, by its name; by default the one that holds the tree.
        prioritise: Says which leaves are read first, by stored key path.
        pipeline: Stages for this restore alone.
        on_report: Called with the `RestoreReport` when the result is complete.
        only: Which leaves are restored; nothing else is read. Shell patterns over dotted stored names
            (`"params"`, `["opt.*.mu"]`), where a name also stands for everything below it; or a
            function from the tuple of stored keys to a bool. With `like`, it has just those leaves.
        rename: Stored names to names in the result: dotted names, as they are stored (`"opt.0.mu"`),
            or tuples of keys. A name also stands for everything below it; the longest match counts;
            None leaves the leaf out. Or a function from the tuple of stored keys to one of those.
        transforms: Regular expressions over key paths with slashes (`params/.*`) to
            `penstock.Transform`s, as in Orbax. Stored leaves that no result needs are not read.
        transforms_default_to_original: Whether leaves without a transform come from the checkpoint,
            where it has them, or are those of `like`.
        dtype: A dtype, for all arrays of its kind; `"like"`, for the dtypes of `like`; a mapping
            from shell patterns over dotted names of the result to dtypes, of which the first match
            counts; or a function from the key path in the result to a dtype or None. Values are
            cast on the host, as in C. Typed keys and leaves that are not arrays stay as they are.
        strict: If False, arrays are padded with zeros or cut off, at the end of each axis, to the
            shapes of `like`.
        on_missing: `"keep"` keeps leaves of `like` that the checkpoint does not have: the very same
            objects, which must be values and not types or structs.
        on_unexpected: `"skip"` leaves out, unread, what the checkpoint has and `like` has not.
        max_expansion: How many times the bytes stored the result may take if there is no `like`; by default
            what the stage `plan` is configured to, which is 1,000. Results of up to 64 MiB are not compared.
        replica_axis: In a job of several processes: the axis of meshes along which replicas lie. Of leaves
            of `like` with such a sharding one replica is read, by the processes that hold it, and
            sent to all others, in rounds within the memory budget. All processes call it at one time, and
            none runs other collectives meanwhile. Other leaves, and PRNG keys, each process reads itself.
        primary_replica: Which replica is read: its place along that axis.
        progress: Whether a progress bar is shown on stderr: True, for one of tqdm or rich, whichever is
            installed, where stderr is a terminal or a notebook; `"tqdm"` or `"rich"`, wherever it goes; or a
            function that is called with the bytes done and all bytes, in the thread of the event loop.
    """

    mmap: bool
    verify: bool | None
    split: str | None
    item: str | None
    prioritise: First | None
    pipeline: Pipeline[RestoreRun] | None
    on_report: Callable[[RestoreReport], object] | None
    only: Only | None
    rename: Rename | None
    transforms: Mapping[str, Transform] | None
    transforms_default_to_original: bool
    dtype: Any
    strict: bool
    on_missing: Literal["raise", "keep"]
    on_unexpected: Literal["raise", "skip"]
    max_expansion: int | None
    replica_axis: str | None
    primary_replica: int
    progress: ShowProgress


class RestoreOnceKeywords(RestoreKeywords, total=False):
    """Those of a `restore` that opens a Checkpointer of its own.

    Attributes:
        observers: As for `Checkpointer`.
    """

    observers: Iterable[Observer]


def check_single_replica(request: RestoreRequest) -> None:
    """Raise `SpecError` if what is wanted of a restore with `replica_axis` is not what `like` says."""
    options = request.options
    problems = {
        "it needs a `like`, whose shardings say what lies where": not request.has_like,
        "arrays that are mapped are read by none": options.mmap,
        "`like` must have the dtypes and shapes of the result": options.dtype is not None
        or not options.strict,
        "the leaves of `like` are replaced, so none can be kept": options.on_missing == "keep",
        "functions have no replicas": options.transforms is not None,
    }
    for problem, is_asked in problems.items():
        if is_asked:
            raise SpecError(f"replica_axis: {problem}")


def result_check(path: str, as_type: object) -> Callable[[object], None]:
    """Return a function that raises `ResultTypeError` for a result of another type than requested.

    Args:
        path: Of the checkpoint, for the message.
        as_type: A class, a generic alias (`dict[str, jax.Array]`, of which only `dict` is checked), a
            TypedDict (of which only its names are), or None for any result.

    Raises:
        SpecError: If results cannot be checked against `as_type`.
    """
    if as_type is None:
        return lambda _: None
    if is_typeddict(as_type):
        keys: frozenset[str] = cast("Any", as_type).__required_keys__
        return lambda result: _check(
            path, as_type, result, fits=isinstance(result, dict) and keys <= cast("Any", result).keys()
        )

    origin = get_origin(as_type)
    wanted = as_type if origin is None else origin
    try:
        isinstance(None, cast("Any", wanted))
    except TypeError as error:
        raise SpecError(f"as_type must be a class such as a dataclass or dict, not {as_type!r}") from error

    return lambda result: _check(path, as_type, result, fits=isinstance(result, cast("Any", wanted)))


def _check(path: str, as_type: object, result: object, *, fits: bool) -> None:
    if not fits:
        raise ResultTypeError(path, as_type, result)
