"""A run: its steps and what was recorded of them, read bit by bit.

A run of ten thousand steps is read within a budget of time for each look, the newest steps first, and only
what changed since the last look is told. Names and texts from a run have no control characters in them.
"""

from __future__ import annotations

__all__ = ("RunReader",)

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from msgspec import structs

from penstock.handlers.layouts.discovery import Place, look_at
from penstock.inspection.step_listing import (
    StepFacts,
    describe_checkpoint,
    list_unfinished,
    paths_by_name,
    step_number_in,
)
from penstock.inspection.texts import iso_time, one_line
from penstock.kernel.protocols.stores import Store
from penstock.reports.kept_reports import Kept, KeptEvent, KeptReport, KeptRow, numbers_in, read_reports
from penstock.steps.tier_record import SeenLevel, levels_of

# A page waits for the first look at a run; while steps are unread it asks again at once.
READ_S: Final = 0.7
# What was read before may have changed: an overwritten step, a file that is shared no more.
CHECK_S: Final = 0.1
_MOST_GONE: Final = 10_000  #: names of deleted steps; a page that missed more is told everything
TIERS_S: Final = 5.0
"""How often the tiers of a run are listed: each may have to be waited for."""
_WITH_TIERS: Final = frozenset({"root", "folder"})
_ABSENT: Final = frozenset({"nothing", "folder"})


