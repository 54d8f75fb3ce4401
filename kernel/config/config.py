"""The configuration, in layers: defaults < TOML file < environment < arguments.

    [memory]
    limit_bytes = "2GiB"         # PENSTOCK_MEMORY__LIMIT_BYTES=2GiB
    save_concurrent_bytes = "64MiB"

    [store]
    io = "buffered"              # PENSTOCK_STORE__IO=buffered

    [store.s3]
    endpoint = "http://localhost:9000"   # PENSTOCK_STORE__S3__ENDPOINT=http://localhost:9000

    [format]
    codec = "auto"               # PENSTOCK_FORMAT__CODEC=auto

    [stopping]
    sigterm_s = 30               # PENSTOCK_STOPPING__SIGTERM_S=30

    [job]
    active_processes = [0, 1]    # PENSTOCK_JOB__ACTIVE_PROCESSES=0,1

    [processes]
    silence_s = 30               # PENSTOCK_PROCESSES__SILENCE_S=30

    [telemetry]
    observers = ["prometheus"]   # PENSTOCK_TELEMETRY__OBSERVERS=prometheus

    [save]
    piece_bytes = "16MiB"
    stages = ["flatten", "prioritise", "device_to_host", "limit_bytes", "write", "commit", "finalize"]

    [save.write]                 # the options of a stage, known to that stage alone
    concurrency = 4              # PENSTOCK_SAVE__WRITE__CONCURRENCY=4

    [profiles.tpu-pod.memory]    # over the others, with PENSTOCK_PROFILE=tpu-pod
    limit_bytes = "64GiB"

The file is named by the caller or by `PENSTOCK_CONFIG`, or is the nearest `penstock.toml` upwards from the
working directory.
"""

from __future__ import annotations

__all__ = (
    "Config",
    "FlowOptions",
    "LoopOptions",
    "MemoryOptions",
    "StoreOptions",
    "given_layers",
)

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

from penstock.kernel.config.bucket_options import AzOptions, BucketOptions, GsOptions, S3Options
from penstock.kernel.config.config_file import FILE_VARIABLE, PROFILE_VARIABLE, find_file, options_in
from penstock.kernel.config.job_limits import JobLimits
from penstock.kernel.config.job_options import JobOptions
from penstock.kernel.config.option_layers import (
    TABLES,
    Table,
    environment_table,
    load_options,
    merged,
    sourced,
)
from penstock.kernel.config.save_format import SaveFormat
from penstock.kernel.config.shutdown_options import StoppingOptions
from penstock.kernel.config.telemetry_options import TelemetryOptions
from penstock.kernel.errors import ConfigError

MIB = 2**20


@final
@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """`[memory]`: the budget that all saves and restores share."""

    limit_bytes: int | Literal["auto"] = field(default="auto", metadata={"positive": True})
    """Host bytes that all saves and restores together may hold. By default a quarter of what the machine or
    the cgroup allows, less under memory pressure."""
    save_device_host_concurrent_bytes: int | None = field(default=None, metadata={"positive": True})
    """How many of these bytes saves may hold staged; None for all of them."""
    save_concurrent_bytes: int = field(default=128 * MIB, metadata={"positive": True})
    """Bytes that all saves together may have in flight to storage at once."""
    restore_concurrent_bytes: int = field(default=256 * MIB, metadata={"positive": True})
    """Bytes that all restores together may have in flight from storage at once."""


@final
@dataclass(frozen=True, slots=True)
class LoopOptions:
    """`[loop]`: settings of the whole interpreter that are changed while penstock works."""

    pause_collector: bool = True  #: run the cyclic garbage collector rarely
    short_switches: bool = True  #: let threads take turns at the interpreter every millisecond


@final
@dataclass(frozen=True, slots=True)
class StoreOptions:
    """`[store]`: how stores are used. One that is given by the caller has its own options."""

    io: Literal["auto", "direct", "buffered"] = "auto"  #: local files: past the page cache, or through it
    links: Literal["inside", "any"] = "inside"  #: which symbolic links a checkpoint may have in it
    s3: S3Options = field(default_factory=S3Options)
    gs: GsOptions = field(default_factory=GsOptions)
    az: AzOptions = field(default_factory=AzOptions)

    def of_scheme(self, scheme: str) -> BucketOptions:
        """Return the options of the buckets whose URLs begin with a scheme."""
        found: BucketOptions = getattr(self, scheme)
        return found


