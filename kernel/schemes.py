"""The schemes of URLs: `s3`, `gs`, `az`, and those of other distributions.

What is at `s3://bucket/run` is in a store that is opened for `s3://bucket`. A scheme is a value, and one
file: other distributions add theirs through the entry-point group `penstock.stores`, in which the name of an
entry point is the scheme.
"""

from __future__ import annotations

__all__ = ("SCHEMES", "SHORTEST_LEASE_S", "Scheme")

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

from penstock.kernel.errors import ConfigError
from penstock.kernel.registry import PluginKind

SHORTEST_LEASE_S: Final = 60.0
"""No `ObjectStore` of another distribution's scheme has a shorter lease. Renewals are as frequent."""


@final
@dataclass(frozen=True, slots=True)
class Scheme:
    """Opens the stores of one scheme of URLs: what an entry point of `penstock.stores` refers to."""

    open: Callable[[str, Any], Any]  # a Store, by name only: protocols import this room
    """Returns the `Store` of a root, `scheme://name`, given the options of the scheme. Connects to nothing.

    The store gets whole URLs as paths. It is made once for each root and Checkpointer. The options of other
    distributions are the `Scheme` itself. Leases of an `ObjectStore` last `SHORTEST_LEASE_S` at least.
    """
    file_bytes: int = 16 * 2**20  #: of a data file, which the writer fills before it begins another
    concurrency: int = 8  #: so many threads write at once, and so many read


def _as_scheme(value: object) -> Scheme:
    if not isinstance(value, Scheme):
        raise ConfigError("store", f"{value!r} is no penstock.kernel.Scheme")

    return value


_BUCKET: Final = "penstock.handlers.stores.buckets.bucket_store:BUCKET"

# Declared as other distributions declare theirs, so that the kernel imports no store.
SCHEMES: Final = PluginKind(
    "scheme",
    "penstock.stores",
    partial(ConfigError, "store"),
    _as_scheme,
    own=dict.fromkeys(("s3", "gs", "az"), _BUCKET),
)
"""The schemes that there are, by name."""
