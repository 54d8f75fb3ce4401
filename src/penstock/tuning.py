"""Real saves and restores of one tree, on the store that is measured."""

from __future__ import annotations

__all__ = (
    "BUCKET_CANDIDATES",
    "CANDIDATES",
    "CODECS",
    "Candidate",
    "Options",
    "RealRuns",
    "Timing",
    "Tuned",
    "candidates_for",
    "given_candidate",
    "made_up_tree",
    "nested_tables",
    "probe_store",
    "profile_text",
    "search",
    "tree_of",
    "tuned_svg",
)

import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np

from penstock import api
from penstock.config.config import Config
from penstock.config.option_reference import as_toml
from penstock.handlers.stores.local import LocalStore
from penstock.handlers.stores.publishing.paths import scheme_of
from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.stores import Store
from penstock.reports.report import size_text
from penstock.tools.delete import delete

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
class RealRuns:
    """Saves and restores a tree below its own directory.

    Args:
        directory: Exists; what is saved there is removed after each run.
        tree: What is saved.
        config: The options that are measured are laid over these.
        store: Where the directory is; by default on a disk.
    """

    __slots__ = ("_config", "_directory", "_n", "_store", "_tree")

    def __init__(self, directory: str, tree: Any, config: Config, store: Store | None = None) -> None:
        self._directory = directory
        self._tree = tree
        self._config = config
        self._n = 0
        self._store = store

    async def measure(self, options: Options) -> Timing:
        """Save and restore once. What was written is dropped from the page cache before it is read."""
        self._n += 1
        path = os.path.join(self._directory, str(self._n))
        config = self._config.changed(nested_tables(options))
        async with api.Checkpointer(config=config, store=self._store) as checkpointer:
            start = time.perf_counter()
            await (await checkpointer.save(path, self._tree))
            saved = time.perf_counter()
            _drop_from_cache(path)
            began = time.perf_counter()
            await checkpointer.restore(path)
            ended = time.perf_counter()

        await delete(path)
        return Timing(saved - start, ended - began)


def _drop_from_cache(path: str) -> None:
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return

    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError), open(os.path.join(folder, name), "rb") as file:
                advise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


Candidate: TypeAlias = "tuple[Flow, Options]"

CANDIDATES: Final[Sequence[Candidate]] = (
    ("save", {"store.io": "buffered"}),
    ("save", {"store.io": "direct"}),
    ("save", {"save.write.concurrency": 2}),
    ("save", {"save.write.concurrency": 8}),
    ("save", {"save.write.concurrency": 16}),
    ("save", {"save.piece_bytes": 4 << 20}),
    ("save", {"save.piece_bytes": 64 << 20}),
    ("restore", {"restore.read.concurrency": 1}),
    ("restore", {"restore.read.concurrency": 4}),
    ("restore", {"restore.read.concurrency": 8}),
    ("restore", {"restore.read.concurrency": 16}),
    ("restore", {"restore.piece_bytes": 8 << 20}),
    ("restore", {"restore.piece_bytes": 128 << 20}),
)
BUCKET_CANDIDATES: Final[Sequence[Candidate]] = (
    *[("save", {"save.write.concurrency": n}) for n in (4, 8, 32, 64)],
    *[("restore", {"restore.read.concurrency": n}) for n in (4, 8, 32, 64)],
)
"""A bucket has no page cache, and what waits for a network may do much at once."""

CODECS: Final[Sequence[Candidate]] = (
    ("save", {"format.codec": "auto"}),
    ("save", {"format.codec": "zstd:1"}),
)
"""Tried with a checkpoint of the user's own alone: how well a made-up one compresses says nothing."""

_TIMES: Final = (16, 4)


