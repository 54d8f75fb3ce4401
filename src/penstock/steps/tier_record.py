"""The levels of a run, found from any of them: each directory has a record of all, the root's included.

Who reads a run may be on another machine, or come after its keeper has ended. So a tier that cannot be seen
is no error: it says why.
"""

from __future__ import annotations

__all__ = (
    "SeenLevel",
    "TierRecord",
    "find_checkpoint",
    "kind_of",
    "labels_of",
    "levels_of",
    "nearest_checkpoint",
    "read_record",
    "record_of_root",
    "root_of_tier",
    "write_record",
)

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

from penstock.handlers.formats.orbax.discovery import names_a_step
from penstock.handlers.formats.orbax.file_names import TIER
from penstock.handlers.layouts.discovery import checkpoint_path, look_at
from penstock.handlers.stores.publishing.paths import scheme_of
from penstock.kernel.errors import KeeperLostError, PenstockError, StorageError
from penstock.kernel.protocols.stores import Store
from penstock.steps.step_directory import StepReader
from penstock.steps.step_names import StepNames
from penstock.stores.store_finder import store_at, store_of


@final
@dataclass(frozen=True, slots=True)
class TierRecord:
    """The directories that a run has its steps in."""

    root: str  #: that the tiers serve; empty if it is not known
    tiers: tuple[str, ...] = ()  #: the nearest first
    names: StepNames | None = None  #: of step directories; None if they have a format of the caller's
    processes: tuple[int, ...] = ()  #: that save together; none for a process alone
    local_root: str | None = None  #: where each of them has a disk of its own
    host: str = field(default_factory=socket.gethostname)  #: that wrote it: disks and memory are of that one
    formats: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """By directory: how the steps there are stored, as options of `SaveFormat`; empty if they are copied."""

    @property
    def n_processes(self) -> int:
        """The number of those that save together."""
        return max(len(self.processes), 1)

    def encode(self) -> bytes:
        """Return the file."""
        names = None if self.names is None else [self.names.prefix, self.names.digits]
        told: dict[str, object] = {"root": self.root, "tiers": self.tiers, "names": names, "host": self.host}
        if self.processes:
            told |= {"processes": self.processes, "local_root": self.local_root}
        if self.formats:
            told["formats"] = self.formats

        return json.dumps(told).encode()

    @classmethod
    def decode(cls, data: bytes) -> TierRecord:
        """Read the file; what is no such file names no root."""
        try:
            told = json.loads(data)
            names = None if told["names"] is None else StepNames(*told["names"])
            tiers, processes = tuple(map(str, told["tiers"])), tuple(map(int, told.get("processes", ())))
            local_root, host = told.get("local_root"), str(told.get("host", ""))
            local_root = local_root and str(local_root)
            formats = {str(path): dict(form) for path, form in told.get("formats", {}).items()}
            return cls(str(told["root"]), tiers, names, processes, local_root, host, formats)
        # A SpecError of the names is a ValueError.
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return cls("", host="")


def read_record(store: Store, path: str) -> TierRecord | None:
    """Return the record in a directory; None if it has none. Blocking.

    Raises:
        StorageError: If the medium refuses.
    """
    found = store.read_files([os.path.join(path, TIER)])[0]
    return None if found is None else TierRecord.decode(found)


def write_record(store: Store, path: str, record: TierRecord) -> None:
    """Write the record of a directory, durably. Blocking.

    Raises:
        StorageError: If the medium refuses.
    """
    store.replace_file(os.path.join(path, TIER), record.encode())
    store.sync_directory(path)


@final
@dataclass(frozen=True, slots=True)
class SeenLevel:
    """One level of a run, as it is seen from here."""

    label: str  #: `memory`, `disk`, `root`, or the scheme of a bucket
    path: str
    store: Store | None  #: None if it cannot be seen
    steps: Mapping[int, str] = field(default_factory=dict[int, str])  #: number and name, ascending
    problem: str = ""  #: why it cannot be seen


def kind_of(tier: str) -> str:
    """Return the kind of a tier in a word: `memory`, `disk`, or the scheme of a bucket."""
    scheme = scheme_of(tier)
    return {"keeper": "memory", None: "disk"}.get(scheme, scheme or "")


def labels_of(tiers: Iterable[str]) -> dict[str, str]:
    """Return the labels of tiers by their directories: the kind of each, the second of a kind as `disk2`."""
    found: dict[str, str] = {}
    for tier in tiers:
        kind = kind_of(tier)
        number = sum([kind_of(other) == kind for other in found]) + 1
        found[tier] = kind if number == 1 else f"{kind}{number}"

    return found


