"""What a caller of `restore` may ask for beyond what is stored, and what becomes of the pipeline then."""

from __future__ import annotations

__all__ = ("RestoreKeywords", "restore_options", "with_derive")

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from penstock.kernel.messages.restore import Only
from penstock.kernel.messages.restore_options import Rename, RestoreOptions, Transform
from penstock.kernel.pipeline.pipeline import Pipeline
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.stages.derive import Derive


class RestoreKeywords(TypedDict, total=False):
    """Keyword arguments of `restore` that let the result depart from what is stored.

    Without them every difference is an error. What they do is in the report, and told by events.

    Attributes:
        only: Which leaves are restored, and nothing else is read: shell patterns over dotted stored
            names (`"params"`, `["opt.*.mu"]`), where a name stands for all below it, too; or a
            function from the tuple of stored keys. A target has just those leaves.
        rename: Stored names to names in the result: dotted names, as they are stored (`"opt.0.mu"`),
            or tuples of keys. A name stands for all below it, too; the longest one counts, and
            None leaves out. Or a function from the tuple of stored keys to one of those.
        transforms: Regular expressions over key paths with slashes (`params/.*`) to
            `penstock.Transform`s, as in Orbax. What no leaf of the result is made of is not read.
        transforms_default_to_original: Whether leaves without a transform come from the checkpoint,
            where it has them, or are those of `like`.
        dtype: A dtype, for all arrays of its kind; `"like"`, for the dtypes of `like`; a mapping
            from shell patterns over dotted names of the result to dtypes, of which the first
            counts; or a function from the key path in the result to a dtype or None. Values are
            cast on the host, as in C. Typed keys, and what no array is, stay as they are.
        strict: If False, arrays are padded with zeros and cut off, at the end of each axis, to the
            shapes of `like`.
        on_missing: `"keep"` keeps leaves of `like` that the checkpoint does not have; the very same
            objects, which must be values and not types or structs.
        on_unexpected: `"skip"` leaves out, unread, what the checkpoint has and `like` has not.
    """

    only: Only | None
    rename: Rename | None
    transforms: Mapping[str, Transform] | None
    transforms_default_to_original: bool
    dtype: Any
    strict: bool
    on_missing: Literal["raise", "keep"]
    on_unexpected: Literal["raise", "skip"]


def restore_options(keywords: RestoreKeywords, *, has_like: bool) -> RestoreOptions | None:
    """Return the options that were given, or None if they ask for nothing.

    Raises:
        SpecError: If they contradict each other, or need a target.
        TypeError: If there is no option of a name.
    """
    changing: dict[str, Any] = {name: value for name, value in keywords.items() if name != "only"}
    options = RestoreOptions(**changing)
    if options == RestoreOptions():
        return None

    options.check_target(has_like=has_like)
    return options


def with_derive(pipeline: Pipeline[RestoreRun], options: RestoreOptions | None) -> Pipeline[RestoreRun]:
    """Return a pipeline that makes what is not simply read, if there may be such leaves.

    Raises:
        PipelineError: If there may, and it has no stage `assemble`.
    """
    if options is None or "derive" in pipeline.names:
        return pipeline

    makes = options.transforms is not None or options.on_missing == "keep"
    return pipeline.insert_before("assemble", Derive(), called="derive") if makes else pipeline
