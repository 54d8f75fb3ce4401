"""`commit_success.txt`: that a checkpoint is complete, and the digest of its `_PENSTOCK_INTEGRITY`.

Its text is free, and Orbax looks only at whether the file is there. The digest makes it noticed if the record
of all other digests is lost or damaged.
"""

from __future__ import annotations

__all__ = ("decode", "encode", "without_digest")

import re
from typing import Final

from penstock.handlers.formats.common.integrity import Digest, digest_of
from penstock.handlers.formats.orbax.documents.file_names import COMMIT_MARK_TEXT, INTEGRITY

_LINE: Final = re.compile(
    rf"^{INTEGRITY}: (\d{{1,18}}) bytes, crc32c ([0-9a-f]{{8}})$".encode(), re.MULTILINE
)


def encode(integrity: bytes | None = None, text: bytes = COMMIT_MARK_TEXT) -> bytes:
    """Encode the mark of a directory.

    Args:
        integrity: The content of its `_PENSTOCK_INTEGRITY`, if it has one.
        text: What the mark says beside the digest; an earlier digest in it is replaced.
    """
    if integrity is None:
        return text

    digest = digest_of(integrity)
    line = f"{INTEGRITY}: {digest.nbytes} bytes, crc32c {digest.crc32c:08x}".encode()
    return without_digest(text) + line + b"\n"


def without_digest(text: bytes) -> bytes:
    """Return what a mark says beside the digest: then the record of the directory is taken as it is."""
    return _LINE.sub(b"", text).rstrip() + b"\n"


def decode(data: bytes) -> Digest | None:
    """Return the digest in a mark; None if there is none, as in those of Orbax and of penstock 0.1."""
    found = _LINE.search(data)
    return None if found is None else Digest(int(found[1]), int(found[2], 16))
