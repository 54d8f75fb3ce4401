"""Real saves and restores of one tree, on the store that is measured, and the search for faster options.

Options that depend on each other are searched together, as `Settings`: workers, pieces and budgets. After
each run the model of `reports.diagnosis` is fitted to all that was measured, and says what to try next; in
the end what is next to the best is tried whatever it says. The fastest are then measured in turn with the
options that held at the beginning, so that a store that is slow for a while is slow for all.
"""

from __future__ import annotations

__all__ = (
    "CODECS",
    "DISK",
    "ROUNDS",
    "SURE",
    "Candidate",
    "Measured",
    "Options",
    "RealRuns",
    "Space",
    "Tried",
    "Tuned",
    "given_candidate",
    "made_up_tree",
    "nested_tables",
    "probe_store",
    "profile_text",
    "search",
    "space_of",
    "tree_of",
    "tuned_svg",
)

import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from html import escape
from itertools import accumulate, product
from statistics import median
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np

from penstock import api
from penstock.config.config import Config
from penstock.config.option_reference import as_toml
from penstock.handlers.stores.local import LocalStore
from penstock.handlers.stores.publishing.paths import scheme_of
from penstock.kernel.errors import StorageError
from penstock.kernel.memory.regulator import Flow
from penstock.kernel.protocols.stores import Store
from penstock.reports.diagnosis import GAIN, Fitted, FlowModel, Settings, alternatives, fit
from penstock.reports.report import StageReport, size_text
from penstock.tools.delete import delete

Options: TypeAlias = Mapping[str, object]
"""Dotted keys to values."""

Candidate: TypeAlias = "tuple[Flow, Options]"

_MOST_SAVED: Final = 2  #: checkpoints at a time that are there to be restored
_LEAVES: Final = 8
_SMALL: Final = 200


def made_up_tree(nbytes: int) -> dict[str, Any]:
    """Return noise of about this size, in eight large arrays, and two hundred small ones next to them."""
    random = np.random.default_rng(0)
    large = max(nbytes // _LEAVES // 4, 1)
    return {
        "large": [random.standard_normal(large, np.float32) for _ in range(_LEAVES)],
        "small": [np.full(64, n, np.float32) for n in range(_SMALL)],
    }


async def tree_of(path: str) -> Any:
    """Return the tree of a checkpoint of the user's own."""
    return await api.restore(path)


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """One save or one restore: its seconds, and its report, which the model is fitted to."""

    seconds: float
    report: StageReport


Measure: TypeAlias = Callable[[Flow, Options], Awaitable[Measured]]


@final
class RealRuns:
    """Saves and restores a tree below its own directory.

    Args:
        directory: Exists; what is saved there is removed after each run, but for what restores read.
        tree: What is saved.
        config: The options that are measured are laid over these.
        store: Where the directory is; by default on a disk.
    """

    __slots__ = ("_config", "_directory", "_n", "_saved", "_store", "_tree")

    def __init__(self, directory: str, tree: Any, config: Config, store: Store | None = None) -> None:
        self._directory = directory
        self._tree = tree
        self._config = config
        self._n = 0
        self._store = store
        self._saved: dict[str, str] = {}  # what is restored, by the options it was saved with

    async def measure(self, flow: Flow, options: Options) -> Measured:
        """Save or restore once. What is restored is dropped from the page cache before."""
        if flow == "save":
            path, measured = await self._save(options)
            await delete(path, store=self._store)
            return measured

        layout = {key: value for key, value in options.items() if key.startswith(("format.", "save.piece"))}
        path = self._saved.get(repr(layout), "")
        if not path:
            if len(self._saved) >= _MOST_SAVED:
                await delete(self._saved.pop(next(iter(self._saved))), store=self._store)

            path, _ = await self._save(layout)
            self._saved[repr(layout)] = path

        _drop_from_cache(path)
        reports: list[StageReport] = []
        async with self._checkpointer(options) as checkpointer:
            start = time.perf_counter()
            await checkpointer.restore(path, on_report=reports.append)
            took_s = time.perf_counter() - start

        return Measured(took_s, reports[-1])

    async def _save(self, options: Options) -> tuple[str, Measured]:
        self._n += 1
        path = os.path.join(self._directory, str(self._n))
        async with self._checkpointer(options) as checkpointer:
            start = time.perf_counter()
            report = await (await checkpointer.save(path, self._tree))
            took_s = time.perf_counter() - start

        return path, Measured(took_s, report)

    def _checkpointer(self, options: Options) -> api.Checkpointer:
        return api.Checkpointer(config=self._config.changed(nested_tables(options)), store=self._store)


def _drop_from_cache(path: str) -> None:
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return

    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError), open(os.path.join(folder, name), "rb") as file:
                advise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


