"""NumPy arrays and numbers."""

from __future__ import annotations

__all__ = ("NumpyHandler", "ScalarHandler")

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.blocking.background import start_thread
from penstock.handlers.coordinators.jax_processes import processes_of_jax
from penstock.handlers.leaves import numpy_array, scalar
from penstock.kernel.protocols.leaf_handlers import Waitable
from penstock.orbax.common.background_work import all_results, in_thread, reserved
from penstock.orbax.common.leaf_args import ParamInfo, RestoreArgs, SaveArgs, check_input_arguments
from penstock.orbax.common.value_metadata import ScalarMetadata
from penstock.orbax.v0.leaf_handlers.array_io import (
    Written,
    check_infos,
    open_arrays,
    opened_metadata,
    resolve_paths,
    write_arrays,
)
from penstock.orbax.v0.leaf_handlers.tensorstore_specs import get_json_tspec_write
from penstock.orbax.v0.leaf_handlers.type_handler import TypeHandler


class NumpyHandler(TypeHandler):
    """Stores an `np.ndarray` whole.

    Args:
        metadata_key: The name of an array's metadata file; by default that of its format.
        ocdbt_process_id: The process whose directory in the database gets the arrays; by default this one.
            Has no effect in a tree.
        deepcopy_host_arrays: Whether arrays are copied, so that they may change during the save.
            Has no effect in a tree: there they are.
    """

    def __init__(
        self,
        metadata_key: str | None = None,
        ocdbt_process_id: str | None = None,
        deepcopy_host_arrays: bool = True,
    ) -> None:
        self._metadata_key = metadata_key
        self._process_id = ocdbt_process_id
        self._copies = deepcopy_host_arrays

    def typestr(self) -> str:
        """`np.ndarray`."""
        return "np.ndarray"

    @cached_property
    def leaf_handler(self) -> Any:
        """The pipeline handler that does the same; None if there is none."""
        return None if self._metadata_key else numpy_array.NumpyHandler(self.typestr())

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Describe each stored leaf by an `ArrayMetadata`."""
        opened = await open_arrays(infos, None, self._metadata_key)
        return [opened_metadata(store, info) for store, info in zip(opened, infos, strict=True)]

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[Waitable]:
        """Copy arrays, and begin to write them.

        Raises:
            ValueError: If an array has no elements, or two leaves have one name.
        """
        args = args or [SaveArgs()] * len(values)
        check_input_arguments(values, infos, args)
        check_infos(infos)
        refuse_empty(values, infos)
        copies = await in_thread(_copied, values) if self._copies else list(values)
        return [start_thread(self._write, copies, infos, args)]

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[Any]:
        """Read arrays, cast to the requested dtypes.

        Raises:
            FileNotFoundError: If one with its own directory is missing.
            ValueError: If one in a database is missing.
        """
        args = args or [RestoreArgs()] * len(infos)
        check_input_arguments(infos, args)
        opened = await open_arrays(infos, args, self._metadata_key)
        if all(info.byte_limiter is None for info in infos):
            return await all_results([store.read() for store in opened], infos)

        arrays: list[Any] = []
        for store, info in zip(opened, infos, strict=True):
            async with reserved(info.byte_limiter, store.size * store.dtype.numpy_dtype.itemsize):
                arrays += await all_results([store.read()], [info])

        return arrays

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Return for each value its bytes, to write and to read."""
        sizes = [np.asarray(value).nbytes for value in values]
        return [(size, size) for size in sizes]

    def _write(
        self, arrays: Sequence[npt.NDArray[Any]], infos: Sequence[ParamInfo], args: Sequence[SaveArgs]
    ) -> None:
        resolve_paths(infos)
        database = bool(infos[0].is_ocdbt_checkpoint)
        writes = [
            Written(
                info,
                get_json_tspec_write(
                    info,
                    database,
                    array.shape,
                    array.shape,
                    array.dtype,
                    (self._process_id or processes_of_jax()[0]) if database else None,
                    self._metadata_key,
                    arg,
                ),
                [((...,), array)],
            )
            for array, info, arg in zip(arrays, infos, args, strict=True)
        ]
        write_arrays(writes, database=database)


class ScalarHandler(NumpyHandler):
    """Stores a number as an array without axes; it is restored as a Python number.

    Args:
        metadata_key: See `NumpyHandler`.
        ocdbt_process_id: Has no effect in a tree, see `NumpyHandler`.
    """

    def __init__(self, metadata_key: str | None = None, ocdbt_process_id: str | None = None) -> None:
        super().__init__(metadata_key, ocdbt_process_id, deepcopy_host_arrays=False)

    def typestr(self) -> str:
        """`scalar`."""
        return "scalar"

    @cached_property
    def leaf_handler(self) -> Any:
        """The pipeline handler that does the same; None if there is none."""
        return None if self._metadata_key else scalar.ScalarHandler(self.typestr())

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Describe each stored leaf by a `ScalarMetadata`."""
        found = await super().metadata(infos)
        return [ScalarMetadata(name=one.name, directory=one.directory, dtype=one.dtype) for one in found]

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[Waitable]:
        """Begin to write numbers."""
        return await super().serialize([np.asarray(value) for value in values], infos, args)

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[Any]:
        """Read numbers, each converted to its `restore_type`.

        Raises:
            ValueError: If the stored value is not a number.
        """
        numbers: list[Any] = []
        for info, array in zip(infos, await super().deserialize(infos, args), strict=True):
            if array.ndim:
                raise ValueError(f"the leaf {info.name!r} is not a number: its shape is {array.shape}")
            numbers.append(array.item())

        kinds = [arg.restore_type for arg in args] if args else [None] * len(numbers)
        return [kind(number) if kind else number for kind, number in zip(kinds, numbers, strict=True)]


def refuse_empty(values: Sequence[Any], infos: Sequence[ParamInfo]) -> None:
    """Raise `ValueError` if an array has no elements, which Orbax can neither write nor read."""
    for value, info in zip(values, infos, strict=True):
        if value.size == 0:
            raise ValueError(f"an array without elements cannot be saved: {info.name!r} is {value.shape}")


def _copied(values: Sequence[Any]) -> list[npt.NDArray[Any]]:
    return [np.array(value, order="K") for value in values]
