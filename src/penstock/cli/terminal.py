"""The output of a command: tables for people on a terminal, tab-separated lines for programs in a pipe.

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
    "Table",
    "format_bytes",
    "has_colours",
    "in_options",
    "open_output",
    "say_error",
    "say_usage",
)

import os
import re
import shlex
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any, Final, Protocol, TextIO, final

from penstock.inspection.texts import one_line, printable, width_of
from penstock.kernel.errors import PenstockError

_BOLD: Final = "1"
_GREEN: Final = "1;32"
_CYAN: Final = "1;36"


class CommandError(Exception):
    """The command cannot be carried out, or its result is a failure."""


EXPECTED: Final = (CommandError, PenstockError, OSError)
"""The errors that a command ends with in a sentence. Any other one is a defect, and shown as a whole."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. The first `n_left` columns are words and aligned left; the others are figures.

    Without names of columns there is no heading.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    n_left: int = 1
    plain: Sequence[Sequence[str]] = field(default=())
    """The same rows for programs: sizes in bytes, times in ISO format; by default `rows`."""


class Output(Protocol):
    """The sink of a command's results. No text reaches a terminal with control characters in it."""

    def headline(self, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def note(self, text: str) -> None:
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
        return PlainOutput(colours=has_colours(sys.stdout))

    return PipedOutput(sys.stdout)


def has_colours(stream: TextIO) -> bool:
    """Return whether `stream` gets colours: a terminal does, unless `NO_COLOR` is set or it is a dumb one."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


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
        colours: Whether headlines are bold and successes green.
    """

    __slots__ = ("_colours", "_stream")

    def __init__(self, stream: TextIO | None = None, *, colours: bool = False) -> None:
        self._stream = stream
        self._colours = colours

    def headline(self, text: str) -> None:
        self._write("\n" + self._styled(f"== {printable(text)}", _CYAN))

    def say(self, text: str) -> None:
        self._write(printable(text))

    def note(self, text: str) -> None:
        self.say(text)

    def table(self, table: Table) -> None:
        rows = [[one_line(cell) for cell in row] for row in table.rows]
        columns = [one_line(column) for column in table.columns]
        widths = [max(map(width_of, cells)) for cells in zip_longest(columns, *rows, fillvalue="")]
        rule = ["-" * width for width in widths]
        if columns:
            self._write(self._styled(_aligned(columns, widths, table.n_left), _BOLD))
            rows.insert(0, rule)

        # A row is one line, however long it is: what was wrapped could not be copied.
        for row in rows:
            self._write(_aligned(row, widths, table.n_left))

    def bar(self, total: int | None, unit: str = "steps") -> AbstractContextManager[Bar]:
        return open_bar(total, unit)

    def success(self, text: str) -> None:
        self._write(self._styled(printable(text), _GREEN))

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self._colours else text

    def _write(self, text: str) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        stream.write(f"{text}\n")
        stream.flush()


@final
class PipedOutput:
    """Output for programs: one line for each row of a table, tabs between cells, no heading."""

    __slots__ = ("_stream",)

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def headline(self, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        self._stream.write(f"{printable(text)}\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        pass

    def table(self, table: Table) -> None:
        for row in table.plain or table.rows:
            self._stream.write("\t".join(map(one_line, row)) + "\n")

        self._stream.flush()

    def bar(self, total: int | None, unit: str = "steps") -> AbstractContextManager[Bar]:
        return open_bar(total, unit)

    def success(self, text: str) -> None:
        self.say(text)


def _aligned(cells: Sequence[str], widths: Sequence[int], n_left: int) -> str:
    filled: list[str] = []
    for at, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        blank = " " * (width - width_of(cell))
        filled.append(cell + blank if at < n_left else blank + cell)

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
    )

    counted = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    with Progress(
        BarColumn(bar_width=36),
        counted,
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
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
