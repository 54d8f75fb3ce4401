"""The output of a command: tables for people on a terminal, tab-separated lines for programs in a pipe.

A table for people takes the width of the terminal: it leaves columns out that it can do without, and says
which. What names something is never cut, so that it can be copied. A colour only repeats what a word says.

Errors of the library name arguments of Python; `in_options` names the options of the command line instead.
"""

from __future__ import annotations

__all__ = (
    "EXPECTED",
    "Bar",
    "CommandError",
    "NoBar",
    "Output",
    "PipedOutput",
    "PlainOutput",
    "Sink",
    "Table",
    "Tone",
    "Toned",
    "format_bytes",
    "has_colours",
    "in_options",
    "open_output",
    "paged_output",
    "say_error",
    "say_usage",
    "terminal_width",
)

import os
import re
import shlex
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any, Final, Literal, Protocol, TextIO, TypeAlias, final

from penstock.inspection.texts import one_line, printable, width_of
from penstock.kernel.errors import PenstockError

Tone: TypeAlias = Literal["heading", "strong", "faint", "good", "busy", "warning", "bad"]
"""The meaning that a colour stands for. What is `bad` is damaged or lost, a `warning` is worth a look."""

_STYLES: Final[dict[Tone, str]] = {
    "heading": "1",
    "strong": "1",
    "faint": "2",
    "good": "32",
    "busy": "36",
    "warning": "33",
    "bad": "1;31",
}
"""None of these is black, white or blue, which are not seen on some backgrounds."""

_ASCII: Final = str.maketrans(dict(zip("│├└─×–…·Δ▁▂▃▄▅▆▇█", "||`-x-.-d.:-=+*%#", strict=True)))
_LEAST_ROOM: Final = 12  # columns for names, however narrow the terminal is


@final
class Toned(str):
    """A text with the meaning of its colour."""

    __slots__ = ("tone",)

    tone: Tone

    def __new__(cls, text: str, tone: Tone) -> Toned:
        made = super().__new__(cls, text)
        made.tone = tone
        return made


class CommandError(Exception):
    """The command cannot be carried out, or its result is a failure."""


EXPECTED: Final = (CommandError, PenstockError, OSError)
"""The errors that a command ends with in a sentence. Any other one is a defect, and shown as a whole."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. The first `n_left` columns are words and aligned left; the others are figures.

    Without names of columns there is no heading. A cell may be `Toned`.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    n_left: int = 1
    plain: Sequence[Sequence[str]] = field(default=())
    """The same rows for programs: sizes in bytes, times in ISO format; by default `rows`."""
    spare: Sequence[str] = field(default=())
    """Names of columns that may be left out where the width does not do, the first of them first."""


class Sink(Protocol):
    """Takes lines: a stream, or a pager."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> None: ...


class Output(Protocol):
    """The sink of a command's results. No text reaches a terminal with control characters in it."""

    @property
    def is_for_people(self) -> bool:
        """False in a pipe."""
        ...

    def headline(self, text: str) -> None: ...
    def say(self, text: str, tone: Tone | None = None) -> None: ...
    def note(self, text: str, tone: Tone | None = None) -> None:
        """Say something that only people want to know; nothing in a pipe."""
        ...

    def table(self, table: Table) -> None: ...
    def bar(self, total: int | None, unit: str = "steps") -> AbstractContextManager[Bar]: ...
    def success(self, text: str) -> None: ...


def open_output(*, for_people: bool = False) -> Output:
    """Return the output of a command: tables if stdout is a terminal, tab-separated lines if it is not.

    Args:
        for_people: Tables in any case, as of a program that is only to be looked at.
    """
    if for_people or sys.stdout.isatty():
        return PlainOutput(colours=has_colours(sys.stdout), width=terminal_width())

    return PipedOutput(sys.stdout)


@contextmanager
def paged_output(*, for_people: bool = False, paged: bool = True) -> Generator[Output]:
    """Return the output of a command as a context: on a terminal, what is longer than that goes to a pager.

    Args:
        for_people: As of `open_output`.
        paged: False for a command that says things one after the other.
    """
    if not paged or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        yield open_output(for_people=for_people)
        return

    from penstock.cli.pager import Pager

    with Pager.open(sys.stdout) as pager:
        yield PlainOutput(pager, colours=has_colours(sys.stdout), width=terminal_width())


def has_colours(stream: TextIO) -> bool:
    """Return whether `stream` gets colours: a terminal does, unless `NO_COLOR` is set or it is a dumb one.

    `CLICOLOR_FORCE` gives them to what is no terminal, such as a pager that one calls oneself.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True

    return stream.isatty() and os.environ.get("TERM") != "dumb"


def terminal_width() -> int | None:
    """Return the columns that there are: `COLUMNS`, else what the terminal says; None without a terminal."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)

    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):  # it is no terminal, or was closed
        return None


