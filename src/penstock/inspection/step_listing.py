"""The steps of a run for a list: size, age, metrics, and the state of each."""

from __future__ import annotations

__all__ = (
    "State",
    "StepFacts",
    "describe_checkpoint",
    "describe_step_at",
    "list_checkpoints",
    "list_run",
    "list_unfinished",
    "metric_of",
    "name_best",
    "names_of_metrics",
    "paths_by_name",
    "step_number_in",
)

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias, cast, final

from penstock.handlers.formats.orbax.checkpoint_documents import SealedDocuments
from penstock.handlers.formats.orbax.discovery import names_a_step, step_at
from penstock.handlers.formats.orbax.file_names import PARTIAL_SUFFIX, TEMPORARY_SUFFIX
from penstock.handlers.layouts.discovery import Place, find_checkpoints, look_at
from penstock.handlers.stores.publishing.paths import scheme_of
from penstock.handlers.stores.publishing.pinned_steps import read_pins
from penstock.inspection.file_sizes import FileSizes, sizes_below
from penstock.inspection.texts import metric_at
from penstock.kernel.errors import PenstockError, UnknownMetricError
from penstock.kernel.protocols.stores import Store, is_at_work
from penstock.steps.step_directory import StepReader
from penstock.steps.tier_record import SeenLevel

State: TypeAlias = Literal["finished", "saving", "interrupted", "damaged", "unknown"]

_BUILT: Final = (TEMPORARY_SUFFIX, PARTIAL_SUFFIX)


@final
@dataclass(frozen=True, slots=True)
class StepFacts:
    """One checkpoint in a list."""

    name: str  #: of the step, or the path from where the list begins
    path: str
    step: int | None  #: None if it is no step
    state: State
    sizes: FileSizes = field(default_factory=FileSizes)
    committed_at_ns: int | None = None  #: wall clock, nanoseconds since the epoch
    started_at_ns: int | None = None  #: when its save began, where that was recorded
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    problem: str = ""  #: what is wrong with a damaged one
    is_best: bool = False
    is_pinned: bool = False  #: by a manager that is open now
    where: tuple[str, ...] = ()  #: the levels of the run that have it whole, if there are several


def list_checkpoints(store: Store, place: Place) -> list[StepFacts]:
    """List the steps of a root, also unfinished ones, ascending; of a folder all checkpoints below it.

    A checkpoint that is no root is a list of one. Nothing is raised for what is damaged.
    """
    paths = paths_by_name(store, place).items()
    facts = [describe_checkpoint(store, path, name) for name, path in paths]
    found = [each for each in facts if each is not None]
    if place.kind != "root":
        return found

    pins = read_pins(store, place.path)
    marked = [replace(step, is_pinned=True) if step.step in pins else step for step in found]
    return [*marked, *list_unfinished(store, place.path)]


def list_run(store: Store, place: Place, levels: Sequence[SeenLevel]) -> list[StepFacts]:
    """List the steps of a run that has tiers, with the levels that each is in.

    Args:
        store: That the root is in.
        place: The root.
        levels: Of `levels_of`.
    """
    found: dict[tuple[int | None, str], StepFacts] = {}
    where: dict[tuple[int | None, str], list[str]] = {}
    unfinished: list[StepFacts] = []
    for level in levels:
        if level.store is None:
            continue

        here = place if level.path == place.path else look_at(level.store, level.path)
        for step in list_checkpoints(level.store, here):
            if step.state in {"saving", "interrupted"}:
                unfinished.append(replace(step, where=(level.label,)))
                continue

            key = step.step, "" if step.step is not None else step.name
            if step.state != "damaged":
                where.setdefault(key, []).append(level.label)
            if key not in found or found[key].state == "damaged" or level.store is store:
                found[key] = step  # of the same content the root's has the sizes that stay

    rows = [replace(step, where=tuple(where.get(key, ()))) for key, step in found.items()]
    return [*sorted(rows, key=lambda row: (row.step is None, row.step or 0, row.name)), *unfinished]


def list_unfinished(store: Store, root: str) -> list[StepFacts]:
    """List what saves build in a root now, and what interrupted ones left."""
    return list(_unfinished(store, root))


def paths_by_name(store: Store, place: Place) -> dict[str, str]:
    """Return the paths of the finished checkpoints of `list_checkpoints`, by name."""
    if place.kind == "root":
        return {name: os.path.join(place.path, name) for name in place.steps}
    if place.kind == "checkpoint" or store.kind(place.path) == "file":
        return {os.path.basename(place.path): place.path}

    return {_name_below(place.path, path): path for path in find_checkpoints(store, place.path).checkpoints}