@dataclass(frozen=True, slots=True)
class FlowOptions:
    """The options that `[save]` and `[restore]` share: the size of messages, and the stages."""

    piece_bytes: int = field(default=16 * MIB, metadata={"positive": True})
    """A larger leaf travels in pieces of about this size."""
    batch_leaves: int = field(default=2048, metadata={"positive": True})
    """At most so many small leaves travel in one message."""
    batch_bytes: int = field(default=4 * MIB, metadata={"positive": True})
    """And at most so many bytes; never more than 256 pieces."""
    stages: tuple[str, ...] | None = None  #: names, of penstock or of plug-ins; None: as usual
    stage_options: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict[str, Any], metadata={TABLES: True}
    )
    """Stage name -> option -> `Given`, checked when the stage itself is configured."""


@final
@dataclass(frozen=True, slots=True)
class SaveFlowOptions(FlowOptions):
    """`[save]`: as `[restore]`, but with larger messages.

    Fewer messages mean fewer trips to a thread before everything is staged, at a time when the writing
    threads already keep the processors busy.
    """

    batch_bytes: int = field(default=4096 * MIB, metadata={"positive": True})
    compare_linked_every: int = 10
    """In so many saves in a row, all bytes that are linked from an earlier checkpoint are read and compared
    once, a share in each save; what differs is written anew. 1: all of them in each save; 0: none."""

    def __post_init__(self) -> None:
        if self.compare_linked_every < 0:
            raise ConfigError(
                "save.compare_linked_every", f"must be 0 or more, not {self.compare_linked_every}"
            )


@final
@dataclass(frozen=True, slots=True)
class RestoreFlowOptions(FlowOptions):
    """`[restore]`: as `FlowOptions`, but with larger reads.

    A message costs the event loop half a millisecond, a tenth of what two threads take to read 16 MiB.
    """

    piece_bytes: int = field(default=32 * MIB, metadata={"positive": True})
    batch_bytes: int = field(default=32 * MIB, metadata={"positive": True})


@final
@dataclass(frozen=True, slots=True)
class Config:
    """All options. Made by its constructor or by `Config.load`."""

    memory: MemoryOptions = field(default_factory=MemoryOptions)
    save: SaveFlowOptions = field(default_factory=SaveFlowOptions)
    restore: RestoreFlowOptions = field(default_factory=RestoreFlowOptions)
    store: StoreOptions = field(default_factory=StoreOptions)
    loop: LoopOptions = field(default_factory=LoopOptions)
    format: SaveFormat = field(default_factory=SaveFormat)
    stopping: StoppingOptions = field(default_factory=StoppingOptions)
    job: JobOptions = field(default_factory=JobOptions)
    processes: JobLimits = field(default_factory=JobLimits)
    telemetry: TelemetryOptions = field(default_factory=TelemetryOptions)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        profile: str | None = None,
        environ: Mapping[str, str] | None = None,
        arguments: Mapping[str, object] | None = None,
    ) -> Config:
        """Read the configuration. Blocking: reads one file.

        Args:
            path: A TOML file; None for the one that `PENSTOCK_CONFIG` names, or else the nearest
                `penstock.toml` from the working directory upwards.
            profile: A table `[profiles.NAME]` of that file, whose options go over the others in it; None for
                the one that `PENSTOCK_PROFILE` names, if any.
            environ: Environment variables, instead of those of the process.
            arguments: Options that override all, as nested mappings: `{"memory": {"limit_bytes": "2GiB"}}`.

        Raises:
            ConfigError: If the file cannot be read, it has no such profile, an option is unknown, or a value
                does not fit. Every variable whose name begins with `PENSTOCK_` must be an option.
        """
        return load_options(
            cls, toml=given_layers(path, profile=profile, environ=environ, arguments=arguments)
        )

    def changed(self, arguments: Mapping[str, object]) -> Config:
        """Return a copy with some options changed, given and checked like the arguments of `load`."""
        return load_options(self, arguments=arguments)


def given_layers(
    path: str | os.PathLike[str] | None = None,
    *,
    profile: str | None = None,
    environ: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Table:
    """Return all that is given, each value with its source; the arguments are those of `Config.load`.

    Raises:
        ConfigError: If the file cannot be read, or has no such profile.
    """
    variables = dict(os.environ if environ is None else environ)
    file = find_file(path, variables)
    chosen, told_by = profile, "argument"
    if chosen is None:
        chosen, told_by = variables.get(PROFILE_VARIABLE) or None, PROFILE_VARIABLE
    if file is None and chosen is not None:
        raise ConfigError("profiles", f"there is no profile {chosen!r}, and no file for it", told_by)

    for name in (FILE_VARIABLE, PROFILE_VARIABLE):
        variables.pop(name, None)

    table = {} if file is None else options_in(file, chosen, told_by)
    return merged(merged(table, environment_table(variables)), sourced(arguments or {}, "argument"))
