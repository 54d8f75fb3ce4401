"""Object stores: objects under keys, and checkpoints that a mark publishes."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "MARK",
    "AzOptions",
    "BucketOptions",
    "BucketStore",
    "Builds",
    "GsOptions",
    "ObjectClient",
    "S3Options",
    "connect",
)

if TYPE_CHECKING:
    from penstock.handlers.stores.buckets.bucket_builds import MARK, Builds
    from penstock.handlers.stores.buckets.bucket_options import AzOptions, BucketOptions, GsOptions, S3Options
    from penstock.handlers.stores.buckets.bucket_store import BucketStore
    from penstock.handlers.stores.buckets.connections import connect
    from penstock.handlers.stores.buckets.object_client import ObjectClient
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.handlers.stores.buckets.bucket_builds": (
                "Builds",
                "MARK",
            ),
            "penstock.handlers.stores.buckets.bucket_options": (
                "AzOptions",
                "BucketOptions",
                "GsOptions",
                "S3Options",
            ),
            "penstock.handlers.stores.buckets.bucket_store": ("BucketStore",),
            "penstock.handlers.stores.buckets.connections": ("connect",),
            "penstock.handlers.stores.buckets.object_client": ("ObjectClient",),
        },
    )