def describe_checkpoint(store: Store, path: str, name: str) -> StepFacts | None:
    """Describe one checkpoint of `paths_by_name`; None if it has been deleted since it was listed."""
    return _facts(store, path, name, step_number_in(path))


def describe_step_at(store: Store, root: str, step: int) -> StepFacts | None:
    """Describe one step of a root; None if it is not there."""
    names = [name for name in store.list_directory(root) if step_number_in(name) == step]
    return _facts(store, os.path.join(root, names[0]), names[0], step) if names else None


def metric_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return the metric called `name`, nested ones as `eval/loss`; None if there is none that is a number."""
    value = metric_at(metrics, name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def names_of_metrics(metrics: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yield the names by which `metric_of` finds the metrics."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from names_of_metrics(cast("Mapping[str, Any]", value), f"{before}{name}/")
        else:
            yield f"{before}{name}"


def name_best(
    listed: Sequence[StepFacts], metric: str, mode: Literal["min", "max"] = "min"
) -> list[StepFacts]:
    """Mark the best of some steps, the later of two that are equal. One without a finite metric is none.

    Raises:
        UnknownMetricError: If there are metrics, and none of this name.
    """
    known = sorted({name for step in listed for name in names_of_metrics(step.metrics)})
    if known and not any(metric_of(step.metrics, metric) is not None for step in listed):
        raise UnknownMetricError(metric, known)

    values = [(metric_of(step.metrics, metric), at) for at, step in enumerate(listed)]
    sign = 1 if mode == "max" else -1
    finite = [(sign * value, at) for value, at in values if value is not None and math.isfinite(value)]
    best = max(finite, default=(0.0, -1))[1]
    return [replace(step, is_best=at == best) for at, step in enumerate(listed)]


def _name_below(folder: str, path: str) -> str:
    return os.path.basename(path) if path == folder else path.removeprefix(os.path.join(folder, ""))


def _unfinished(store: Store, root: str) -> Iterator[StepFacts]:
    for name in sorted(store.list_directory(root)):
        if any(suffix in name for suffix in _BUILT):
            path = os.path.join(root, name)
            state: State = "saving" if is_at_work(store, path) else "interrupted"
            yield StepFacts(name, path, None, state, sizes_below(store, path))


def _facts(store: Store, path: str, name: str, step: int | None) -> StepFacts | None:
    """Describe a checkpoint; None if it has been deleted since it was listed."""
    sizes = FileSizes()
    try:
        sizes = sizes_below(store, path)
        place = look_at(store, path)
        if place.kind == "tensors":
            return StepFacts(name, path, None, "finished", _sizes_of_tensors(store, path), _modified_ns(path))

        is_finished = place.is_finished
        if step is not None:
            state = step_at(store, path).state
            if state == "absent":
                return None  # a file with such a name, or a run
            if state == "unknown":
                problem = "nothing in it is known to penstock"
                return StepFacts(name, path, step, "unknown", sizes, problem=problem)

            is_finished = state != "unfinished"
        if not is_finished:
            return StepFacts(name, path, step, "saving" if is_at_work(store, path) else "interrupted", sizes)

        names = store.list_directory(path)
        about = SealedDocuments.open(store, path, names).about(names)
        committed = about.committed_at_ns or about.started_at_ns or _modified_ns(path)
        metrics = StepReader(store).metrics(path) or {}
        return StepFacts(name, path, step, "finished", sizes, committed, about.started_at_ns, metrics)
    except PenstockError as error:
        if store.kind(path) is None:
            return None

        return StepFacts(name, path, step, "damaged", sizes, problem=str(error))


def _sizes_of_tensors(store: Store, path: str) -> FileSizes:
    """Count the files of the one checkpoint, and not the directories next to them."""
    if store.kind(path) == "file":
        return sizes_below(store, path)

    files = [os.path.join(path, name) for name in store.list_directory(path)]
    return sum([sizes_below(store, file) for file in files if store.kind(file) == "file"], FileSizes())


def _modified_ns(path: str) -> int | None:
    try:
        return None if scheme_of(path) is not None else os.stat(path).st_mtime_ns
    except OSError:
        return None


def step_number_in(path: str) -> int | None:
    """Return the number of the step that a directory is named after; None if it is named otherwise."""
    name = os.path.basename(path)
    return int(name.rpartition("_")[2]) if names_a_step(name) else None
