"""Where a restored jax.Array is to lie, and making it from host memory."""

from __future__ import annotations

__all__ = ("DEFAULT_DEVICE", "Placement", "on_default_device", "split")

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias, cast, final

import jax
import numpy.typing as npt
from jax.sharding import Sharding, SingleDeviceSharding

from penstock.handlers.leaves.regions import HostRegion
from penstock.handlers.leaves.shards import on_host
from penstock.kernel.messages import ReadLeaf

Bounds: TypeAlias = tuple[tuple[int, int], ...]
DEFAULT_DEVICE: Final = None  #: in place of a sharding: jax's default device, uncommitted


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """How the value of one leaf is made from its regions; `Target.detail` of the array handler."""

    sharding: Sharding | None = DEFAULT_DEVICE  #: of the array, for keys of the key data
    as_numpy: bool = False  #: jax cannot hold it here as it was saved, so numpy does
    key_impl: str | None = None  #: wrap the data as typed PRNG keys
    wide: bool = False  #: of a 64-bit type while jax_enable_x64 is off

    @property
    def keeps_regions(self) -> bool:
        """Whether the value goes on living in the regions' memory."""
        return self.as_numpy or (on_default_device() if self.sharding is None else on_host(self.sharding))


@final
@dataclass(frozen=True, slots=True)
class _Split:
    """Which distinct parts of an array the devices of this process hold."""

    bounds: tuple[Bounds, ...]
    devices: tuple[tuple[jax.Device, int], ...]  #: with the number of the part each one holds


@lru_cache(maxsize=4096)
def split(sharding: Sharding | None, shape: tuple[int, ...]) -> _Split:
    """Find the distinct parts of an array of `shape`.

    Raises:
        ValueError: If the sharding does not divide the shape.
        IndexError: If it has more axes than the shape.
    """
    whole = tuple((0, size) for size in shape)
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return _Split((whole,), ())

    parts: dict[Bounds, int] = {}
    devices: list[tuple[jax.Device, int]] = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        slices = cast("tuple[slice, ...]", index)
        bounds = tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))
        devices.append((device, parts.setdefault(bounds, len(parts))))

    return _Split(tuple(parts), tuple(devices))


def on_default_device() -> bool:
    """Whether jax's default device is a CPU."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.local_devices()[0].platform == "cpu"

    return (device if isinstance(device, str) else device.platform) == "cpu"


def make_arrays(leaves: Sequence[ReadLeaf]) -> list[object]:
    """Make the value of every leaf, with one transfer call for all that are placed alike. Blocking.

    On CPU devices the arrays live in the regions' memory. From other devices it returns once the
    transfers are done, so that the regions may die.
    """
    plans = [cast("Placement", leaf.target.detail) for leaf in leaves]
    hosts = [
        [cast("HostRegion", region).array() for region in leaf.target.regions] for leaf in leaves
    ]
    # Narrowing is decided by a setting of the thread; whoever asked for 64 bits by name gets them.
    with jax.enable_x64(True) if any(plan.wide for plan in plans) else nullcontext():
        parts = _put(leaves, plans, hosts)
        values = [
            _assemble(leaf, plan, host, parts) for leaf, plan, host in zip(leaves, plans, hosts, strict=True)
        ]

    if any(leaf.target.staging_bytes for leaf in leaves):
        jax.block_until_ready(values)

    return values
