"""The interface of type handlers, and how they run in penstock's pipelines."""

from __future__ import annotations

__all__ = ("TypeHandler",)

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from penstock.kernel.protocols.leaf_handlers import Waitable
from penstock.orbax.common.byte_limiters import leaf_size
from penstock.orbax.common.leaf_args import ParamInfo, RestoreArgs, SaveArgs


class TypeHandler(ABC):
    """Writes and reads the leaves of one type. Subclass it for a type of your own.

    Leaves come in batches, each leaf with a `ParamInfo` that says where it is stored. Files go
    into `info.parent_dir`, named after `info.name`.
    """

    @abstractmethod
    def typestr(self) -> str:
        """The recorded name of the type, by which a restore finds the handler."""

    @abstractmethod
    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Describe stored leaves without reading them: a `Metadata` for each."""

    @abstractmethod
    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[Waitable]:
        """Begin to write values; return once they are copied and may change.

        Returns:
            Futures that are done once everything is written. Their work is already running.
        """

    @abstractmethod
    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[Any]:
        """Read values, in the order of `infos`."""

    def finalize(self, directory: Any) -> None:
        """Complete the files in `directory`: called once per save, when every future is done."""
        return

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Return for each value the bytes of host memory that writing and reading it take.

        By default the size that the value itself reports, or else that of the Python object.
        """
        return [(leaf_size(value), leaf_size(value)) for value in values]

    def stage_worker(self) -> Any:
        """Return the pipeline handler of such leaves; called by penstock's registry."""
        from penstock.orbax.v0.leaf_handlers.stage_workers import StageWorkers

        return StageWorkers().of(self)
