"""The checkpoints of tests/corpus, as Orbax of many versions wrote them, and what is in each."""

from __future__ import annotations

__all__ = ("DOCUMENTS", "unpack")

import json
import lzma
import tarfile
from pathlib import Path
from typing import Any, Final

_ARCHIVE: Final = Path(__file__).parent / "corpus" / "orbax.tar.xz"


def _documents() -> dict[str, Any]:
    with lzma.open(_ARCHIVE) as file, tarfile.open(fileobj=file) as archive:
        names = [name for name in archive.getnames() if name.endswith("/expected.json")]
        return {name.split("/")[1]: json.loads(archive.extractfile(name).read()) for name in names}  # type: ignore[union-attr]  # they are files


DOCUMENTS: Final = _documents()
"""The `expected.json` of each case."""


def unpack(folder: Path) -> None:
    """Put the corpus into `folder`: its cases below `corpus`, those of two processes below `corpus_mp`."""
    with lzma.open(_ARCHIVE) as file, tarfile.open(fileobj=file) as archive:
        archive.extractall(folder, filter="data")
