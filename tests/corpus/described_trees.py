"""Trees as JSON documents: every leaf with its type, dtype, sharding and bits.

`describe` is used by the program that wrote `penstock_0_1.tar.xz`, `rebuild` by the test that restores it.
"""

from __future__ import annotations

__all__ = ("Vocabulary", "VocabularyHandler", "describe", "rebuild")

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

NAMED_TUPLES: dict[str, Any] = {
    "ScaleByAdamState": optax.ScaleByAdamState,
    "EmptyState": optax.EmptyState,
}


@dataclass
class Vocabulary:
    """A leaf type that penstock does not know; `VocabularyHandler` stores it."""

    words: list[str] = field(default_factory=list[str])


class VocabularyHandler:
    """The batch protocol at its shortest: one JSON file for each leaf."""

    def typestr(self) -> str:
        return "corpus.Vocabulary"

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Future[None]]:
        for value, info in zip(values, infos, strict=True):
            self._file(info).write_text(json.dumps(value.words))

        return []

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Vocabulary]:
        return [Vocabulary(json.loads(self._file(info).read_text())) for info in infos]

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        return [None for _ in infos]

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        return [(100, 100) for _ in values]

    def finalize(self, directory: str) -> None:
        """Nothing is left to do."""

    @staticmethod
    def _file(info: Any) -> Path:
        return Path(info.directory, f"{info.name}.words.json")


def describe(node: Any) -> Any:
    """Return a JSON value from which `rebuild` makes `node` again, bit for bit."""
    if isinstance(node, dict):
        return {"dict": [[describe(key), describe(value)] for key, value in node.items()]}
    if isinstance(node, list):
        return {"list": [describe(value) for value in node]}
    if isinstance(node, tuple):
        name = type(node).__name__ if hasattr(node, "_fields") else None
        assert name is None or name in NAMED_TUPLES, f"list {name} in NAMED_TUPLES"
        return {"tuple": [describe(value) for value in node], "name": name}
    if isinstance(node, jax.Array):
        return _describe_jax(node)
    if isinstance(node, np.ndarray | np.generic):
        return {"scalar" if isinstance(node, np.generic) else "numpy": _bits(np.asarray(node))}
    if isinstance(node, Vocabulary):
        return {"vocabulary": node.words}
    if isinstance(node, complex):
        return {"complex": [node.real.hex(), node.imag.hex()]}
    if isinstance(node, float):
        return {"float": node.hex()}  # JSON has no NaN

    assert node is None or isinstance(node, bool | int | str), f"{node!r} has no description"
    return node


def rebuild(described: Any) -> Any:
    """Make what `describe` was given. Shardings are made of this process's devices."""
    if not isinstance(described, dict):
        return described
    (kind, value), *more = described.items()
    match kind:
        case "dict":
            return {rebuild(key): rebuild(item) for key, item in value}
        case "list":
            return [rebuild(item) for item in value]
        case "tuple":
            items = [rebuild(item) for item in value]
            name = more[0][1]
            return tuple(items) if name is None else NAMED_TUPLES[name](*items)
        case "jax":
            return _rebuild_jax(**value)
        case "numpy":
            return _array(value)
        case "scalar":
            return _array(value)[()]
        case "vocabulary":
            return Vocabulary(value)
        case "complex":
            return complex(*map(float.fromhex, value))
        case "float":
            return float.fromhex(value)
        case _:
            raise ValueError(kind)


def _bits(array: np.ndarray[Any, Any]) -> list[Any]:
    return [array.dtype.name, list(array.shape), b64encode(array.tobytes()).decode()]


def _array(bits: list[Any]) -> np.ndarray[Any, Any]:
    name, shape, data = bits
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    return np.frombuffer(b64decode(data), dtype).reshape(shape).copy()


def _describe_jax(array: jax.Array) -> Any:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    host = np.asarray(jax.random.key_data(array) if is_key else array)
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        assert isinstance(sharding.mesh, Mesh)
        devices: Any = sharding.mesh.devices
        ids = [device.id for device in devices.flat]
        mesh = [ids, list(devices.shape), list(sharding.mesh.axis_names)]
        placed: Any = {"mesh": mesh, "spec": list(sharding.spec)}
    else:
        assert isinstance(sharding, SingleDeviceSharding)
        (device,) = array.devices()
        placed = {"device": device.id if array.committed else None}

    return {
        "jax": {
            "bits": _bits(host),
            "key": str(jax.random.key_impl(array)) if is_key else None,
            "sharding": placed,
        }
    }


def _rebuild_jax(bits: list[Any], key: str | None, sharding: Any) -> jax.Array:
    host = _array(bits)
    array = jnp.asarray(host) if key is None else jax.random.wrap_key_data(jnp.asarray(host), impl=key)
    if "mesh" in sharding:
        ids, shape, names = sharding["mesh"]
        devices = np.array([jax.devices()[at] for at in ids]).reshape(shape)
        axes = [tuple(axis) if isinstance(axis, list) else axis for axis in sharding["spec"]]
        spec = PartitionSpec(*axes)  # type: ignore[no-untyped-call]  # jax's
        placed: jax.Array = jax.device_put(array, NamedSharding(Mesh(devices, names), spec))
        return placed

    return array if sharding["device"] is None else jax.device_put(array, jax.devices()[sharding["device"]])