DISK: Final[Sequence[Candidate]] = (
    ("save", {"store.io": "buffered"}),
    ("save", {"store.io": "direct"}),
)
"""Tried where there is a page cache, which may be gone past."""

CODECS: Final[Sequence[Candidate]] = (
    ("save", {"format.codec": "auto"}),
    ("save", {"format.codec": "floats"}),
    ("save", {"format.codec": "zstd:1"}),
)
"""Tried with a checkpoint of the user's own alone: how well a made-up one compresses says nothing."""


@final
@dataclass(frozen=True, slots=True)
class Space:
    """All that may be tried: combinations of `Settings`, and options next to them; or only what is given."""

    extras: Sequence[Candidate] = ()
    most_memory: float = 0.0  #: the largest budget that is tried; 0: the present one alone
    given: Sequence[Candidate] | None = None  #: instead of all others


def space_of(*, is_bucket: bool, own_tree: bool, limit_bytes: int | None, free_bytes: int) -> Space:
    """Return what may be tried on a store.

    Args:
        is_bucket: Whether it is one.
        own_tree: Whether a checkpoint of the user's own is saved.
        limit_bytes: The memory budget, if the configuration sets one: then larger ones are tried, too.
        free_bytes: Memory that the process can still get. At most half of it is tried as a budget.
    """
    extras: list[Candidate] = [*(() if is_bucket else DISK), *(CODECS if own_tree else ())]
    return Space(extras, 0.0 if limit_bytes is None else free_bytes // 2)


def given_candidate(text: str) -> Candidate:
    """Return the candidate of `KEY=VALUE`, as in `save.write.concurrency=8`.

    Raises:
        ValueError: If it is not of that form.
    """
    key, equals, value = text.partition("=")
    if not equals or "." not in key or not value:
        raise ValueError(f"{text!r} is not of the form SECTION.OPTION=VALUE")

    flow: Flow = "restore" if key.startswith("restore.") else "save"
    return flow, {key: int(value) if value.isdecimal() else value}


def nested_tables(options: Options) -> dict[str, Any]:
    """Return dotted keys as nested tables."""
    tables: dict[str, Any] = {}
    for key, value in options.items():
        *sections, name = key.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})

        table[name] = value

    return tables


_WIDTH, _LEFT, _ROW = 720, 300, 22
_UNITS: Final[Mapping[str, str]] = dict.fromkeys(
    ("piece_bytes", "limit_bytes", "save_concurrent_bytes", "restore_concurrent_bytes"), "bytes"
)


def profile_text(name: str, tuned: Tuned, about: Sequence[str]) -> str:
    """Return the tables of a profile.

    Args:
        name: Of the profile.
        tuned: What was found.
        about: Lines about what was measured, for the comment.
    """
    lines = [f"# {line}" for line in about]
    lines += [f"# {line}" for line in _figures(tuned)]
    lines.append(f"[profiles.{name}]")
    tables: dict[str, list[str]] = {}
    for key, value in tuned.options.items():
        section, _, option = key.rpartition(".")
        tables.setdefault(section, []).append(f"{option} = {as_toml(value, _UNITS.get(option, ''))}")

    for section, options in tables.items():
        lines += ["", f"[profiles.{name}.{section}]", *options]

    return "\n".join(lines) + "\n"