def candidates_for(
    *, is_bucket: bool, own_tree: bool, limit_bytes: int | None, free_bytes: int
) -> Sequence[Candidate]:
    """Return the candidate values for a store.

    Args:
        is_bucket: Whether it is one.
        own_tree: Whether a checkpoint of the user's own is saved.
        limit_bytes: The memory budget, if the configuration sets one. A larger one is tried first, if there
            is room: a budget that is too small slows down whatever else is set.
        free_bytes: Memory that the process can still get. At most half of it is tried as a budget.
    """
    found: list[Candidate] = []
    if limit_bytes is not None:
        larger = [times * limit_bytes for times in _TIMES if times * limit_bytes <= free_bytes // 2]
        found.extend(("save", {"memory.limit_bytes": limit}) for limit in larger[:1])

    found += BUCKET_CANDIDATES if is_bucket else CANDIDATES
    return [*found, *(CODECS if own_tree else ())]


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
_UNITS: Final = {"piece_bytes": "bytes", "limit_bytes": "bytes"}


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
    """Return a bar for each option that was tried: its time as a part of that of the best before it."""
    high = _ROW * (len(tuned.tried) + 1) + 20
    scale = (_WIDTH - _LEFT - 60) / 2
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{high}" font-size="12">']
    for at, tried in enumerate(tuned.tried):
        ratio = tried.ratio(tried.flow)
        y = 10 + _ROW * at
        colour = "#2563eb" if tried.is_faster else "#94a3b8"
        words = f"{tried.flow}: {_options_text(tried)}"
        lines.append(f'<text x="4" y="{y + 12}">{escape(words)}</text>')
        lines.append(
            f'<rect x="{_LEFT}" y="{y}" width="{scale * min(ratio, 2):.0f}" height="15" fill="{colour}"/>'
        )
        lines.append(f'<text x="{_LEFT + scale * min(ratio, 2) + 4:.0f}" y="{y + 12}">{ratio:.2f}</text>')

    end = 10 + _ROW * len(tuned.tried)
    lines.append(
        f'<line x1="{_LEFT + scale:.0f}" x2="{_LEFT + scale:.0f}" y1="4" y2="{end}" stroke="#475569"/>'
        f'<text x="4" y="{end + 12}">time, as a part of that without the option; blue: kept</text></svg>'
    )
    return "".join(lines)


def _figures(tuned: Tuned) -> list[str]:
    lines = [f"{tried.flow}, {_options_text(tried)}: {_both(tried)}" for tried in tuned.tried]
    if tuned.final is not None:
        save, restore = tuned.final.ratio("save"), tuned.final.ratio("restore")
        lines.append(f"All together: saves take {save:.2f} and restores {restore:.2f} of the time without.")
    if not tuned.options:
        lines.append("Nothing is faster beyond noise than what is set already.")
    if not tuned.complete:
        lines.append("There was no time for every candidate.")

    return lines


def _options_text(tried: Comparison) -> str:
    return ", ".join(
        f"{key} = {as_toml(value, _UNITS.get(key.rpartition('.')[2], ''))}"
        for key, value in tried.options.items()
    )


def _both(tried: Comparison) -> str:
    before, after = _median(tried, tried.before), _median(tried, tried.after)
    return f"{before:.3f} s -> {after:.3f} s{', kept' if tried.is_faster else ''}"


def _median(tried: Comparison, timings: Sequence[Timing]) -> float:
    return median(tried.seconds(timings, tried.flow))


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


Options: TypeAlias = Mapping[str, object]
"""Dotted keys to values."""

Flow: TypeAlias = Literal["save", "restore"]

PAIRS: Final = 3
GAIN: Final = 0.92
"""A candidate must take at most this part of the time, and be faster in every pair: less is noise."""


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one save and of one restore."""

    save_s: float
    restore_s: float


Measure: TypeAlias = Callable[[Options], Awaitable[Timing]]


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """A candidate next to what was best before it: the timings of each pair."""

    flow: Flow
    options: Options
    before: tuple[Timing, ...]
    after: tuple[Timing, ...]

    def seconds(self, timings: Sequence[Timing], flow: Flow) -> list[float]:
        return [timing.save_s if flow == "save" else timing.restore_s for timing in timings]

    def ratio(self, flow: Flow) -> float:
        """The median time as a fraction of the earlier one."""
        return median(self.seconds(self.after, flow)) / max(median(self.seconds(self.before, flow)), 1e-9)

    @property
    def is_faster(self) -> bool:
        """True if it is, beyond noise, and does not slow the other flow down."""
        pairs = zip(self.seconds(self.after, self.flow), self.seconds(self.before, self.flow), strict=True)
        other: Flow = "restore" if self.flow == "save" else "save"
        return all(a < b for a, b in pairs) and self.ratio(self.flow) <= GAIN and self.ratio(other) < 1 / GAIN


@final
@dataclass(frozen=True, slots=True)
class Tuned:
    """The findings."""

    options: Options  #: that differ from the defaults; empty if nothing is faster
    tried: tuple[Comparison, ...]
    final: Comparison | None  #: the options next to the defaults, measured once more
    complete: bool  #: whether time sufficed for every candidate


async def search(
    measure: Measure,
    candidates: Sequence[tuple[Flow, Options]],
    *,
    has_time: Callable[[], bool],
    tell: Callable[[int, str], object] = lambda done, text: None,
) -> Tuned:
    """Return the options that are faster than the defaults.

    Each candidate is measured in pairs with the best so far, so that a disk that is slow for a while is slow
    for both. In the end all that was chosen is compared with the defaults, and what is slower is dropped.

    Args:
        measure: Saves and restores with these options.
        candidates: In the order tried; of the same key, the fastest is kept.
        has_time: Asked before each candidate.
        tell: Called with how many are done, and what is tried now.
    """
    best: dict[str, object] = {}
    tried: list[Comparison] = []
    for done, (flow, options) in enumerate(candidates):
        if not has_time():
            break

        tell(done, ", ".join(f"{key} = {value}" for key, value in options.items()))
        found = await _compared(measure, flow, best, {**best, **options}, options)
        tried.append(found)
        if found.is_faster:
            best.update(options)

    complete = len(tried) == len(candidates)
    if not best:
        return Tuned({}, tuple(tried), None, complete)

    tell(len(candidates), "all that was chosen, beside the defaults")
    last = await _compared(measure, "save", {}, best, best)
    kept = {key: value for key, value in best.items() if _holds(last, key)}
    return Tuned(kept, tuple(tried), last, complete)


def _holds(last: Comparison, key: str) -> bool:
    """True if an option is kept: one for saves and restores may slow down neither."""
    if key.startswith(("save.", "restore.")):
        return last.ratio(_flow_of(key)) <= 1.0

    return last.ratio("save") <= 1.0 and last.ratio("restore") < 1 / GAIN


async def _compared(
    measure: Measure, flow: Flow, before: Options, after: Options, options: Options
) -> Comparison:
    pairs = [(await measure(before), await measure(after)) for _ in range(PAIRS)]
    return Comparison(
        flow, dict(options), tuple(first for first, _ in pairs), tuple(second for _, second in pairs)
    )


def _flow_of(key: str) -> Flow:
    return "restore" if key.startswith("restore.") else "save"
