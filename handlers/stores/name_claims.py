"""Claims on names, where the file system has no locks: a hidden file beside what is claimed."""

from __future__ import annotations

__all__ = ("check_name_is_free", "claim_name")

import errno
import os
from typing import Final, final

from penstock.handlers.stores.descriptor import translated
from penstock.handlers.stores.regular_files import read_whole
from penstock.handlers.stores.whole_files import create_whole
from penstock.kernel.errors import StorageError
from penstock.kernel.storage.claims import Claim, check_unclaimed

_SUFFIX: Final = ".penstock-claim"


def claim_name(path: str) -> Claim:
    """Claim what lies at a path, by the file `.<name>.penstock-claim` beside it; see `Claim`.

    Raises:
        InUseError: If somebody else claims it.
        StorageError: If the file cannot be created.
    """
    return Claim(_LocalFiles(), _claim_file(path), path)


def check_name_is_free(path: str) -> None:
    """Return if nobody claims `path`; see `check_unclaimed`.

    Raises:
        InUseError: If somebody does.
        StorageError: If the medium refuses.
    """
    check_unclaimed(_LocalFiles(), _claim_file(path), path)


def _claim_file(path: str) -> str:
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f".{name}{_SUFFIX}")


@final
class _LocalFiles:
    def create(self, file: str, data: bytes) -> bool:
        try:
            return create_whole(file, data)
        except StorageError as error:
            if error.errno == errno.EEXIST:
                return False

            raise

    def read(self, file: str) -> bytes | None:
        try:
            with translated("read", file):
                return read_whole(file)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None

            raise

    def remove(self, file: str) -> None:
        with translated("remove", file):
            os.unlink(file)