def tuned_svg(tuned: Tuned) -> str:
    """Return a bar for each thing that was tried: its time as a part of that of the options before."""
    high = _ROW * (len(tuned.tried) + 1) + 20
    scale = (_WIDTH - _LEFT - 60) / 2
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{high}" font-size="12">']
    for at, tried in enumerate(tuned.tried):
        y = 10 + _ROW * at
        colour = "#2563eb" if tried.is_kept else "#94a3b8"
        words = f"{tried.flow}: {_options_text(tried.options)}"
        lines.append(f'<text x="4" y="{y + 12}">{escape(words)}</text>')
        long = scale * min(tried.ratio, 2)
        lines.append(f'<rect x="{_LEFT}" y="{y}" width="{long:.0f}" height="15" fill="{colour}"/>')
        lines.append(f'<text x="{_LEFT + long + 4:.0f}" y="{y + 12}">{tried.ratio:.2f}</text>')

    end = 10 + _ROW * len(tuned.tried)
    lines.append(
        f'<line x1="{_LEFT + scale:.0f}" x2="{_LEFT + scale:.0f}" y1="4" y2="{end}" stroke="#475569"/>'
        f'<text x="4" y="{end + 12}">time, as a part of that without the options; blue: kept</text></svg>'
    )
    return "".join(lines)


def _figures(tuned: Tuned) -> list[str]:
    lines = [_tried_text(tried) for tried in tuned.tried]
    for compared in tuned.final:
        takes = f"All together: {compared.flow}s take {compared.ratio:.2f} of the time without"
        lines.append(f"{takes} ({_spread(compared.before)} -> {_spread(compared.seconds)}).")
    if not tuned.options:
        lines.append("Nothing is faster beyond noise than what is set already.")
    if not tuned.complete:
        lines.append("There was no time for all that was worth a try.")

    return lines


def _tried_text(tried: Tried) -> str:
    seconds = f"{_spread(tried.before)} -> {_spread(tried.seconds)}"
    return f"{tried.flow}, {_options_text(tried.options)}: {seconds}; {tried.verdict}"


def _spread(seconds: Sequence[float]) -> str:
    """Return the median, and of several runs how many and from where to where."""
    if len(seconds) == 1:
        return f"{seconds[0]:.3g} s"

    return f"{median(seconds):.3g} s ({len(seconds)} runs, {min(seconds):.3g} to {max(seconds):.3g})"


def _options_text(options: Options) -> str:
    return ", ".join(
        f"{key} = {as_toml(value, _UNITS.get(key.rpartition('.')[2], ''))}" for key, value in options.items()
    )


_MOST_BYTES: Final = 64 << 20
_PIECE: Final = 16 << 20
_SMALL_BYTES: Final = bytes(4096)
_PROBES: Final = 9


def probe_store(
    store: Store, directory: str, nbytes: int, clock: Callable[[], float] = time.perf_counter
) -> Sequence[str]:
    """Return a sentence for each thing that was measured. Blocking.

    Args:
        store: Where the directory is.
        directory: Exists. What is written there stays: the caller removes it.
        nbytes: How much is written at once, at most; no more than 64 MiB is.
        clock: Seconds.
    """
    nbytes = max(min(nbytes, _MOST_BYTES), 1)
    small = _small_file(store, os.path.join(directory, "probe-small"), clock)
    if scheme_of(directory) is not None:
        return [_object(store, os.path.join(directory, "probe-large"), nbytes, clock), small]

    return [
        _large_file("buffered", directory, nbytes, clock),
        _large_file("direct", directory, nbytes, clock),
        small,
    ]


