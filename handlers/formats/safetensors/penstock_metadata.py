"""The additions of penstock to the `__metadata__` of its files: what tensors cannot express of a tree.

One member, `penstock`, holds a JSON text: the key paths that the names do not tell, strings, None and
empty containers, typed PRNG keys, which kind of leaf each tensor was, and metadata that is not text.
Other readers see a text that they ignore. It is written into the first file of a folder.
"""

from __future__ import annotations

__all__ = ("MEMBER", "Note", "decode", "encode", "keys_and_kinds", "steps_of")

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast, final

from penstock.handlers.formats.untrusted import as_list, as_object, as_string, parse_object
from penstock.kernel.errors import CorruptCheckpointError, UnsupportedFormatError
from penstock.kernel.protocols.leaf import EMPTY_MARKERS, KeyKind, KeyPath, ParamInfo

MEMBER: Final = "penstock"
VERSION: Final = 1

_INDEX: Final = re.compile("[0-9]{1,18}")
_KINDS: Final = frozenset({"jax.Array", "np.ndarray", "scalar"})

Steps = tuple["str | int", ...]
"""A key path: texts are keys of dicts, numbers are indices of sequences."""


@final
@dataclass(frozen=True, slots=True)
class Note:
    """The note, decoded. The keys of every mapping are names, of tensors or of other leaves."""

    paths: Mapping[str, Steps] = field(default_factory=dict[str, Steps])  #: where splitting at `.` would err
    strings: Mapping[str, str] = field(default_factory=dict[str, str])
    empty: Mapping[str, str] = field(default_factory=dict[str, str])  #: to `None`, `Dict`, `List`, `Tuple`
    random_keys: Mapping[str, str] = field(default_factory=dict[str, str])  #: to the implementation
    kinds: Mapping[str, str] = field(default_factory=dict[str, str])  #: to the typestr, where not `kind`
    kind: str = "np.ndarray"  #: the typestr of every other tensor
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])  #: the caller's that is not text
    added: Sequence[str] = ()  #: members of `__metadata__` that are not the caller's


def steps_of(info: ParamInfo) -> Steps:
    """Return a key path as the note records it."""
    return tuple(
        [
            int(key) if kind is KeyKind.SEQUENCE and _INDEX.fullmatch(key) else key
            for key, kind in zip(info.keys, info.kinds, strict=True)
        ]
    )


def keys_and_kinds(steps: Steps) -> tuple[KeyPath, tuple[KeyKind, ...]]:
    """Return a recorded key path as `ParamInfo` has it."""
    kinds = [KeyKind.SEQUENCE if isinstance(step, int) else KeyKind.MAPPING for step in steps]
    return tuple(map(str, steps)), tuple(kinds)


def encode(note: Note) -> str:
    """Encode the note, without members that are empty."""
    members = {
        "version": VERSION,
        "kind": note.kind,
        "paths": {name: list(steps) for name, steps in note.paths.items()},
        "strings": note.strings,
        "empty": note.empty,
        "random_keys": note.random_keys,
        "kinds": note.kinds,
        "metadata": note.metadata,
        "added": list(note.added),
    }
    return json.dumps({name: value for name, value in members.items() if value}, separators=(",", ":"))


def decode(path: str, text: str) -> Note:
    """Read the note of the file at `path`.

    Raises:
        CorruptCheckpointError: If it is malformed.
        UnsupportedFormatError: If a later penstock wrote it.
    """
    document = parse_object(f"{path} (its note in __metadata__)", text.encode(errors="surrogatepass"))
    version = document.get("version")
    if type(version) is int and version > VERSION:
        raise UnsupportedFormatError(path, f"has a note of version {version}; this penstock reads {VERSION}")
    if version != VERSION:
        raise CorruptCheckpointError(path, f"has a note of version {version!r}, not {VERSION}")

    kind = as_string(path, "kind", document.get("kind", "np.ndarray"))
    paths = as_object(path, "paths", document.get("paths", {}))
    return Note(
        paths={name: _steps(path, name, value) for name, value in paths.items()},
        strings=_texts(path, document, "strings"),
        empty=_texts(path, document, "empty", among=EMPTY_MARKERS),
        random_keys=_texts(path, document, "random_keys"),
        kinds=_texts(path, document, "kinds", among=_KINDS),
        kind=kind if kind in _KINDS else "np.ndarray",
        metadata=as_object(path, "metadata", document.get("metadata", {})),
        added=[as_string(path, "added", name) for name in as_list(path, "added", document.get("added", []))],
    )


def _texts(
    path: str, document: dict[str, object], name: str, among: frozenset[str] | None = None
) -> dict[str, str]:
    members = as_object(path, name, document.get(name, {}))
    found = {key: as_string(path, f"{name}[{key!r}]", value) for key, value in members.items()}
    wrong = [value for value in found.values() if among is not None and value not in among]
    if wrong:
        raise CorruptCheckpointError(path, f"has a note whose {name} holds {wrong[0]!r}")

    return found


def _steps(path: str, name: str, value: object) -> Steps:
    steps = as_list(path, f"the path of {name!r}", value)
    if not all(type(step) is str or (type(step) is int and step >= 0) for step in steps):
        raise CorruptCheckpointError(path, f"the path of {name!r} is {steps!r}"[:200])

    return cast("Steps", tuple(steps))
