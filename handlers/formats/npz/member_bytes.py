"""Brings a member that does not lie in its archive as in memory to where it goes. Blocking."""

from __future__ import annotations

__all__ = ("fill_region",)

import zlib

import numpy as np

from penstock.handlers.formats.npz.archive_members import Member, check_crc32
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols.reads import Destination


def fill_region(path: str, member: Member, region: Destination, stored: memoryview) -> None:
    """Fill a region from all stored bytes of a member, which are compared with their checksum.

    Args:
        path: Of the archive, for errors.
        member: What it is.
        region: Where a part of it goes, or all.
        stored: The member's bytes, as they lie in the archive.

    Raises:
        ChecksumError: If they differ from what was written.
        CorruptCheckpointError: If they cannot be inflated.
    """
    data = _inflated(path, member, stored) if member.is_deflated else stored
    check_crc32(path, member, zlib.crc32(data))
    flat = np.frombuffer(data, member.dtype, offset=member.head_nbytes)
    array = flat.reshape(member.shape, order="F" if member.in_fortran_order else "C")
    part = array[tuple([slice(start, stop) for start, stop in region.bounds])]
    filled = np.frombuffer(region.view(), member.dtype.newbyteorder("=")).reshape(part.shape)
    filled[...] = part


def _inflated(path: str, member: Member, stored: memoryview) -> bytes:
    inflating = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = inflating.decompress(stored, member.nbytes + 1)
    except zlib.error as error:
        raise CorruptCheckpointError(
            path, f"cannot be inflated: {error}", key_path=member.key_path
        ) from error

    if len(data) != member.nbytes:
        problem = f"is inflated to another length than {member.nbytes} bytes"
        raise CorruptCheckpointError(path, problem, key_path=member.key_path)

    return data