def _large_file(
    io: Literal["buffered", "direct"], directory: str, nbytes: int, clock: Callable[[], float]
) -> str:
    way = "through the page cache" if io == "buffered" else "past the page cache"
    try:
        return f"One file of {size_text(nbytes)} {way}: {_timed_file(io, directory, nbytes, clock)}."
    except StorageError as error:
        return f"One file {way}: not possible here ({error})."


def _timed_file(
    io: Literal["buffered", "direct"], directory: str, nbytes: int, clock: Callable[[], float]
) -> str:
    store, path = LocalStore(io=io), os.path.join(directory, f"probe-{io}")
    piece = memoryview(np.random.default_rng(0).bytes(min(nbytes, _PIECE)))
    start = clock()
    file = store.create_data_file(path)
    try:
        for offset in range(0, nbytes, _PIECE):
            file.write_at(offset, [piece[: nbytes - offset]])

        file.sync()
        went_direct = file.transfers.direct_bytes > 0
    finally:
        file.close()

    seconds = max(clock() - start, 1e-9)
    written = f"durable after {seconds:.3f} s ({size_text(nbytes / seconds)}/s)"
    return (
        written if io == "buffered" or went_direct else f"{written}, but the file system gives no direct I/O"
    )


def _object(store: Store, path: str, nbytes: int, clock: Callable[[], float]) -> str:
    data = np.random.default_rng(0).bytes(nbytes)
    start = clock()
    store.write_file(path, data)
    put = clock()
    store.read_file(path)
    got = clock()
    return f"One object of {size_text(nbytes)}: put in {put - start:.3f} s, got in {got - put:.3f} s."


def _small_file(store: Store, path: str, clock: Callable[[], float]) -> str:
    seconds: list[float] = []
    for _ in range(_PROBES):
        start = clock()
        store.write_file(path, _SMALL_BYTES)
        seconds.append(clock() - start)

    return f"4 KiB are durable after {1000 * median(seconds):.1f} ms (median of {_PROBES})."


# The search.

ROUNDS: Final = 5
"""So often is each of the fastest measured, in turn with the options that held before."""

SURE: Final = 0.95
"""Of all pairs of a run with an option and one without, in so many the one with it must be faster."""

_LEAST_ROUNDS: Final = 3  #: nothing is kept that was measured less often, unless it is far faster
_FAR: Final = 2 / 3
"""No noise makes each run take less than this part of each run before: two of both are enough."""

_LOAN: Final = 0.12  #: so much of the time may those rounds take from what comes later
_FINALISTS: Final = 3
_PROMISING: Final = 0.95  #: of the best time; what the model expects to be slower than that is not tried
_AS_FAST: Final = 1.05  #: within so much of the fastest, what changes least is taken
_STILL: Final = (1 + GAIN) / 2  #: in the end what is kept takes at most this part of the time, once more
_NEAR: Final = 1.1  #: within so much of the fastest that was tried, what changes least is measured again
_CREDIBLE: Final = 0.1  #: a model whose times are off by so much more than the best one's is not believed
_MOST_MODELS: Final = 8
_MOST_TRIED: Final = 24
_SHARES: Final[Mapping[Flow, tuple[float, float]]] = {"save": (0.26, 0.38), "restore": (0.58, 0.7)}
"""The parts of the time that have passed when a flow's search ends, and when its finals do."""