def record_of_root(store: Store, path: str) -> TierRecord | None:
    """Return the record of the root at `path`; None if it has no tiers, or cannot say. Blocking."""
    with suppress(StorageError):
        record = read_record(store, path)
        if record is not None and record.root == path:  # a copy of a root does not have its tiers
            return record

    return None


def levels_of(store: Store, path: str) -> Sequence[SeenLevel]:
    """Return the levels of the run whose root is at `path`, the nearest first. Blocking.

    It never fails because of a tier. What is no root of a run with tiers is the only level.

    Raises:
        PenstockError: If the root itself cannot be listed.
    """
    root = SeenLevel("root", path, store, _steps_in(store, path))
    record = record_of_root(store, path)
    if record is None:
        return (root,)

    levels = [_level(label, tier, record) for tier, label in labels_of(record.tiers).items()]
    return (*levels, root)


def root_of_tier(store: Store, path: str) -> str | None:
    """Return the root that the directory at `path` is a tier of; None if it is none. Blocking."""
    record = None
    with suppress(StorageError):
        record = read_record(store, path)

    return record.root if record is not None and path in record.tiers else None


def find_checkpoint(
    store: Store, path: str, step: int | None = None, *, farthest: bool = False
) -> tuple[Store, str]:
    """Return where the checkpoint is that is meant, as `checkpoint_path` does: in the nearest level.

    Args:
        store: That `path` is in.
        path: Of a root or a checkpoint. A step of a root may be in a tier alone.
        step: Of a root; None for the latest.
        farthest: Whether the farthest level that has it is meant: there it is stored as it stays.

    Raises:
        NotACheckpointError, PenstockError: As `checkpoint_path`.
    """
    root, wanted = path, step
    if step is None and store.kind(path) is None and names_a_step(os.path.basename(path)):
        root, wanted = os.path.dirname(path), _number(os.path.basename(path))

    levels = levels_of(store, root) if store.kind(root) == "directory" else ()
    if len(levels) > 1:
        levels = levels[::-1] if farthest else levels
        # The newest first, and of those that have it the nearest, or the farthest.
        for level in (
            sorted(levels, key=lambda level: -max(level.steps, default=-1)) if wanted is None else levels
        ):
            if level.store is None or not level.steps:
                continue
            if wanted is None:
                with suppress(PenstockError):
                    return level.store, checkpoint_path(level.store, level.path)
            elif wanted in level.steps:
                return level.store, os.path.join(level.path, level.steps[wanted])

    return store, checkpoint_path(store, path, step)


def nearest_checkpoint(path: str | os.PathLike[str]) -> str:
    """Return where the checkpoint is that is meant by a path: in a tier, if the path is of a run with tiers.

    That is the nearest one that has the step; for a root, the newest step of all. Any other path is returned
    as it is, and one in a bucket: to look for tiers there would be a request more for each restore. The error
    of a step that is not there names them. Blocking.

    Raises:
        PenstockError: If the medium refuses.
    """
    store, full = store_of(path)
    if store.system_files is None:
        return full

    root = full
    if names_a_step(os.path.basename(full)):
        if store.kind(full) is not None:
            return full

        root = os.path.dirname(full)

    return full if record_of_root(store, root) is None else find_checkpoint(store, full)[1]


def _level(label: str, path: str, record: TierRecord) -> SeenLevel:
    is_elsewhere = record.host not in ("", socket.gethostname())
    try:
        store = store_at(path)
        own = read_record(store, path)
        if own is not None and own.root == record.root:
            steps = _steps_in(store, path)
            if record.n_processes > 1:
                reader = StepReader(store)
                whole = {n: name for n, name in steps.items() if not reader.is_part(os.path.join(path, name))}
                if steps and not whole:
                    return SeenLevel(label, path, None, problem=f"parts of {record.n_processes} processes")

                steps = whole

            return SeenLevel(label, path, store, steps)
    except KeeperLostError as lost:
        problem = "no keeper" if lost.is_absent else lost.problem
    except PenstockError as error:
        problem = str(error)
    else:
        problem = "nothing is there" if own is None else f"serves {own.root or 'another root'} now"
        if own is not None:
            is_elsewhere = False

    return SeenLevel(label, path, None, problem=f"on {record.host}" if is_elsewhere else problem)


def _steps_in(store: Store, path: str) -> dict[int, str]:
    return {_number(name): name for name in look_at(store, path).steps}


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])
