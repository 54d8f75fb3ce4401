"""Leaves on their way through handlers that are called directly, of either library."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.metadata import array_metadata_store

from penstock.orbax import type_handlers as ours
from penstock.orbax.type_handlers import Store

theirs: Final[Any] = ocp.type_handlers
LIBRARIES: Final[dict[str, Any]] = {"penstock": ours, "orbax": theirs}
STORES: Final[dict[str, Any]] = {"penstock": Store, "orbax": array_metadata_store.Store}


def on(array: Any, shape: tuple[int, ...], *axes: Any) -> Any:
    """Spread an array over a mesh of all devices."""
    devices: Any = np.array(jax.devices()).reshape(shape)
    mesh = Mesh(devices, ("x", "y")[: len(shape)])
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))  # type: ignore[no-untyped-call]  # jax's


def array_leaves() -> dict[str, Any]:
    square = np.arange(96, dtype=np.float32).reshape(8, 12)
    return {
        "both": on(square, (2, 4), "x", "y"),
        "rows": on(square, (2, 4), "x"),
        "replicated": on(jnp.asarray(square, jnp.bfloat16), (2, 4)),
        "one.device": jnp.arange(5),
        "scalar": jnp.float32(3),
        "int4": jnp.arange(7, dtype=jnp.int4),
        "key": jax.random.key(1),
        "keys/rbg": jax.random.split(jax.random.key(2, impl="rbg"), 3),
    }


def numpy_leaves() -> dict[str, Any]:
    return {
        "host": np.arange(12.0).reshape(3, 4)[:, ::-1],
        "host/0d": np.array(2.5, np.float16),
        "big": np.arange(6, dtype=">i4"),
    }


def handlers(library: str) -> list[tuple[Any, dict[str, Any]]]:
    """The handlers of a library, each with values for it."""
    module = LIBRARIES[library]
    return [
        (module.ArrayHandler(array_metadata_store=STORES[library]()), array_leaves()),
        (module.NumpyHandler(), numpy_leaves()),
        (module.ScalarHandler(), {"int": 3, "float": 2.5, "bool": True, "np": np.float32(1.5)}),
        (module.StringHandler(), {"string": "hé", "s/t": "x"}),
    ]


def infos(
    library: str, directory: Path, names: Sequence[str], context: Any = None, **fields: Any
) -> list[Any]:
    module = LIBRARIES[library]
    context = module.get_ts_context() if context is None else context
    return [
        module.ParamInfo(name=name, parent_dir=epath.Path(directory), ts_context=context, **fields)
        for name in names
    ]


async def write(library: str, directory: Path, *, database: bool, zarr3: bool = False, **fields: Any) -> None:
    """Write leaves of every kind with the handlers themselves."""
    module = LIBRARIES[library]
    context = module.get_ts_context()
    fields |= {"is_ocdbt_checkpoint": database, "use_zarr3": zarr3}
    futures: list[Any] = []
    for handler, values in handlers(library):
        leaves = infos(library, directory, list(values), context, **fields)
        futures += await handler.serialize(list(values.values()), leaves, [module.SaveArgs()] * len(leaves))

    for future in futures:
        await asyncio.to_thread(future.result)
    for handler, _ in handlers(library):
        handler.finalize(epath.Path(directory))
    if database:
        await module.merge_ocdbt_per_process_files(epath.Path(directory), context, zarr3)


async def read(
    library: str, directory: Path, *, database: bool, zarr3: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read them again; return values and metadata by name."""
    module = LIBRARIES[library]
    context = module.get_ts_context()
    values: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    for handler, saved in handlers(library):
        leaves = infos(
            library, directory, list(saved), context, is_ocdbt_checkpoint=database, use_zarr3=zarr3
        )
        args = [
            module.ArrayRestoreArgs(sharding=value.sharding)
            if isinstance(value, jax.Array) and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
            else module.RestoreArgs()
            for value in saved.values()
        ]
        values |= zip(saved, await handler.deserialize(leaves, args), strict=True)
        metadata |= zip(saved, await handler.metadata(leaves), strict=True)

    return values, metadata


def files(directory: Path) -> dict[str, bytes]:
    """All files but data files, whose names are random; JSON documents and array metadata by content."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if _is_document(path) else b""
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.parent.name != "d"
    }


def _is_document(path: Path) -> bool:
    return path.suffix == ".json" or path.name in {".zarray", "_sharding", "process_0"}