@final
@dataclass(frozen=True, slots=True)
class Tried:
    """Options that were tried, next to those that held at the beginning, and what became of them."""

    flow: Flow
    options: Options
    before: tuple[float, ...]  #: seconds without them
    seconds: tuple[float, ...]  #: and with them
    verdict: str = ""
    is_kept: bool = False

    @property
    def ratio(self) -> float:
        """The median time as a part of the earlier one."""
        return median(self.seconds) / max(median(self.before), 1e-9)

    @property
    def sureness(self) -> float:
        """The part of all pairs of a run with them and one without, in which the one with them was faster."""
        pairs = list(product(self.seconds, self.before))
        return sum([after < before for after, before in pairs]) / len(pairs)

    @property
    def is_faster(self) -> bool:
        """True if they are, beyond noise."""
        return self.is_certain and self.ratio <= GAIN and self.sureness >= SURE

    @property
    def is_slower(self) -> bool:
        """True if they are slower, beyond noise."""
        return self.ratio >= 1 / GAIN and self.sureness <= 1 - SURE

    @property
    def is_certain(self) -> bool:
        """True if there are runs enough to say."""
        least = min(len(self.seconds), len(self.before))
        return least >= (2 if self.is_far_faster else _LEAST_ROUNDS)

    @property
    def is_far_faster(self) -> bool:
        """True if each run took far less time than each one before."""
        return max(self.seconds) <= _FAR * min(self.before)


@final
@dataclass(frozen=True, slots=True)
class Tuned:
    """The findings."""

    options: Options  #: that differ from what was set; empty if nothing is faster
    tried: tuple[Tried, ...]
    final: tuple[Tried, ...]  #: all options together next to none of them, once more, of each flow
    complete: bool  #: whether time sufficed


async def search(
    measure: Measure,
    space: Space,
    *,
    spent: Callable[[], float],
    tell: Callable[[int, str], object] = lambda done, text: None,
) -> Tuned:
    """Return the options that are faster than what is set: for saves, then for restores, then all of them.

    Args:
        measure: Saves or restores with these options.
        space: What may be tried.
        spent: The part of the time that has passed; from 1 on no run begins.
        tell: Called with how many runs are done, and what is tried now.
    """
    runs = _Runs(measure, tell)
    kept: dict[str, object] = {}
    tried: list[Tried] = []
    complete = True
    for flow in _FLOWS:
        one = _FlowSearch(runs, flow, kept, space, spent)
        found, is_complete = await one.run()
        tried += found
        complete &= is_complete
        for each in found:
            if each.is_kept:
                kept = {**kept, **each.options}

    final: list[Tried] = []
    if kept:
        final = [await _compared_again(runs, flow, kept, spent) for flow in _FLOWS]
        last: dict[Flow, Tried] = {each.flow: each for each in final}
        kept = {key: value for key, value in kept.items() if _holds(key, last)}
        tried = [_in_the_end(each, kept, last) for each in tried]

    return Tuned(kept, tuple(tried), tuple(final), complete)


_FLOWS: Final[Sequence[Flow]] = ("save", "restore")


def _holds(key: str, final: Mapping[Flow, Tried]) -> bool:
    """True if an option is kept: one of saves slows down no restore, for it may change what these read.

    One for both makes one of them faster, and slows down neither.
    """
    save, restore = final["save"], final["restore"]
    if key.startswith("restore.") or key.endswith(".restore_concurrent_bytes"):
        return restore.ratio <= _STILL
    if key.startswith("save.") or key.endswith(".save_concurrent_bytes"):
        return save.ratio <= _STILL and not restore.is_slower

    return min(save.ratio, restore.ratio) <= _STILL and not (save.is_slower or restore.is_slower)


def _in_the_end(tried: Tried, kept: Options, final: Mapping[Flow, Tried]) -> Tried:
    """Return what is kept no more with the reason."""
    if not tried.is_kept or any(key in kept for key in tried.options):
        return tried

    both = " and ".join([f"{each.flow}s took {each.ratio:.2f} of the time" for each in final.values()])
    return replace(tried, is_kept=False, verdict=f"rejected: in the end, all together, {both}")


