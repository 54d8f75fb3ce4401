"""The contenders by name, in the order of the tables; known without importing any of them."""

from __future__ import annotations

LABELS = (
    "penstock",
    "penstock, first save",
    "penstock, unverified",
    "Orbax",
    "Orbax async",
    "Orbax uncompressed",
    "safetensors",
    "numpy",
    "jax alone",
    "raw buffered",
    "raw O_DIRECT",
    "raw scandir",
)