def format_bytes(nbytes: int) -> str:
    """Return a size such as `32.5 MB`, in powers of 1000."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"

        size /= 1000

    return f"{size:.1f} TB"


def say_error(error: BaseException) -> None:
    """Write why the command failed, on stderr: the sentence alone, or all of it with `PENSTOCK_TRACEBACK`."""
    if os.environ.get("PENSTOCK_TRACEBACK") == "full":
        import traceback

        sys.stderr.write("".join(map(printable, traceback.format_exception(error))))

    sys.stderr.write(f"penstock: {printable(in_options(str(error)))}\n")


def say_usage(problem: str, command: str = "penstock") -> int:
    """Write what is wrong with a command line, on stderr, and return the exit status of that."""
    sys.stderr.write(f"penstock: {printable(problem)}\ntry: {command} --help\n")
    return 2


@final
class PlainOutput:
    """Lines and tables for people.

    Args:
        stream: Where they go; by default stdout, or what stands for it while a progress bar is shown.
        colours: Whether there are any.
        width: The columns that there are; by default no matter how many.
    """

    __slots__ = ("_colours", "_stream", "_width")

    def __init__(
        self, stream: Sink | None = None, *, colours: bool = False, width: int | None = None
    ) -> None:
        self._stream = stream
        self._colours = colours
        self._width = width

    @property
    def is_for_people(self) -> bool:
        """It is."""
        return True

    def headline(self, text: str) -> None:
        self._write("\n" + self._styled(f"== {printable(text)}", "strong"))

    def say(self, text: str, tone: Tone | None = None) -> None:
        self._write(self._styled(printable(text), tone))

    def note(self, text: str, tone: Tone | None = None) -> None:
        lines = [line for part in text.split("\n") for line in _wrapped(part, self._width)]
        for line in lines:
            self.say(line, tone)

    def table(self, table: Table) -> None:
        fitted, left_out = _fitted(table, self._width)
        widths = _widths(fitted)
        if self._width is not None and widths:
            # Longer names have a line of their own.
            room = max(self._width - sum(widths[1:]) - 2 * len(widths[1:]), _LEAST_ROOM)
            widths[0] = min(widths[0], room)
        if fitted.columns:
            self._write(self._styled(_aligned(fitted.columns, widths, fitted.n_left), "heading"))
            self._write(_aligned(["-" * width for width in widths], widths, fitted.n_left))
        for row in fitted.rows:
            if width_of(row[0]) > widths[0] and any(row[1:]):
                self._write(self._toned(row[0]))
                row = ["", *row[1:]]  # the rest of it is below

            self._write(_aligned(row, widths, fitted.n_left, self._toned))
        if left_out:
            self.note(f"no room for: {', '.join(left_out)}", "faint")

    def _toned(self, cell: str) -> str:
        return self._styled(cell, cell.tone) if isinstance(cell, Toned) else cell

    def bar(self, total: int | None, unit: str = "steps") -> AbstractContextManager[Bar]:
        return open_bar(total, unit)

    def success(self, text: str) -> None:
        self._write(self._styled(printable(text), "good"))

    def _styled(self, text: str, tone: Tone | None) -> str:
        if not self._colours or tone is None or not text:
            return text

        return f"\x1b[{_STYLES[tone]}m{text}\x1b[0m"

    def _write(self, text: str) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        if not text.isascii() and not encoding.lower().startswith("utf"):
            text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)

        stream.write(f"{text}\n")
        stream.flush()


@final
class PipedOutput:
    """Output for programs: one line for each row of a table, tabs between cells, no heading."""

    __slots__ = ("_stream",)

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def is_for_people(self) -> bool:
        """It is not."""
        return False

    def headline(self, text: str) -> None:
        pass

    def say(self, text: str, tone: Tone | None = None) -> None:
        self._stream.write(f"{printable(text)}\n")
        self._stream.flush()

    def note(self, text: str, tone: Tone | None = None) -> None:
        pass

    def table(self, table: Table) -> None:
        for row in table.plain or table.rows:
            self._stream.write("\t".join(map(one_line, row)) + "\n")

        self._stream.flush()

    def bar(self, total: int | None, unit: str = "steps") -> AbstractContextManager[Bar]:
        return open_bar(total, unit)

    def success(self, text: str) -> None:
        self.say(text)


def _wrapped(text: str, width: int | None) -> Sequence[str]:
    """Return a list of facts, which dots separate, as lines; paths and names are never broken."""
    lines = [""]
    for fact in text.split(_DOT):
        longer = f"{lines[-1]}{_DOT}{fact}" if lines[-1] else fact
        if lines[-1] and width is not None and width_of(longer) > width:
            lines.append(f"  {fact}")
        else:
            lines[-1] = longer

    return lines


_DOT: Final = " · "


def _fitted(table: Table, width: int | None) -> tuple[Table, Sequence[str]]:
    """Return a table of printable cells that fits, as far as columns may be left out, and the names of those.

    A column that says nothing is left out in any case.
    """
    rows = [[_printable_cell(cell) for cell in row] for row in table.rows]
    fitted = replace(table, columns=[one_line(column) for column in table.columns], rows=rows)
    for at in range(len(fitted.columns) - 1, 0, -1):
        if rows and not any(row[at] for row in rows):
            fitted = _without(fitted, at)

    left_out: list[str] = []
    for name in table.spare:
        if width is None or not _is_wider(fitted, width):
            break
        if name in fitted.columns:
            fitted = _without(fitted, fitted.columns.index(name))
            left_out.append(name)

    return fitted, left_out


def _is_wider(table: Table, width: int) -> bool:
    """Return whether a table is too wide, if its names take no more than half of the width."""
    names, *rest = _widths(table)
    return min(names, max(width // 2, _LEAST_ROOM)) + sum(rest) + 2 * len(rest) > width


def _without(table: Table, at: int) -> Table:
    columns = [*table.columns[:at], *table.columns[at + 1 :]]
    rows = [[*row[:at], *row[at + 1 :]] for row in table.rows]
    return replace(table, columns=columns, rows=rows, n_left=table.n_left - (at < table.n_left))


def _widths(table: Table) -> list[int]:
    return [max(map(width_of, cells)) for cells in zip_longest(table.columns, *table.rows, fillvalue="")]


def _printable_cell(cell: str) -> str:
    return Toned(one_line(cell), cell.tone) if isinstance(cell, Toned) else one_line(cell)


def _aligned(
    cells: Sequence[str], widths: Sequence[int], n_left: int, toned: Callable[[str], str] = str
) -> str:
    filled: list[str] = []
    for at, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        blank = " " * (width - width_of(cell))
        filled.append(toned(cell) + blank if at < n_left else blank + toned(cell))

    return "  ".join(filled).rstrip()


class Bar(Protocol):
    """A progress bar."""

    def show(self, done: int, text: str = "", total: int | None = None) -> None:
        """Show that `done` of the total are done; of a new total, if one is given."""
        ...


@final
class NoBar:
    """Shows nothing: stderr is no terminal, or there is no rich."""

    __slots__ = ()

    def show(self, done: int, text: str = "", total: int | None = None) -> None:
        """Do nothing."""


def open_bar(total: int | None, unit: str) -> AbstractContextManager[Bar]:
    """Return a bar as a context. It goes away when it is done, and leaves the results alone on the screen.

    Args:
        total: What is to be done; None while it is not known.
        unit: `bytes`, or what is counted.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:  # which is in an extra
        return nullcontext(NoBar())

    return _rich_bar(total, unit)


