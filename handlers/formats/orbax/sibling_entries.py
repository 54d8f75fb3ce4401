"""Entries of `_METADATA` that differ from the one before in nothing but the letters of their last key.

Each entry has that key twice, in its name and in its key path, and otherwise some 200 bytes that are those of
its siblings of the same type. So one entry is decoded, and is the example of those that follow: as far as
they are as long as it is, they are the rows of a table of bytes, which is compared with the example column
by column. What is accepted so needs no parser.
"""

from __future__ import annotations

__all__ = ("SiblingEntries",)

import re
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as _quoted
from typing import Final, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.formats.untrusted import SLICE_BYTES
from penstock.kernel.protocols.leaf import KeyPath

_LINE_END: Final = ord("\n")
_TO_PATH: Final = '": {"key_metadata": '
_TO_VALUE: Final = b', "value_metadata": '
_LAST_STEP: Final = re.compile(rb'(.*\{"key": ")([^"]*)(", "key_type": [12]\}\])', re.DOTALL)

_IS_PLAIN: Final = np.zeros(256, np.bool_)
"""Letters of keys that are the same in Python's texts and in those of JSON: printable ASCII."""
_IS_PLAIN[0x20:0x7F] = True
_IS_PLAIN[[*b"\"'\\"]] = False


@final
@dataclass(frozen=True, slots=True, eq=False)
class SiblingEntries:
    """The form of some entries: where their key is, and all other bytes."""

    begin: str  #: of their names, up to the last key
    example: bytes  #: one of them, and what is before the next one
    key_bytes: int
    first: int  #: where the key begins
    second: int  #: where it begins again

    @classmethod
    def like(cls, text: bytes, name: str, keys: KeyPath, path: bytes, value: bytes) -> SiblingEntries | None:
        """Return the form of one entry; None if it is written in another way than Orbax does.

        Args:
            text: What ends with the entry.
            name: Of the entry.
            keys: Its key path.
            path: The same, as it is written.
            value: As it is written.
        """
        found = _LAST_STEP.fullmatch(path)
        if found is None or name != str(keys) or not _IS_PLAIN[[*found[2]]].all():
            return None

        outer, key, rest = found.groups()
        end = "')" if len(keys) > 1 else "',)"
        begin = name.removesuffix(key.decode() + end)
        before, between = _quoted(begin)[:-1].encode(), (end + _TO_PATH).encode() + outer
        entry = b"".join((before, key, between, key, rest, _TO_VALUE, value, b"}"))
        if not text.endswith(entry):
            return None

        return cls(begin, entry + b", ", len(key), len(before), len(before) + len(key) + len(between))

    def read(self, data: bytes, start: int, end: int, n_expected: int) -> list[str]:
        """Return the last keys of the entries from `start` to `end` that are of this form, up to another one.

        Each of them takes as many bytes as the example. `n_expected` are looked at first.
        """
        found: list[str] = []
        nbytes, n_rows, tail = len(self.example), n_expected, self.second + self.key_bytes
        if not data.startswith(self.example[tail:], start + tail):  # without arrays, as for most examples
            return found

        while (n_rows := min(n_rows, max(SLICE_BYTES // nbytes, 1), (end - start) // nbytes)) > 0:
            rows = np.frombuffer(data, np.uint8, n_rows * nbytes, start).reshape(n_rows, nbytes)
            keys = self._keys(rows)
            found += keys
            if len(keys) < n_rows:
                break

            start += n_rows * nbytes
            n_rows *= 4

        return found

    def _keys(self, rows: npt.NDArray[np.uint8]) -> list[str]:
        size = self.key_bytes
        keys = rows[:, self.first : self.first + size]
        same = rows == np.frombuffer(self.example, np.uint8)
        same[:, self.first : self.first + size] = _IS_PLAIN[keys]
        same[:, self.second : self.second + size] = keys == rows[:, self.second : self.second + size]
        right = same.all(axis=1)
        n_right = len(right) if right.all() else int(right.argmin())
        if not n_right:
            return []

        lines = np.full((n_right, size + 1), _LINE_END, np.uint8)
        lines[:, :-1] = keys[:n_right]
        return lines.tobytes().decode().split("\n")[:-1]
