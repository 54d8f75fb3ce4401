"""The contenders by name, in the order of the tables; known without importing any of them."""

from __future__ import annotations

COLD = (
    "penstock",
    "penstock, large heap",
    "penstock, warmed up",
    "penstock, warmed up, large heap",
)
"""Ways to come to the first call of a process."""

LABELS = (
    *COLD,
    "penstock, first save",
    "penstock, one-shot",
    "penstock, unverified",
    "penstock, copied",
    "penstock.orbax",
    "penstock.orbax async",
    "penstock.orbax manager",
    "Orbax",
    "Orbax async",
    "Orbax manager",
    "Orbax uncompressed",
    "safetensors",
    "numpy",
    "jax alone",
    "raw buffered",
    "raw O_DIRECT",
    "raw O_DIRECT, crc32c",
    "raw scandir",
    "nothing saved",
)
