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

    [[tier]]                     # of a CheckpointManager, the nearest first
    kind = "memory"
    keep_last = 2

    [[tier]]
    path = "/nvme/run"
    keep_last = 3

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
    "READ_S",
    "Config",
    "FlowOptions",
    "MemoryOptions",
    "StoppingOptions",
    "StoreOptions",
    "TelemetryOptions",
    "TierOptions",
    "given_layers",
    "options_in",
    "profiles_in",
)

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, cast, final

from penstock.config.files import FILE_VARIABLE, PROFILE_VARIABLE, FoundFile, find_file
from penstock.event_loop.interpreter_settings import LoopOptions
from penstock.handlers.coordinators.job_options import JobLimits, JobOptions
from penstock.handlers.stores.buckets.bucket_options import AzOptions, BucketOptions, GsOptions, S3Options
from penstock.handlers.stores.keeper.keeper_options import KeeperOptions
from penstock.kernel.codecs import AUTO, check_codec
from penstock.kernel.errors import ConfigError
from penstock.kernel.options import (
    TABLES,
    Table,
    environment_table,
    fit_fields,
    load_options,
    merged,
    sourced,
)
from penstock.kernel.protocols.save_format import SaveFormat
from penstock.kernel.registry import SCHEMES, SHORTEST_LEASE_S, Scheme
from penstock.kernel.words import nearest

_NO_OPTIONS: Final = (FILE_VARIABLE, PROFILE_VARIABLE, "PENSTOCK_TRACEBACK", "PENSTOCK_PUBLIC_DEVICE_PUT")
"""Variables that are read where they count; one of this prefix that nothing knows is a mistake."""
_PROFILES: Final = "profiles"


def options_in(file: FoundFile, profile: str | None, profile_told_by: str) -> Table:
    """Return the options of a file, and over them those of a profile in it. Blocking.

    Raises:
        ConfigError: If the file cannot be read or is not TOML, or it has no such profile.
    """
    toml = _read(file)
    profiles = _profiles(toml, file)
    table = sourced({name: value for name, value in toml.items() if name != _PROFILES}, file.path)
    if profile is None:
        return table
    if profile not in profiles:
        near = nearest(profile, list(profiles))
        known = f"{file.path!r} has {near or ', '.join(sorted(profiles)) or 'none'}"
        raise ConfigError(_PROFILES, f"there is no profile {profile!r}; {known}", profile_told_by)

    return merged(table, sourced(profiles[profile], file.path, f"{_PROFILES}.{profile}"))


def profiles_in(file: FoundFile) -> tuple[str, ...]:
    """Return the names of the profiles in a file. Blocking.

    Raises:
        ConfigError: If the file cannot be read or is not TOML.
    """
    return tuple(_profiles(_read(file), file))


def _profiles(toml: Mapping[str, object], file: FoundFile) -> Mapping[str, Mapping[str, object]]:
    found = toml.get(_PROFILES, {})
    if not isinstance(found, dict):
        raise ConfigError(_PROFILES, f"must be a table of tables, not {found!r}", file.path)

    profiles = cast("Mapping[str, object]", found)
    for name, profile in profiles.items():
        if not isinstance(profile, dict):
            raise ConfigError(f"{_PROFILES}.{name}", f"must be a table, not {profile!r}", file.path)

    return cast("Mapping[str, Mapping[str, object]]", profiles)


def _read(file: FoundFile) -> dict[str, object]:
    try:
        with open(file.path, "rb") as opened:
            return tomllib.load(opened)
    except OSError as error:
        raise ConfigError("config", f"cannot read {file.path!r}: {error.strerror}", file.told_by) from error
    except ValueError as error:  # not TOML, or not even UTF-8
        raise ConfigError("config", f"{file.path!r} is not TOML: {error}", file.told_by) from error


@final
@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    """`[telemetry]`: what observes saves and restores.

    Attributes:
        observers: Names: `"prometheus"` and `"opentelemetry"` (extra `metrics`), or of entry points of the
            group "penstock.observers", which are called without arguments.
        keep_reports: How many reports of recent saves and restores are kept in a small file next to the
            checkpoints, `_PENSTOCK_REPORTS.json`, which `penstock ui` shows: 1000 at most. 0 writes none. If
            it is not set, a `CheckpointManager` keeps 1000, and a save to any other path none.
    """

    observers: tuple[str, ...] = ()
    keep_reports: int | None = None

    def __post_init__(self) -> None:
        fit_fields(self, "telemetry")


READ_S: Final = 2.0


@final
@dataclass(frozen=True, slots=True)
class StoppingOptions:
    """`[stopping]`: how saves and restores end that are cancelled, or under way when the process ends.

    Attributes:
        at_exit: What happens to saves in an event loop of another thread (as with `penstock.sync`) when
            the main thread ends without leaving its Checkpointer: `"drain"` waits for them; `"abandon"`
            lets them die with the process, as if it had been killed.
        at_exit_s: How long `"drain"` waits, in seconds.
        sigterm_s: If above 0, a SIGTERM is held back until the saves under way have ended, for at most
            this many seconds. Then it acts as usual. A second one is not held back.
        undo_s: How many seconds a save that failed or was cancelled waits for third-party handlers that
            write in the background. After that it ends with an error that names the handler.
        read_s: How many seconds a restore that was cancelled, or whose deadline passed, waits for reads under
            way; so does whatever else only reads. After that it leaves them to their threads.
        delete_s: How many seconds leaving a CheckpointManager waits for the deletion of steps. After that it
            leaves them, too: the rest of a step that is gone already is removed by the next manager.
    """

    at_exit: Literal["drain", "abandon"] = "drain"
    at_exit_s: float = field(default=600.0, metadata={"positive": True})
    sigterm_s: float = 0.0
    undo_s: float = field(default=60.0, metadata={"positive": True})
    read_s: float = field(default=READ_S, metadata={"positive": True})
    delete_s: float = field(default=60.0, metadata={"positive": True})

    def __post_init__(self) -> None:
        fit_fields(self, "stopping")