async def _compared_again(runs: _Runs, flow: Flow, options: Options, spent: Callable[[], float]) -> Tried:
    tried = Tried(flow, options, (), ())
    while not tried.seconds or (len(tried.seconds) < _LEAST_ROUNDS and spent() < 1.0):
        before = (await runs.measure(flow, {})).seconds
        after = (await runs.measure(flow, options)).seconds
        tried = replace(tried, before=(*tried.before, before), seconds=(*tried.seconds, after))
        if tried.is_far_faster:
            break

    return tried


@final
class _Runs:
    """Counts what is measured."""

    def __init__(self, measure: Measure, tell: Callable[[int, str], object]) -> None:
        self._measure = measure
        self._tell = tell
        self._n = 0

    async def measure(self, flow: Flow, options: Options) -> Measured:
        self._tell(self._n, f"{flow}: {_options_text(options) or 'as it is'}")
        self._n += 1
        return await self._measure(flow, options)


@final
@dataclass(frozen=True, slots=True)
class _Point:
    """A combination that may be tried."""

    settings: Settings | None = None  #: None: no model fits, as of a tree of a few bytes
    extras: tuple[tuple[str, object], ...] = ()

    def options(self, flow: Flow, beginning: _Point) -> dict[str, object]:
        """Return what differs from the beginning."""
        found: dict[str, object] = {}
        if self.settings is not None and beginning.settings is not None:
            found = self.settings.options(flow, beginning.settings)

        return {**found, **dict(self.extras)}

    def distance(self, beginning: _Point) -> float:
        """Return how much it changes."""
        far = float(len(self.extras))
        if self.settings is not None and beginning.settings is not None:
            far += self.settings.distance(beginning.settings)

        return far


@dataclass(slots=True)
class _Results:
    seconds: list[float] = field(default_factory=list[float])
    part: float = 0.0  #: of the time, that one run takes
    fitted: Fitted | None = None