@contextmanager
def _rich_bar(total: int | None, unit: str) -> Generator[Bar]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    counted = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    with Progress(
        BarColumn(bar_width=36),
        counted,
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # what is said meanwhile stands above the bar
    ) as progress:
        yield _RichTerminalBar(progress, progress.add_task(unit, total=total, text=""))


@final
class _RichTerminalBar:
    __slots__ = ("_progress", "_task")

    def __init__(self, progress: Any, task: Any) -> None:
        self._progress = progress
        self._task = task

    def show(self, done: int, text: str = "", total: int | None = None) -> None:

        more = {} if total is None else {"total": total}
        self._progress.update(self._task, completed=done, text=one_line(text), **more)


def _bare(name: str) -> str:
    """Match an argument's name in a sentence, and not in a path, a key path or a quoted text."""
    return rf"(?<![\w'\"\[/.]){name}(?:=[0-9]+)?(?![\w'\"\]/])"


# What errors of the library say, and what is said here. The first that fits a place counts.
_OPTIONS: Final[tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]] = (
    (r"pass overwrite=True", "give --overwrite"),
    (r"\bitem=(['\"])(.*?)\1", lambda found: f"--item {found[2]}"),
    (r"pass format='safetensors'", "give --format safetensors"),
    (r"pass split=None", "give --flat"),
    (r"\bsplit=(['\"])(.*?)\1", lambda found: f"--split {found[2]}"),
    (r"\boverwrite=True\b", "--overwrite"),
    (r"\bdtype=(['\"])(.*?)\1", lambda found: f"--dtype {found[2]}"),
    (r"\brename=\{(['\"])(.*?)\1: None\}", lambda found: f"--rename {shlex.quote(found[2] + '=')}"),
    (_bare("max_shard_bytes"), "--max-shard-bytes"),
    (_bare("max_expansion"), "--max-expansion"),
    (_bare("custom_metadata"), "--metadata"),
    (_bare("save_format"), "--codec, --zarr or --directories"),
    (_bare("memory_limit"), "--memory"),
    (r"\brename names it, but", "--rename names it, but"),
    (r"\bdtype names (?=['\"])", "--dtype names "),
)


def in_options(text: str) -> str:
    """Return the text of an error with the command line's names for what it advises."""
    for pattern, said in _OPTIONS:
        text = re.sub(pattern, said, text)

    return text
