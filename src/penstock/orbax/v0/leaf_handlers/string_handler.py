"""Strings."""

from __future__ import annotations

__all__ = ("StringHandler",)

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from penstock.blocking.background import start_thread
from penstock.handlers.formats.orbax.file_names import STRINGS
from penstock.handlers.formats.orbax.leaf_documents import encode_strings
from penstock.handlers.leaves import string
from penstock.kernel.protocols.leaf import KeyKind
from penstock.kernel.protocols.leaf import ParamInfo as KernelInfo
from penstock.kernel.protocols.leaf_handlers import Waitable
from penstock.orbax.common.leaf_args import ParamInfo, RestoreArgs, SaveArgs, check_input_arguments
from penstock.orbax.common.value_metadata import StringMetadata
from penstock.orbax.v0.leaf_handlers.array_io import check_infos, resolve_paths
from penstock.orbax.v0.leaf_handlers.leaf_documents import read_values, write_values
from penstock.orbax.v0.leaf_handlers.type_handler import TypeHandler


class StringHandler(TypeHandler):
    """Stores a `str` in a JSON document that all strings of a tree share.

    Args:
        filename: Of the document; by default `_strings.json`.
    """

    def __init__(self, filename: str | None = None) -> None:
        self._filename = filename or STRINGS

    def typestr(self) -> str:
        """`string`."""
        return "string"

    @cached_property
    def leaf_handler(self) -> Any:
        """The pipeline handler that does the same; None if there is none."""
        return string.StringHandler(self.typestr()) if self._filename == STRINGS else None

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Describe each stored leaf by a `StringMetadata`. Reads nothing."""
        for info in infos:
            await info.await_path_creation()

        return [StringMetadata(name=info.name, directory=info.parent_dir) for info in infos]

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[Waitable]:
        """Begin to write strings.

        Raises:
            ValueError: If two would be stored in one place, or one cannot be stored under its name.
        """
        check_input_arguments(values, infos)
        check_infos(infos)
        _check_places(values, infos)
        return [start_thread(self._write, list(values), infos)]

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[Any]:
        """Read strings.

        Raises:
            ValueError: If one is not there.
        """
        check_input_arguments(infos)
        for info in infos:
            await info.await_path_creation()

        found = await read_values(self._filename, infos, [f"/{info.name}" for info in infos])
        return [str(value) for value in found]

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Return the length of each string in bytes."""
        sizes = [len(str(value).encode(errors="replace")) for value in values]
        return [(size, size) for size in sizes]

    def _write(self, values: Sequence[str], infos: Sequence[ParamInfo]) -> None:
        resolve_paths(infos)
        write_values(
            self._filename, [(i, f"/{i.name}", str(value)) for i, value in zip(infos, values, strict=True)]
        )


def _check_places(values: Sequence[Any], infos: Sequence[ParamInfo]) -> None:
    """Refuse a name that is a prefix of another: a slash nests in the document, so one would be lost."""
    handler = string.StringHandler()
    leaves: list[tuple[KernelInfo, str]] = []
    for info, value in zip(infos, values, strict=True):
        place = KernelInfo((info.name,), (KeyKind.MAPPING,), info.name)
        handler.describe(str(value), place)  # refuses what cannot be stored
        leaves.append((place, str(value)))

    encode_strings(leaves)
