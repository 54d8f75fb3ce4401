"""A stream that a pager shows as soon as it is longer than the terminal, as git's output is."""

from __future__ import annotations

__all__ = ("Pager",)

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final, TextIO, final

from penstock.inspection.texts import width_of

_STYLE: Final = re.compile(r"\x1b\[[0-9;]*m")


@final
class Pager:
    """Holds lines back until they fill the screen, and then gives them all to `PAGER`, by default `less`.

    Args:
        stream: The terminal.
        command: The pager; None if there is none.
        size: Columns and lines of the terminal.
    """

    __slots__ = ("_command", "_held", "_n_rows", "_process", "_size", "_stream")

    def __init__(self, stream: TextIO, command: list[str] | None, size: os.terminal_size) -> None:
        self._stream = stream
        self._command = command
        self._size = size
        self._held: list[str] = []
        self._n_rows = 0
        self._process: subprocess.Popen[str] | None = None

    @classmethod
    @contextmanager
    def open(cls, stream: TextIO) -> Generator[Pager]:
        """Return a pager that has shown everything, and has been left, when the context ends."""
        pager = cls(stream, _command(), shutil.get_terminal_size())
        try:
            yield pager
        finally:
            pager.close()

    def write(self, text: str, /) -> None:
        """Write lines.

        Raises:
            BrokenPipeError: If the pager was left.
        """
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(text)
            return

        self._held.append(text)
        self._n_rows += sum(self._rows_of(line) for line in text.splitlines())
        if self._n_rows > self._size.lines - 1 and self._command is not None:  # the last is the shell's
            self._start(self._command)

    def flush(self) -> None:
        """Do nothing: a pager reads as far as it shows."""

    def close(self) -> None:
        """Show what is held, or wait until the pager is left."""
        if self._process is None:
            self._stream.write("".join(self._held))
            self._stream.flush()
            return

        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        while self._process.returncode is None:
            with suppress(KeyboardInterrupt):  # which is for the pager, and that stays
                self._process.wait()

    def _start(self, command: list[str]) -> None:
        # What less shows: colours, and no second screen that is gone when one leaves it.
        charset = {"LESSCHARSET": "utf-8"} if self._stream.encoding.lower() == "utf-8" else {}
        environment = {"LESS": "FRX", **charset, **os.environ}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, text=True, env=environment, encoding=self._stream.encoding
            )
        except OSError:
            self._command = None  # it is not there: nothing is paged
            return

        assert self._process.stdin is not None
        self._process.stdin.write("".join(self._held))
        self._held.clear()

    def _rows_of(self, line: str) -> int:
        return max(1, -(-width_of(_STYLE.sub("", line)) // max(self._size.columns, 1)))


def _command() -> list[str] | None:
    given = os.environ.get("PAGER")
    if given is not None:
        words = shlex.split(given)
        return words if words and words != ["cat"] else None

    return ["less"] if shutil.which("less") is not None else None
