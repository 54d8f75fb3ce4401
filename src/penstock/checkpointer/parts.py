"""The arguments of a Checkpointer and of its restores, for type checkers and as values; loads no jax."""

from __future__ import annotations

__all__ = (
    "CheckpointerKeywords",
    "CheckpointerParts",
    "MemoryKeywords",
    "RestoreKeywords",
    "RestoreOnceKeywords",
    "config_and_regulator",
)

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, cast, final

from penstock.config.config import Config
from penstock.kernel.errors import ConfigError
from penstock.kernel.memory.regulator import MemoryRegulator

if TYPE_CHECKING:
    from penstock.handlers.coordinators.job_options import JobOptions
    from penstock.handlers.layouts.auto_layout import AutoLayout
    from penstock.kernel.messages.restore import Only, Rename, Transform
    from penstock.kernel.pipeline.pipeline import Pipeline
    from penstock.kernel.pipeline.run_context import RestoreRun, SaveRun, ShowProgress
    from penstock.kernel.protocols.coordinator import Coordinator
    from penstock.kernel.protocols.layouts import Layout
    from penstock.kernel.protocols.leaf import LeafPredicate
    from penstock.kernel.protocols.leaf_handlers import HandlerLookup
    from penstock.kernel.protocols.save_format import SaveFormat
    from penstock.kernel.protocols.stores import Store
    from penstock.kernel.rules import Rule
    from penstock.reports.report import RestoreReport
    from penstock.telemetry.observers import Observer


FEWEST_BYTES: Final = 500
"""A budget of fewer is a slip: the number of gigabytes, most likely."""


@final
@dataclass(frozen=True, slots=True)
class CheckpointerParts:
    """The arguments of a `Checkpointer`, which describes them; None stands for the default."""

    config: Config
    memory: MemoryRegulator
    registry: HandlerLookup | None = None
    save_pipeline: Pipeline[SaveRun] | None = None
    restore_pipeline: Pipeline[RestoreRun] | None = None
    store: Store | None = None
    save_format: SaveFormat | None = None
    layout: Layout | AutoLayout | None = None
    coordinator: Coordinator | None = None
    observers: tuple[Observer, ...] = ()


class RestoreKeywords(TypedDict, total=False):
    """Keyword arguments of every `restore` but `like` and `as_type`; type checkers read them here.

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
        rules: What becomes of the stored leaves: rules of `penstock.rules`, or what `load_rules` returns.
            Names, shapes and dtypes change, leaves are joined and taken apart; all options but `split`,
            `item`, `mmap` and `verify` are about the results.
            With `like`, that says which leaves are wanted; without, a leaf that no rule takes is an error,
            unless the rules have `rest="keep"`.
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
        replica_axis: In a job of several processes: the axis of meshes along which replicas are. Of leaves
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
    prioritise: LeafPredicate | None
    pipeline: Pipeline[RestoreRun] | None
    on_report: Callable[[RestoreReport], object] | None
    only: Only | None
    rules: Sequence[Rule] | None
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
    """Those of a `restore` that opens its own Checkpointer.

    Attributes:
        observers: As for `Checkpointer`.
    """

    observers: Iterable[Observer]


class MemoryKeywords(TypedDict, total=False):
    """Keyword arguments of `Checkpointer` that bound memory; each overrides the config.

    Each takes a number of bytes, or a text such as `"2GiB"`. Names of Orbax's mean what they mean there.

    Attributes:
        memory_limit: Host bytes that all saves and restores together may hold, or `"auto"`.
        save_device_host_concurrent_bytes: Of these, how many saves may hold staged; by default all.
        save_concurrent_bytes: Bytes that may be on their way to storage at once.
        restore_concurrent_bytes: Bytes that may be on their way from storage at once.
        memory: The budget of another Checkpointer, to share it; instead of all the others.
    """

    memory_limit: int | str | None
    save_device_host_concurrent_bytes: int | str | None
    save_concurrent_bytes: int | str | None
    restore_concurrent_bytes: int | str | None
    memory: MemoryRegulator | None


class CheckpointerKeywords(MemoryKeywords, total=False):
    """Keyword arguments of `Checkpointer`, for a manager that makes its own."""

    config: Config | str | os.PathLike[str] | None
    profile: str | None
    registry: HandlerLookup | None
    save_pipeline: Pipeline[SaveRun] | None
    restore_pipeline: Pipeline[RestoreRun] | None
    store: Store | None
    save_format: SaveFormat | None
    layout: Layout | AutoLayout | None
    coordinator: Coordinator | None
    observers: Iterable[Observer]
    job: JobOptions | None


def config_and_regulator(
    config: Config | str | os.PathLike[str] | None, keywords: MemoryKeywords, profile: str | None = None
) -> tuple[Config, MemoryRegulator]:
    """Return the options, overridden by the keywords, and the budget that they describe.

    Raises:
        ConfigError: If an option is unknown or does not fit, or one is given together with `memory`.
    """
    if not isinstance(cast("object", config), Config | str | os.PathLike | None):
        raise ConfigError("config", f"is a Config or the path of a TOML file, not {config!r}")

    given = {name: value for name, value in keywords.items() if value is not None}
    for name, value in given.items():
        if type(value) is int and 0 < value < FEWEST_BYTES:
            raise ConfigError(name, f"{value} means {value} bytes; write '{value}GiB' for gigabytes")

    memory = cast("MemoryRegulator | None", given.pop("memory", None))
    if memory is not None and given:
        raise ConfigError(f"memory.{next(iter(given))}", "cannot be combined with `memory`")
    if "memory_limit" in given:
        given = {"limit_bytes": given.pop("memory_limit"), **given}

    if isinstance(config, Config):
        if profile is not None:
            raise ConfigError("profile", "cannot be combined with a Config, which has been loaded already")

        options = config
    else:
        options = Config.load(config, profile=profile)

    options = options.changed({"memory": given}) if given else options
    return options, _regulator(options) if memory is None else memory


def _regulator(options: Config) -> MemoryRegulator:
    memory = options.memory
    return MemoryRegulator(
        memory.limit_bytes,
        save_device_host_concurrent_bytes=memory.save_device_host_concurrent_bytes,
        save_concurrent_bytes=memory.save_concurrent_bytes,
        restore_concurrent_bytes=memory.restore_concurrent_bytes,
    )