@final
class _FlowSearch:
    """The search for the fastest saves, or restores.

    Args:
        runs: Measures.
        flow: Which.
        fixed: Options that were found before, and hold in all of its runs.
        space: What may be tried.
        spent: As of `search`.
    """

    def __init__(
        self, runs: _Runs, flow: Flow, fixed: Options, space: Space, spent: Callable[[], float]
    ) -> None:
        self._runs = runs
        self._flow: Final[Flow] = flow
        self._fixed = fixed
        self._space = space
        self._spent = spent
        self._beginning = _Point()
        self._results: dict[_Point, _Results] = {}

    async def run(self) -> tuple[list[Tried], bool]:
        """Return what was tried, and whether time sufficed."""
        search_until, finals_until = _SHARES[self._flow]
        if self._spent() >= search_until:
            return [], False

        await self._begin()
        complete = False
        while self._spent() < search_until:
            point = self._next()
            if point is None or len(self._results) > _MOST_TRIED:
                complete = True
                break

            await self._measure(point)

        # Judged by new runs alone: the fastest of many is so by luck, too.
        finalists = self._in_time(self._finalists(), finals_until)
        explored = {point: len(self._results[point].seconds) for point in finalists}
        for n_rounds in range(ROUNDS if finalists else 0):
            if self._spent() >= (
                finals_until if n_rounds >= _LEAST_ROUNDS else min(1.0, finals_until + _LOAN)
            ):
                complete = False
                break

            if not self._is_far_behind(finalists, explored):
                await self._measure(self._beginning)
            for point in finalists:
                await self._measure(point)

        for point in finalists:
            seconds = self._results[point].seconds
            if len(seconds) > explored[point]:
                del seconds[: explored[point]]

        before = self._results[self._beginning].seconds
        if len(before) > _LEAST_ROUNDS:  # the first run of all may be slow because it is the first
            del before[0]

        return self._judged(finalists), complete

    def _is_far_behind(self, finalists: Sequence[_Point], explored: Mapping[_Point, int]) -> bool:
        """True if the beginning, which may be slow, is measured often enough next to each of them."""
        before = tuple(self._results[self._beginning].seconds)
        after = [tuple(self._results[point].seconds[explored[point] :]) for point in finalists]
        return len(before) > 1 and all(
            seconds and Tried(self._flow, {}, before, seconds).is_far_faster for seconds in after
        )

    async def _begin(self) -> None:
        began = self._spent()
        measured = await self._runs.measure(self._flow, self._fixed)
        fitted = _fitted(self._flow, measured.report)
        self._beginning = _Point(None if fitted is None else fitted.settings)
        self._results[self._beginning] = _Results([measured.seconds], self._spent() - began, fitted)

    async def _measure(self, point: _Point) -> None:
        options, began = {**self._fixed, **point.options(self._flow, self._beginning)}, self._spent()
        measured = await self._runs.measure(self._flow, options)
        results = self._results.setdefault(point, _Results())
        results.seconds.append(measured.seconds)
        results.fitted, results.part = _fitted(self._flow, measured.report), self._spent() - began

    def _next(self) -> _Point | None:
        """Return what to try next: what the model promises most of, then what is next to the best."""
        if self._space.given is not None:
            given = [tuple(options.items()) for flow, options in self._space.given if flow == self._flow]
            points = [_Point(self._beginning.settings, extras) for extras in given]
            return next((point for point in points if point not in self._results), None)

        best = min(self._results, key=lambda point: min(self._results[point].seconds))
        best_s = min(self._results[best].seconds)
        models = self._models()
        promised: list[tuple[float, float, _Point]] = []
        for settings in self._alternatives() if models else ():
            point = _Point(settings, best.extras)
            if point not in self._results:
                seconds = min([model.seconds(settings) for model in models])
                promised.append((seconds, point.distance(self._beginning), point))

        # Of what is about as good, the least change.
        most = _AS_FAST * min([seconds for seconds, _, _ in promised], default=0.0)
        promised = [each for each in promised if each[0] <= most]
        if promised:
            seconds, _, point = min(promised, key=lambda each: (each[1], each[0]))
            if seconds <= _PROMISING * best_s:
                return point

        return next((point for point in self._neighbours(best) if point not in self._results), None)

    def _alternatives(self) -> Iterator[Settings]:
        now = self._beginning.settings
        if now is not None:
            yield from alternatives(now, most_memory=self._space.most_memory)

    def _neighbours(self, point: _Point) -> Iterator[_Point]:
        """Yield what differs in one extra option, or in one setting by one step."""
        for flow, options in self._space.extras:
            if flow == self._flow:
                others = [each for each in point.extras if each[0] not in options]
                yield replace(point, extras=(*others, *options.items()))

        now, known = point.settings, set(self._alternatives())
        if now is None:
            return

        for n, times in product((now.concurrency,), (2, 0.5)):
            yield from _among(known, point, replace(now, concurrency=max(1, int(n * times))))
        for nbytes, times in product((now.piece_bytes,), (2, 0.5)):
            yield from _among(known, point, replace(now, piece_bytes=int(nbytes * times)))
        for times in (4, 16):
            yield from _among(known, point, replace(now, limit_bytes=now.limit_bytes * times))
        before = self._beginning.settings  # so that nothing is kept which gains nothing
        for each in () if before is None else fields(before):
            yield from _among(known, point, replace(now, **{each.name: getattr(before, each.name)}))

    def _models(self) -> Sequence[FlowModel]:
        """Return those of the models of all runs that say of each run about what it took.

        Each run has one for a bandwidth of each stream, and one for a bandwidth that all share.
        """
        results = self._results.values()
        known = [(each.fitted, min(each.seconds)) for each in results if each.fitted is not None]
        models = [model for fitted, _ in known for model in (fitted.each, fitted.shared)]
        if not models:
            return ()

        off = sorted([(_off(model, known), number) for number, model in enumerate(models)])
        return [models[number] for by, number in off[:_MOST_MODELS] if by <= off[0][0] + _CREDIBLE]

    def _finalists(self) -> list[_Point]:
        beginning_s = min(self._results[self._beginning].seconds)
        others = [point for point in self._results if point != self._beginning]
        if self._space.given is None:
            others = [point for point in others if min(self._results[point].seconds) < GAIN * beginning_s]

        others.sort(key=lambda point: min(self._results[point].seconds))
        if self._space.given is not None or not others:
            return others

        near_s = _NEAR * min(self._results[others[0]].seconds)
        near = [point for point in others if min(self._results[point].seconds) <= near_s]
        least = min(near, key=lambda point: point.distance(self._beginning))
        return list(dict.fromkeys([others[0], least, *others]))[:_FINALISTS]

    def _in_time(self, finalists: list[_Point], until: float) -> list[_Point]:
        """Return as many of them as there is time for to measure each often enough; one at least."""
        beginning = self._results[self._beginning]
        far = [min(self._results[point].seconds) <= _FAR * min(beginning.seconds) for point in finalists]
        left = (until - self._spent() - (1 if all(far) else _LEAST_ROUNDS) * beginning.part) / _LEAST_ROUNDS
        costs = list(accumulate([self._results[point].part for point in finalists]))
        return finalists[: max(1, sum([cost <= left for cost in costs]))]

    def _judged(self, finalists: Sequence[_Point]) -> list[Tried]:
        """Say of all that was tried why it is kept or not."""
        before = tuple(self._results[self._beginning].seconds)
        tried = {
            point: Tried(
                self._flow, point.options(self._flow, self._beginning), before, tuple(results.seconds)
            )
            for point, results in self._results.items()
            if point != self._beginning
        }
        faster = [point for point in finalists if tried[point].is_faster]
        chosen: _Point | None = None
        if faster:
            fastest_s = min([median(tried[point].seconds) for point in faster])
            as_fast = [point for point in faster if median(tried[point].seconds) <= _AS_FAST * fastest_s]
            chosen = min(as_fast, key=lambda point: point.distance(self._beginning))

        found: list[Tried] = []
        for point, one in tried.items():
            if point == chosen:
                pairs = f"faster in {one.sureness:.0%} of {len(one.seconds) * len(before)} pairs"
                found.append(replace(one, verdict=f"kept: {pairs}", is_kept=True))
            else:
                why = _why_not(one, None if chosen is None else tried[chosen], is_finalist=point in finalists)
                found.append(replace(one, verdict=f"rejected: {why}"))

        return found


