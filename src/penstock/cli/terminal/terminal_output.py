"""What the command prints: tables for people on a terminal, tab-separated lines for programs in a pipe."""

from __future__ import annotations

__all__ = (
    "Bar",
    "CommandError",
    "Output",
    "PipedOutput",
    "PlainOutput",
    "Table",
    "has_colours",
    "open_output",
    "say_error",
)

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, Protocol, TextIO, final

from penstock.cli.terminal.printable import one_line, printable, width_of
from penstock.cli.terminal.progress_bars import Bar, open_bar

_BOLD: Final = "1"
_GREEN: Final = "1;32"
_CYAN: Final = "1;36"


class CommandError(Exception):
    """The command cannot be carried out, or its result is a failure."""


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
    """Where the command writes its results. No text reaches a terminal with control characters in it."""

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
    """Whether to write colours to `stream`: to a terminal, unless `NO_COLOR` is set or it is a dumb one."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say_error(text: str) -> None:
    """Write why the command failed, on stderr."""
    sys.stderr.write(f"penstock: {printable(text)}\n")


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
    """The same for programs: of a table one line for each row, with tabs between cells, and no heading."""

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
