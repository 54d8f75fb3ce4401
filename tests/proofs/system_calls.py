"""Reads the output of strace: what the system calls of a process did to the files below a folder."""

from __future__ import annotations

__all__ = ("MARK", "SystemCalls", "strace")

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from penstock.testing.crash_store import RecordedDisk
from penstock.testing.volatile_disk import DiskWrite, Effect, Inode, Resize, SyncFile, SyncNames

MARK: Final = "/penstock-mark"
"""A directory that does not exist: to make the directory `<number>` in it is a mark in the trace."""

SEEN: Final = (
    "open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,ftruncate,truncate,fallocate,"
    "rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat,rmdir,symlink,symlinkat,"
    "copy_file_range,sendfile"
)
ON_FILES: Final = ("write", "pwrite64", "writev", "pwritev", "pwritev2", "fsync", "fdatasync")
ON_LENGTHS: Final = ("ftruncate", "fallocate")
LINE: Final = re.compile(r"(\d+) +(.*)")
CALL: Final = re.compile(r"(\w+)\((.*)\) += (-?\d+)(?:<((?:\\x..)*)>)?")
TEXT: Final = re.compile(r'"((?:\\x..)*)"')
FOLDER: Final = re.compile(r"(?:\d+|AT_FDCWD)<((?:\\x..)*)>")
NUMBERS: Final = re.compile(r", (\d+)(?=,|$)")


def strace(out: Path) -> list[str]:
    """Return the command that traces another one."""
    return [
        "strace",
        "-f",
        "-y",
        "-v",
        "-xx",
        "-s",
        "10000000",
        "-o",
        str(out),
        "-e",
        f"trace={SEEN}",
    ]


def _bytes(found: str) -> bytes:
    return bytes.fromhex(found.replace("\\x", ""))


class SystemCalls:
    """Makes effects of system calls on files below a folder, once `begin` was called.

    Args:
        folder: Where the process worked.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._disk: RecordedDisk | None = None
        self._root = ""
        self._at: dict[Inode, int] = {}
        self._unfinished: dict[str, str] = {}
        self._opened: dict[str, str] = {}

    @property
    def n_effects(self) -> int:
        """Effects so far."""
        return 0 if self._disk is None else self._disk.n_effects

    def begin(self, disk: RecordedDisk, root: Path) -> None:
        """Record from now on, on a disk on which the folder is called `root`."""
        self._disk, self._root = disk, str(root)

    def marks_in(self, lines: Iterable[str]) -> Iterator[int]:
        """Take the calls of a trace one after another; yield the number of each mark when it is reached."""
        for line in lines:
            text = self._finished(line.rstrip("\n"))
            call = None if text is None else CALL.match(text)
            if call is None:
                continue

            name, arguments, result, opened = call.groups()
            texts = [_bytes(found).decode(errors="surrogateescape") for found in TEXT.findall(arguments)]
            if name == "mkdir" and texts[0].startswith(f"{MARK}/"):
                yield int(texts[0].rpartition("/")[2])
            elif int(result) >= 0 and self._disk is not None:
                if opened:
                    self._opened[result] = _bytes(opened).decode()
                self._disk.record(self._effects(self._disk, name, arguments, int(result)))

    def _finished(self, line: str) -> str | None:
        """Put the two halves of a call together that another thread interrupted."""
        match = LINE.match(line)
        if match is None:
            return None

        thread, text = match.groups()
        if text.endswith(" <unfinished ...>"):
            self._unfinished[thread] = text.removesuffix(" <unfinished ...>")
            return None
        if text.startswith("<... "):
            return self._unfinished.pop(thread, "") + text.partition("resumed>")[2]

        return text

    def _effects(self, disk: RecordedDisk, name: str, arguments: str, result: int) -> Iterable[Effect]:
        assert not re.search(r'"\.\.\.', arguments), f"the trace of {name} is cut short"
        folders = [_bytes(found).decode() for found in FOLDER.findall(arguments)]
        texts = [_bytes(found) for found in TEXT.findall(arguments)]
        if name in ON_FILES or name in ON_LENGTHS:
            return self._on_file(disk, name, arguments, folders[0], b"".join(texts)[:result])

        named = [self._place(at, text.decode(), folders) for at, text in enumerate(texts)]
        if not any(path is not None for path in named):
            return ()

        return self._on_names(disk, name, arguments, named)

    def _on_file(
        self, disk: RecordedDisk, name: str, arguments: str, path: str, data: bytes
    ) -> Iterator[Effect]:
        place = self._there(path)
        file = None if place is None else disk.find(place)
        if file is None:
            return
        if name in {"fsync", "fdatasync"}:
            yield SyncNames(file) if file.is_directory else SyncFile(file)
            return

        numbers = [int(found) for found in NUMBERS.findall(arguments)]
        match name:
            case "write" | "writev":
                offset = self._at.get(file, 0)
                self._at[file] = offset + len(data)
                yield DiskWrite(file, offset, data)
            case "pwrite64" | "pwritev":
                yield DiskWrite(file, numbers[-1], data)
            case "pwritev2":  # with flags behind the offset
                yield DiskWrite(file, numbers[-2], data)
            case "ftruncate":
                yield Resize(file, numbers[-1])
            case _:  # fallocate
                if "KEEP_SIZE" not in arguments:
                    yield Resize(file, max(disk.size(file), numbers[-1] + numbers[-2]))

    def _on_names(
        self, disk: RecordedDisk, name: str, arguments: str, named: list[str | None]
    ) -> Iterable[Effect]:
        path = named[0]
        match name:
            case "open" | "openat" | "creat" if path is not None:
                return self._opened_file(disk, path, arguments)
            case "mkdir" | "mkdirat" if path is not None:
                return disk.named(path, disk.new_node(is_directory=True))
            case "unlink" | "unlinkat" | "rmdir" if path is not None:
                return disk.removed(path)
            case "rename" | "renameat" | "renameat2" if path is not None and named[1] is not None:
                change = disk.exchanged if "RENAME_EXCHANGE" in arguments else disk.moved
                return change(path, named[1])
            case "link" | "linkat" if path is not None and named[1] is not None:
                return disk.named(named[1], disk.there(path))
            case _:
                raise AssertionError(f"not understood: {name}({arguments})")

    def _opened_file(self, disk: RecordedDisk, path: str, arguments: str) -> Iterator[Effect]:
        assert "O_TMPFILE" not in arguments, f"not understood: {arguments}"
        file = disk.find(path)
        if file is None and "O_CREAT" in arguments:
            yield from disk.named(path, disk.new_node())
        elif file is not None and "O_TRUNC" in arguments:
            yield Resize(file, 0)
        if file is not None:
            self._at[file] = 0

    def _place(self, at: int, text: str, folders: list[str]) -> str | None:
        """The path that the at-th text of a call means, on the disk; None if it lies elsewhere."""
        descriptor = text.removeprefix("/proc/self/fd/")
        if descriptor != text:
            text = self._opened.get(descriptor, text)
        elif not text.startswith("/") and folders:
            text = os.path.join(folders[min(at, len(folders) - 1)], text) if text else folders[at]

        return self._there(text)

    def _there(self, path: str) -> str | None:
        if path == self._folder or path.startswith(f"{self._folder}/"):
            return self._root + path[len(self._folder) :].rstrip("/")

        return None