def _among(known: set[Settings], point: _Point, settings: Settings) -> Iterator[_Point]:
    if settings in known and settings != point.settings:
        yield replace(point, settings=settings)


def _fitted(flow: Flow, report: StageReport) -> Fitted | None:
    return None if report.limits is None else fit(flow, report.stages, report.limits)


def _off(model: FlowModel, known: Sequence[tuple[Fitted, float]]) -> float:
    """Return by how much a model is wrong about runs: the root of the mean square, of logarithms."""
    wrong = [math.log(max(model.seconds(fitted.settings), 1e-9) / seconds) for fitted, seconds in known]
    return math.sqrt(sum([each * each for each in wrong]) / len(wrong))


def _why_not(tried: Tried, chosen: Tried | None, *, is_finalist: bool) -> str:
    if chosen is not None and median(tried.seconds) > median(chosen.seconds):
        return f"what is kept takes {median(chosen.seconds) / median(tried.seconds):.0%} of its time"
    if chosen is not None:
        return "no faster beyond noise than what is kept, which changes less"
    if tried.ratio >= 1:
        return "slower" if tried.ratio > 1 / GAIN else "as fast as before"
    if tried.ratio > GAIN:
        return f"{1 - tried.ratio:.0%} faster, which is less than noise"

    if not is_finalist:
        return "others were faster"
    if not tried.is_certain:
        return "too little time to be sure"

    return f"faster in only {tried.sureness:.0%} of the pairs"