@final
@dataclass(frozen=True, slots=True)
class TierOptions:
    """`[[tier]]`: where a `CheckpointManager` saves steps first, unless it is given `tiers`.

    Attributes:
        kind: `"memory"`: of this machine, held by a keeper. By default `"disk"`, which needs a `path`.
        path: The directory of this tier alone, of a disk or a bucket. It serves one root.
        keep_last: So many steps stay here; the last one always does.
        keep_every: Besides, steps whose number is a multiple of this stay; None for no others.
        save_every: Only steps whose number is a multiple of this come here; None for all that are offered.
        limit_bytes: Of memory: the most that its keeper may take; `"auto"` for half of what is free.
        peers: Of memory: to the keepers of how many other hosts of a job each step goes.
        step_bytes: Of memory: about how many bytes of a step this process saves; pages for the first one are
            made ready on opening. `"auto"` for as many as the newest step has.
        codec: Of a disk: as of `[format]`, for the steps here; None for none, they are encoded on their way.
    """

    kind: Literal["memory", "disk"] = "disk"
    path: str | None = None
    keep_last: int = field(default=2, metadata={"positive": True})
    keep_every: int | None = field(default=None, metadata={"positive": True})
    save_every: int | None = field(default=None, metadata={"positive": True})
    limit_bytes: int | Literal["auto"] = field(default="auto", metadata={"positive": True})
    peers: int = field(default=0)
    step_bytes: int | Literal["auto"] = field(default="auto", metadata={"positive": True})
    codec: str | None = None

    def __post_init__(self) -> None:
        fit_fields(self, "tier")
        is_memory = self.kind == "memory"
        if is_memory and self.path is not None:
            raise ConfigError("tier.path", 'is for a tier with kind = "disk"; one in memory has none')
        if not is_memory and self.path is None:
            raise ConfigError("tier.path", 'is missing; a tier in memory has kind = "memory"')
        for name in ("limit_bytes", "step_bytes"):
            if not is_memory and getattr(self, name) != "auto":
                raise ConfigError(f"tier.{name}", 'is for a tier with kind = "memory"')
        if self.codec is not None:
            check_codec("tier.codec", self.codec, others=("none", AUTO))
            if is_memory:
                raise ConfigError("tier.codec", "is for a tier with a path; in memory steps are plain")
        if self.peers < 0 or (self.peers and not is_memory):
            raise ConfigError("tier.peers", 'is how many hosts, for a tier with kind = "memory"')


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

    def __post_init__(self) -> None:
        fit_fields(self, "memory")


@final
@dataclass(frozen=True, slots=True)
class StoreOptions:
    """`[store]`: how stores are used. One that is given by the caller has its own options."""

    io: Literal["auto", "direct", "buffered"] = "auto"  #: local files: past the page cache, or through it
    links: Literal["inside", "any"] = "inside"  #: which symbolic links a checkpoint may have in it
    s3: S3Options = field(default_factory=S3Options)
    gs: GsOptions = field(default_factory=GsOptions)
    az: AzOptions = field(default_factory=AzOptions)
    keeper: KeeperOptions = field(default_factory=KeeperOptions)

    def __post_init__(self) -> None:
        fit_fields(self, "store")

    @property
    def shortest_lease_s(self) -> float:
        """No store, of whichever scheme, has a shorter lease."""
        return min(SHORTEST_LEASE_S, *[options.lease_s for options in (self.s3, self.gs, self.az)])

    def of_scheme(self, scheme: str) -> BucketOptions | KeeperOptions | Scheme:
        """Return the options of the stores whose URLs begin with a scheme.

        Raises:
            ConfigError: If another distribution's scheme is broken, or it is unknown.
        """
        if scheme in SCHEMES.own:
            own: BucketOptions | KeeperOptions | None = getattr(self, scheme, None)
            if own is not None:
                return own

        found = SCHEMES.find(scheme)
        if found is None:
            raise ConfigError("store", f"there is no scheme {scheme!r}")

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
    """Stage name -> option -> `SourcedValue`, checked when the stage itself is configured."""
    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        fit_fields(self, self.section)


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
    section: ClassVar[str] = "save"

    def __post_init__(self) -> None:
        fit_fields(self, self.section)
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
    section: ClassVar[str] = "restore"


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
    tier: tuple[TierOptions, ...] = ()  #: the tiers of a CheckpointManager, the nearest first

    def __post_init__(self) -> None:
        fit_fields(self, "")

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
    """Return all given values, each with its source; the arguments are those of `Config.load`.

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

    for name in _NO_OPTIONS:
        variables.pop(name, None)

    table = {} if file is None else options_in(file, chosen, told_by)
    return merged(merged(table, environment_table(variables)), sourced(arguments or {}, "argument"))
