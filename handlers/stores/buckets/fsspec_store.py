"""Any fsspec file system as a store of checkpoints."""

from __future__ import annotations

__all__ = ("fsspec_store",)

from typing import Any

from penstock.handlers.stores.buckets.bucket_store import FILE_BYTES, BucketStore
from penstock.handlers.stores.buckets.fsspec_objects import FsspecObjects
from penstock.kernel.errors import SpecError


def fsspec_store(fs: Any, root: str = "", *, file_bytes: int = FILE_BYTES) -> BucketStore:
    """Return a store over an fsspec file system, for `Checkpointer(store=...)`.

    It works as a bucket does: a checkpoint is there once its mark is, which is written last. fsspec has no
    conditional requests, so the caller says by using it that one process at a time saves to a path; reports
    repeat it as `single_writer`. What a file system calls written counts as durable.

    Args:
        fs: A file system, as `fsspec.filesystem("memory")` returns.
        root: Where the path `/` of the store lies in it, as in `"bucket/runs"`.
        file_bytes: The length of a data file, which is held in memory until it is written.

    Raises:
        SpecError: If `fs` is no fsspec file system.
    """
    if not all(hasattr(fs, name) for name in ("pipe_file", "cat_file", "info", "ls", "find", "rm_file")):
        raise SpecError(f"{fs!r} is no fsspec file system, as fsspec.filesystem('memory') returns one")

    objects = FsspecObjects(fs, root)
    return BucketStore("", _no_connection, file_bytes=file_bytes, single_writer=True, objects=objects)


def _no_connection(_: object) -> Any:
    raise AssertionError("the file system makes the requests")
