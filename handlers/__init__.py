"""Leaf handlers, item types, on-disk layouts and the local store.

Importing this package is cheap: each name is fetched from its own module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "Array",
    "ArrayHandler",
    "AutoLayout",
    "Composite",
    "EmptyHandler",
    "Json",
    "LocalStore",
    "NumpyHandler",
    "NumpyRandomKey",
    "OrbaxLayout",
    "Proto",
    "PyTree",
    "RandomKey",
    "SafetensorsLayout",
    "ScalarHandler",
    "StringHandler",
    "default_handlers",
    "encode_with_tensorstore",
    "fsspec_store",
)

if TYPE_CHECKING:
    from penstock.handlers.formats.codecs.tensorstore_codecs import encode_with_tensorstore
    from penstock.handlers.formats.orbax.orbax_layout import OrbaxLayout
    from penstock.handlers.formats.safetensors.safetensors_layout import SafetensorsLayout
    from penstock.handlers.layouts.auto_layout import AutoLayout
    from penstock.handlers.layouts.item_types import (
        Array,
        Composite,
        Json,
        NumpyRandomKey,
        Proto,
        PyTree,
        RandomKey,
    )
    from penstock.handlers.leaves.array import ArrayHandler
    from penstock.handlers.leaves.default_handlers import default_handlers
    from penstock.handlers.leaves.empty import EmptyHandler
    from penstock.handlers.leaves.numpy_array import NumpyHandler
    from penstock.handlers.leaves.scalar import ScalarHandler, StringHandler
    from penstock.handlers.stores.buckets.fsspec_store import fsspec_store
    from penstock.handlers.stores.local import LocalStore
else:
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.handlers.formats.codecs.tensorstore_codecs": ("encode_with_tensorstore",),
            "penstock.handlers.layouts.auto_layout": ("AutoLayout",),
            "penstock.handlers.layouts.item_types": (
                "Array",
                "Composite",
                "Json",
                "NumpyRandomKey",
                "Proto",
                "PyTree",
                "RandomKey",
            ),
            "penstock.handlers.formats.orbax.orbax_layout": ("OrbaxLayout",),
            "penstock.handlers.formats.safetensors.safetensors_layout": ("SafetensorsLayout",),
            "penstock.handlers.leaves.array": ("ArrayHandler",),
            "penstock.handlers.leaves.default_handlers": ("default_handlers",),
            "penstock.handlers.leaves.empty": ("EmptyHandler",),
            "penstock.handlers.leaves.numpy_array": ("NumpyHandler",),
            "penstock.handlers.leaves.scalar": ("ScalarHandler", "StringHandler"),
            "penstock.handlers.stores.buckets.fsspec_store": ("fsspec_store",),
            "penstock.handlers.stores.local": ("LocalStore",),
        },
    )
