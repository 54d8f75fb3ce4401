"""The checkpoints of tests/corpus, as Orbax of many versions wrote them, and what is in each."""

from __future__ import annotations

__all__ = ("DOCUMENTS", "EARLIER", "unpack", "unpack_earlier")

import json
import lzma
import tarfile
from pathlib import Path
from typing import Any, Final

_FOLDER: Final = Path(__file__).parent


def _documents(archive: str) -> dict[str, Any]:
    with lzma.open(_FOLDER / archive) as file, tarfile.open(fileobj=file) as members:
        found = {member.name: members.extractfile(member) for member in members if member.isfile()}
        return {
            name.split("/")[1]: json.loads(content.read())
            for name, content in found.items()
            if name.endswith("/expected.json") and content is not None
        }


def _unpack(archive: str, folder: Path) -> None:
    with lzma.open(_FOLDER / archive) as file, tarfile.open(fileobj=file) as members:
        members.extractall(folder, filter="data")


DOCUMENTS: Final = _documents("orbax.tar.xz")
"""The `expected.json` of each case."""

EARLIER: Final = _documents("earlier.tar.xz")
"""The `expected.json` of each version of Orbax before this one: a tree for each case."""


def unpack(folder: Path) -> None:
    """Put the corpus into `folder`: its cases below `corpus`, those of two processes below `corpus_mp`."""
    _unpack("orbax.tar.xz", folder)


def unpack_earlier(folder: Path) -> None:
    """Put what earlier versions wrote into `folder`, as `earlier/<version>/<case>`."""
    _unpack("earlier.tar.xz", folder)
