"""Claims on names, where the file system has no locks: a file that one process alone can create."""

from __future__ import annotations

__all__ = ("NameClaim",)

import errno
import json
import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast, final

from penstock.handlers.stores.descriptor import Descriptor, translated
from penstock.handlers.stores.system_calls.vectored_io import write_vectored
from penstock.kernel.errors import InUseError, StorageError

_SUFFIX: Final = ".penstock-claim"
_MOST_BYTES: Final = 4096  # a claim is far shorter


@final
class NameClaim:
    """The sole right to what lies at a path, as a hidden file beside it: `.<name>.penstock-claim`.

    The file says which process of which machine made it. The claim of a process of this machine that has
    ended is broken. That of another machine must be removed by hand; the error names the file.

    Args:
        path: What is claimed; its parent directory exists.

    Raises:
        InUseError: If somebody else claims it.
        StorageError: If the file cannot be created.
    """

    __slots__ = ("_file", "_text")

    def __init__(self, path: str) -> None:
        self._file = _claim_file(path)
        self._text = json.dumps(_myself() | {"id": uuid.uuid4().hex}).encode()
        if not _create(self._file, self._text):
            _break_if_dead(path, self._file)
            if not _create(self._file, self._text):
                raise InUseError(path, f"it is claimed by {self._file}")

    @staticmethod
    def is_made(path: str) -> bool:
        """Whether anybody claims `path`."""
        return os.path.lexists(_claim_file(path))

    def release(self) -> None:
        """Give up the claim. Idempotent; never fails."""
        with suppress(OSError, StorageError):
            if _read(self._file) == self._text:
                os.unlink(self._file)


def _claim_file(path: str) -> str:
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f".{name}{_SUFFIX}")


def _break_if_dead(path: str, file: str) -> None:
    """Remove a claim whose process has ended.

    Who breaks it first creates a file named after it, then looks again whether it is still the same claim. So
    only one of several breaks it, and nobody breaks the claim that follows.
    """
    text = _read(file)
    if text is None:
        return

    owner = _decoded(text)
    if owner is None or not _has_ended(owner):
        raise InUseError(path, f"it is claimed by {_named(owner)}; if that has ended, remove {file}")

    breaking = f"{file}-{owner['id']}"
    if not _create(breaking, b""):
        raise InUseError(
            path, f"it is claimed by {file}, which another process removes; else remove {breaking}"
        )

    try:
        if _read(file) == text:
            os.unlink(file)
    finally:
        os.unlink(breaking)


def _create(file: str, text: bytes) -> bool:
    """Create a file with this content; return False if it is there. Its content follows its name."""
    try:
        descriptor = Descriptor(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except StorageError as error:
        if error.errno == errno.EEXIST:
            return False

        raise

    try:
        with translated("write", file):
            write_vectored(descriptor.number, 0, [memoryview(text)])
    finally:
        descriptor.close()

    return True


def _read(file: str) -> bytes | None:
    try:
        descriptor = Descriptor.of_regular(file)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None

        raise

    try:
        with translated("read", file):
            return os.read(descriptor.number, _MOST_BYTES)
    finally:
        descriptor.close()


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None  # it is being written, or its writer died in between

    if not isinstance(found, dict):
        return None

    owner = cast("dict[str, Any]", found)
    return (
        owner if set(owner) == {"host", "boot", "pid", "began", "id"} and str(owner["id"]).isalnum() else None
    )


def _named(owner: dict[str, Any] | None) -> str:
    return "an unknown process" if owner is None else f"process {owner['pid']} of {owner['host']}"


def _myself() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "began": _began(pid)}


def _has_ended(owner: dict[str, Any]) -> bool:
    """Whether the process was one of this machine, and is no more. When in doubt, it is at work."""
    if owner["host"] != socket.gethostname() or not isinstance(owner["pid"], int):
        return False
    if owner["boot"] != _boot():
        return bool(owner["boot"]) and bool(_boot())  # the machine was started anew since

    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # it belongs to another user

    return bool(owner["began"]) and owner["began"] != _began(owner["pid"])


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    return ""


def _began(pid: int) -> str:
    """When a process began, in clock ticks since the machine did: numbers of processes are used again."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]

    return ""