@final
class RunReader:
    """Reads one run. One call at a time; each blocks for about `read_s`.

    Args:
        store: Where the run is.
        path: A directory of steps, which need not be there yet, a checkpoint, or safetensors.
        read_s: How long a look may read steps that are new.
        check_s: How long it may read such as are known.
        tiers_s: How often tiers are listed.
    """

    __slots__ = (
        "_check_s",
        "_elsewhere",
        "_gone",
        "_kept",
        "_kept_at",
        "_levels",
        "_levels_at",
        "_newest",
        "_paths",
        "_read_s",
        "_steps",
        "_tiers_s",
        "_version",
        "_where",
        "_whole_before",
        "path",
        "store",
    )

    def __init__(
        self,
        store: Store,
        path: str,
        *,
        read_s: float = READ_S,
        check_s: float = CHECK_S,
        tiers_s: float = TIERS_S,
    ) -> None:
        self.store = store
        self.path = path
        self._read_s, self._check_s, self._tiers_s = read_s, check_s, tiers_s
        # By name: what the page is told, and at which version of the whole that was new. Those that were
        # looked at longest ago come first.
        self._steps: dict[str, tuple[dict[str, Any], int]] = {}
        self._gone: dict[str, int] = {}
        self._paths: dict[str, str] = {}
        self._elsewhere: dict[str, tuple[Store, str]] = {}  # steps that are in tiers alone
        self._where: Mapping[int | None, Sequence[str]] = {}
        self._kept: Kept = Kept()
        self._kept_at = 0
        self._levels: Sequence[SeenLevel] = ()
        self._levels_at = -math.inf
        self._newest: dict[tuple[str, int], int | None] = {}  # path and step: when it was committed
        self._version = self._whole_before = 1

    def look(self, seen: int) -> dict[str, Any]:
        """Return what is new since the version `seen`, 0 for everything.

        Raises:
            PenstockError: If something else is at the path, or the medium refuses.
        """
        place = look_at(self.store, self.path)
        if place.problem is not None and place.kind != "nothing":
            raise place.problem

        self._paths = {} if place.kind == "nothing" else paths_by_name(self.store, place)
        self._version += 1
        tiers = self._tiers(place)
        self._elsewhere, self._where = self._in_tiers_alone(), self._held_by()
        paths = {**self._elsewhere, **{name: (self.store, path) for name, path in self._paths.items()}}
        n_unread = self._read(place, paths)
        self._read_kept(place)
        is_whole = seen < self._whole_before
        seen = 0 if is_whole else seen
        kept = self._kept if is_whole or self._kept_at > seen else None
        return {
            "path": one_line(self.path),
            "tiers": tiers,
            "kind": "waiting" if not paths and not self._steps and place.kind in _ABSENT else place.kind,
            "version": self._version,
            "is_whole": is_whole,  # what was told before is to be forgotten
            "n_steps": len(paths),
            "n_unread": n_unread,
            "steps": [told for told, version in self._steps.values() if version > seen],
            "gone": [] if is_whole else [name for name, version in self._gone.items() if version > seen],
            "reports": None if kept is None else [_report(report) for report in kept.reports],
            "events": None if kept is None else [_event(event) for event in kept.events],
        }

    def finished(self) -> dict[str, tuple[str, float | None]]:
        """Return where each finished step is that was read, and when it was committed, ascending."""
        known = [told for told, _ in self._steps.values() if told["name"] in self._paths]
        steps = [told for told in known if told["state"] == "finished"]
        steps.sort(key=lambda told: (told["step"] is None, told["step"] or 0, told["name"]))
        return {told["name"]: (self._paths[told["name"]], told["committed_at"]) for told in steps}

    def report(self, name: str, kind: str) -> dict[str, Any] | None:
        """Return the report of a save or a restore with its details; None if that is not kept."""
        for report in reversed(self._kept.reports):
            if (one_line(report.name), report.kind) == (name, kind) and report.rows:
                return {
                    **_report(report),
                    "explanation": one_line(report.explanation),
                    "stages": [
                        {field: _plain(getattr(stage, field)) for field in stage.__struct_fields__}
                        for stage in report.stages
                    ],
                    "rows": [_row(row) for row in report.rows],
                }

        return None

    def _read(self, place: Place, paths: Mapping[str, tuple[Store, str]]) -> int:
        """Read steps for as long as there is time; return how many were never read."""
        unfinished = list_unfinished(self.store, self.path) if place.kind == "root" else []
        there = {*paths, *(step.name for step in unfinished)}
        for name in [name for name in self._steps if name not in there]:
            del self._steps[name]
            self._gone[name] = self._version
        while len(self._gone) > _MOST_GONE:
            self._whole_before = self._gone.pop(next(iter(self._gone)))

        for step in unfinished:
            self._tell(step)

        for told, _ in tuple(self._steps.values()):
            where = self._where.get(told["step"], [])
            if told["where"] != where:
                self._steps[told["name"]] = {**told, "where": where}, self._version

        now = time.monotonic()
        unread = [name for name in paths if name not in self._steps][::-1]
        known = [name for name in self._steps if name in paths]
        n_unread = len(unread) - self._look_at(unread, paths, now + self._read_s)
        # Those that may change at any moment come first.
        known.sort(key=lambda name: self._steps[name][0]["state"] in ("finished", "unknown"))
        if not n_unread:
            self._look_at(known, paths, time.monotonic() + self._check_s)

        return n_unread

    def _look_at(self, names: Sequence[str], paths: Mapping[str, tuple[Store, str]], until_s: float) -> int:
        """Look at some checkpoints, at one at least; return at how many there was time to look."""
        for at, name in enumerate(names):
            if at and time.monotonic() > until_s:
                return at

            found = describe_checkpoint(*paths[name], name)
            if found is None:
                if self._steps.pop(name, None) is not None:
                    self._gone[name] = self._version
            else:
                self._tell(found)

        return len(names)

    def _tiers(self, place: Place) -> list[dict[str, Any]]:
        """Return the levels of a run that has tiers, the nearest first, and how far behind each is."""
        if place.kind in _WITH_TIERS and time.monotonic() - self._levels_at > self._tiers_s:
            self._levels = levels_of(self.store, self.path)
            self._levels_at = time.monotonic()  # after a keeper was waited for that stands still

        levels = self._levels if len(self._levels) > 1 else ()
        found = [(level, max(level.steps, default=None)) for level in levels]
        committed = {level.label: self._committed_at(level, newest) for level, newest in found}
        last = max([at for at in committed.values() if at is not None], default=None)
        return [
            {
                "label": one_line(level.label),
                "path": one_line(level.path),
                "n_steps": len(level.steps),
                "newest": newest,
                "behind_s": None if at is None or last is None else (last - at) / 1e9,
                "problem": one_line(level.problem),
            }
            for (level, newest), at in zip(found, committed.values(), strict=True)
        ]

    def _in_tiers_alone(self) -> dict[str, tuple[Store, str]]:
        """Return the steps that the root does not have, by name: where the nearest tier has each."""
        there = {step_number_in(name) for name in self._paths}
        found: dict[str, tuple[Store, str]] = {}
        for level in self._levels[:-1]:
            for step, name in level.steps.items():
                if step not in there and name not in found and level.store is not None:
                    found[name] = level.store, os.path.join(level.path, name)

        return dict(sorted(found.items(), key=lambda each: step_number_in(each[0]) or 0))

    def _held_by(self) -> Mapping[int | None, Sequence[str]]:
        """Return the levels that have each step, the nearest first; nothing for a run without tiers."""
        found: dict[int | None, list[str]] = {}
        for level in self._levels if len(self._levels) > 1 else ():
            for step in level.steps:
                found.setdefault(step, []).append(one_line(level.label))

        return found

    def _committed_at(self, level: SeenLevel, step: int | None) -> int | None:
        """Return when the newest step of a level was committed; it is read once."""
        if level.store is None or step is None:
            return None

        key = level.path, step
        if key not in self._newest:
            path = os.path.join(level.path, level.steps[step])
            facts = describe_checkpoint(level.store, path, level.steps[step])
            self._newest = {known: at for known, at in self._newest.items() if known[0] != level.path}
            self._newest[key] = None if facts is None else facts.committed_at_ns

        return self._newest[key]

    def _tell(self, step: StepFacts) -> None:
        told = {**_step(step), "where": self._where.get(step.step, [])}
        before, version = self._steps.pop(step.name, (None, 0))
        self._steps[step.name] = (told, version if told == before else self._version)
        self._gone.pop(step.name, None)

    def _read_kept(self, place: Place) -> None:
        if place.kind in ("root", "folder"):
            kept = read_reports(self.store, self.path)
            if kept != self._kept:
                self._kept, self._kept_at = kept, self._version


