"""What a handler of one leaf type is to Orbax's API, and what penstock's pipelines make of one."""

from __future__ import annotations

__all__ = ("TypeHandler",)

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from penstock.kernel.protocols.leaf_handlers import Waitable
from penstock.orbax.common.handler_traits import leaf_size
from penstock.orbax.common.leaf_args import ParamInfo, RestoreArgs, SaveArgs


class TypeHandler(ABC):
    """Writes and reads the leaves of one type. To be subclassed for a type of one's own.

    What is given to it comes in batches: one `ParamInfo` says of each leaf where it belongs. Files go
    into `info.parent_dir`, named after `info.name`.
    """

    @abstractmethod
    def typestr(self) -> str:
        """The name of the type as it is recorded; the handler is found by it again."""

    @abstractmethod
    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Say what is known of stored leaves without reading them: a `Metadata` for each."""

    @abstractmethod
    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[Waitable]:
        """Begin to write values; return once they are copied and may change.

        Returns:
            Futures that are over when everything is written. Their work goes on by itself.
        """

    @abstractmethod
    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[Any]:
        """Read values, in the order of `infos`."""

    def finalize(self, directory: Any) -> None:
        """Complete the files in `directory`: called once per save, when every future is over."""
        return

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Say for each value how many bytes of host memory it takes to write and to read it.

        By default the size that the value itself reports, or else that of the Python object.
        """
        return [(leaf_size(value), leaf_size(value)) for value in values]

    def stage_worker(self) -> Any:
        """Return what handles such leaves in a pipeline; penstock's registry asks for it."""
        from penstock.orbax.v0.leaf_handlers.stage_workers import StageWorkers

        return StageWorkers().of(self)
