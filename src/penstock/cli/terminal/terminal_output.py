"""The output of the command: with rich on a terminal, in plain lines everywhere else."""

from __future__ import annotations

__all__ = ("Bar", "CommandError", "Output", "PlainOutput", "Table", "open_output")

import sys
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol, TextIO, final

if TYPE_CHECKING:
    from rich.console import Console


class CommandError(Exception):
    """The command cannot be carried out, or its result is a failure."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. The first `n_left` columns are words and aligned left; the others are figures."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    n_left: int = 1


class Bar(Protocol):
    """A progress bar."""

    def show(self, done: int, text: str) -> None:
        """Show that `done` of the total are done."""
        ...


class Output(Protocol):
    """Where the command writes what people read."""

    def headline(self, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def table(self, table: Table) -> None: ...
    def bar(self, total: int) -> AbstractContextManager[Bar]: ...
    def success(self, text: str) -> None: ...


def open_output() -> Output:
    """Return coloured output if stdout is a terminal and rich is installed, else plain output."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            return RichOutput(Console(highlight=False))

    return PlainOutput(sys.stdout)


@final
class PlainOutput:
    """Plain lines, for logs, pipes and terminals without rich. It shows no progress bar."""

    __slots__ = ("_stream",)

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def headline(self, text: str) -> None:
        self.say(f"\n== {text}")

    def say(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def table(self, table: Table) -> None:
        lines = [table.columns, *table.rows]
        widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
        for line in (table.columns, ["-" * width for width in widths], *table.rows):
            cells = [
                cell.ljust(width) if at < table.n_left else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            self.say("  ".join(cells).rstrip())

    @contextmanager
    def bar(self, total: int) -> Generator[Bar]:
        yield _NoBar()

    def success(self, text: str) -> None:
        self.say(text)


@final
class _NoBar:
    def show(self, done: int, text: str) -> None:
        pass


@final
class RichOutput:
    """Colours, tables and a progress bar."""

    __slots__ = ("_console",)

    def __init__(self, console: Console) -> None:
        self._console = console

    def headline(self, text: str) -> None:
        self._console.print()
        self._console.rule(f"[bold]{_escaped(text)}", align="left", style="cyan")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def table(self, table: Table) -> None:
        from rich import box
        from rich.table import Table as RichTable

        drawn = RichTable(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for at, column in enumerate(table.columns):
            left = at < table.n_left
            drawn.add_column(_escaped(column), justify="left" if left else "right", overflow="fold")

        for row in table.rows:
            drawn.add_row(*map(_escaped, row))

        self._console.print(drawn)

    @contextmanager
    def bar(self, total: int) -> Generator[Bar]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        with Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=36),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=self._console,
        ) as progress:
            yield _RichBar(progress, progress.add_task("steps", total=total, text="starting jax"))

    def success(self, text: str) -> None:
        self._console.print(text, style="bold green", markup=False)


@final
@dataclass(frozen=True, slots=True)
class _RichBar:
    progress: Any
    task: Any

    def show(self, done: int, text: str) -> None:
        self.progress.update(self.task, completed=done, text=text)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
