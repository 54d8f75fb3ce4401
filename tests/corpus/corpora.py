"""The archives of tests/corpus: what Orbax of many versions and penstock 0.1 wrote, and what is in each."""

from __future__ import annotations

__all__ = (
    "DOCUMENTS",
    "EARLIER",
    "PENSTOCK_0_1",
    "unpack",
    "unpack_earlier",
    "unpacked_earlier",
    "unpacked_orbax",
    "unpacked_penstock_0_1",
)

import io
import json
import lzma
import tarfile
from pathlib import Path
from typing import Any, Final

import pytest
from tests.shared_folders import shared_folder

_FOLDER: Final = Path(__file__).parent


def _opened(archive: str) -> tarfile.TarFile:
    # In memory: to skip or go back in a file that lzma has open is to decompress all before it again.
    return tarfile.open(fileobj=io.BytesIO(lzma.decompress((_FOLDER / archive).read_bytes())))


def _documents(archive: str) -> dict[str, Any]:
    with _opened(archive) as members:
        found = {
            member.name: members.extractfile(member)
            for member in members
            if member.name.endswith("/expected.json")
        }
        return {name.split("/")[-2]: json.load(content) for name, content in found.items() if content}


def _unpack(archive: str, folder: Path) -> None:
    with _opened(archive) as members:
        members.extractall(folder, filter="data")


DOCUMENTS: Final = _documents("orbax.tar.xz")
"""The `expected.json` of each case."""

EARLIER: Final = _documents("earlier.tar.xz")
"""The `expected.json` of each version of Orbax before this one: a tree for each case."""

PENSTOCK_0_1: Final[dict[str, Any]] = _documents("penstock_0_1.tar.xz")["penstock_0_1"]
"""What each case of penstock 0.1 holds: what was saved, and what came back without a target."""


def unpack(folder: Path) -> None:
    """Put the corpus into `folder`: its cases below `corpus`, those of two processes below `corpus_mp`."""
    _unpack("orbax.tar.xz", folder)


def unpack_earlier(folder: Path) -> None:
    """Put what earlier versions wrote into `folder`, as `earlier/<version>/<case>`."""
    _unpack("earlier.tar.xz", folder)


def unpacked_orbax(factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what `unpack` puts there."""
    return shared_folder(factory, "orbax archive", unpack)


def unpacked_earlier(factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what `unpack_earlier` puts there."""
    return shared_folder(factory, "earlier archive", unpack_earlier)


def unpacked_penstock_0_1(factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what penstock 0.1 wrote, below `penstock_0_1`."""
    return shared_folder(
        factory, "penstock 0.1 archive", lambda folder: _unpack("penstock_0_1.tar.xz", folder)
    )