def _step(step: StepFacts) -> dict[str, Any]:
    return {
        "name": step.name,
        "label": one_line(step.name),
        "step": step.step,
        "state": step.state,
        "nbytes": step.sizes.nbytes,
        "own_bytes": step.sizes.own_bytes,
        "started_at": None if step.started_at_ns is None else step.started_at_ns / 1e9,
        "committed_at": None if step.committed_at_ns is None else step.committed_at_ns / 1e9,
        "time": _time(step.committed_at_ns),
        "metrics": {one_line(name): value for name, value in numbers_in(step.metrics)},
        "problem": one_line(step.problem),
    }


def _report(report: KeptReport) -> dict[str, Any]:
    """Return what is drawn over all steps."""
    return {
        "label": one_line(report.name),
        "step": step_number_in(report.name.partition("/")[0]),
        "kind": report.kind,
        "ended_at": report.ended_at,
        "time": _time(int(report.ended_at * 1e9)),
        "n_leaves": report.n_leaves,
        "nbytes": report.nbytes,
        "nbytes_kept": report.nbytes_kept,
        "staged_s": report.staged_s,
        "seconds": report.seconds,
        "bottleneck": one_line(report.bottleneck),
        "limited_by": report.limited_by,
        "peak_bytes": report.peak_bytes,
        "cached_bytes": report.cached_bytes,
        "limit_bytes": report.limit_bytes,
        "process_bytes": report.process_bytes,
        "metrics": {one_line(name): value for name, value in report.metrics.items()},
        "is_detailed": bool(report.rows),
    }


def _row(row: KeptRow) -> dict[str, Any]:
    return {"label": one_line(row.label), "bars": [structs.astuple(bar) for bar in row.bars]}


def _event(event: KeptEvent) -> dict[str, Any]:
    return {
        "at": event.at,
        "time": _time(int(event.at * 1e9)),
        "what": one_line(event.what),
        "label": one_line(event.name),
        "step": step_number_in(event.name.partition("/")[0]),
        "text": one_line(event.text),
    }


def _time(at_ns: int | None) -> str:
    return iso_time(at_ns)[:19].replace("T", " ")


def _plain(value: object) -> object:
    return one_line(value) if isinstance(value, str) else value
