"""Tests of what every handler must do. Public as `penstock.testing.HandlerConformance`."""

from __future__ import annotations

__all__ = ("HandlerConformance",)

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import anyio

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.handlers.leaves.default_handlers import default_handlers
from penstock.kernel.messages.save import Leaf
from penstock.kernel.protocols.leaf import KeyKind, LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import LeafHandler, TypeHandler
from penstock.testing.operation_faults import Trial, backends, demand


class HandlerConformance(ABC):
    """Tests of a `TypeHandler` or a `LeafHandler`. Subclass it as `TestMyHandler`.

    The values are saved and restored by whole pipelines, on every event loop that is installed. Where
    values cannot be compared by `==`, override `same`; where they can change, override `change`.

    Attributes:
        memory_limit: Of the Checkpointer, in bytes. If values can be split, choose it below the size of the
            largest.
    """

    memory_limit: int = 1 << 20

    @abstractmethod
    def make_handler(self) -> TypeHandler | LeafHandler:
        """Return a new handler."""

    @abstractmethod
    def values(self) -> Sequence[Any]:
        """Return fresh but equal leaves on each call, all of the registered type."""

    def leaf_type(self) -> type[Any]:
        """Return the type to register the handler for: by default that of the first value."""
        first: Any = self.values()[0]
        return first.__class__  # type: ignore[no-any-return]  # of anything, a type

    def same(self, found: Any, expected: Any) -> bool:
        """Return whether a value was restored as it was saved."""
        return bool(found == expected)

    def change(self, value: Any) -> None:  # noqa: B027  # to be overridden where there is something to change
        """Change a value in place, as a training loop would once the save is staged; by default nothing."""

    def test_values_are_restored_as_they_were_saved(self, tmp_path: Path) -> None:
        trial = self._trial(tmp_path)
        trial.run(trial.there_and_back)

    def test_values_are_restored_onto_a_target(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with Checkpointer(**self._options()) as checkpointer:
                tree = dict(enumerate(self.values()))
                await (await checkpointer.save(tmp_path / "a", tree, overwrite=True))
                found = await checkpointer.restore(tmp_path / "a", like=tree)
                demand(self._all_same(list(found.values()), self.values()), f"restored is {found!r}")
                demand(checkpointer.statistics().leased == 0, "bytes of the budget were not given back")

        self._trial(tmp_path).run(work)

    def test_values_may_change_once_they_are_staged(self, tmp_path: Path) -> None:
        async def work() -> None:
            values = self.values()
            async with Checkpointer(**self._options()) as checkpointer:
                save = await checkpointer.save(tmp_path / "a", list(values), overwrite=True)
                for value in values:
                    self.change(value)

                await save
                found = await checkpointer.restore(tmp_path / "a")
                demand(
                    self._all_same(found, self.values()),
                    "a value must not be stored after its change",
                )

        self._trial(tmp_path).run(work)

    def test_many_values_at_once(self, tmp_path: Path) -> None:
        values = [value for _ in range(50) for value in self.values()]

        async def work() -> None:
            async with Checkpointer(**self._options()) as checkpointer:
                await (await checkpointer.save(tmp_path / "a", values, overwrite=True))
                found = await checkpointer.restore(tmp_path / "a")
                demand(self._all_same(found, values), "values were mixed up")

        self._trial(tmp_path).run(work)

    def test_two_saves_at_once_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with Checkpointer(**self._options()) as checkpointer:

                async def there_and_back(name: str) -> None:
                    path = tmp_path / name
                    await (await checkpointer.save(path, list(self.values()), overwrite=True))
                    found = await checkpointer.restore(path)
                    demand(self._all_same(found, self.values()), "values were mixed up")

                async with anyio.create_task_group() as tasks:
                    for name in "abc":
                        tasks.start_soon(there_and_back, name)

        self._trial(tmp_path).run(work)

    def test_the_type_name_is_recorded_and_finds_the_handler_again(self, tmp_path: Path) -> None:
        handler = self.make_handler()
        name = handler.typestr() if callable(handler.typestr) else handler.typestr
        demand(isinstance(cast("object", name), str) and name, "typestr must be a non-empty string")
        found = self._options()["registry"].for_typestr(name, "x")
        demand(found is not None, "the type name must find the handler")

        async def work() -> None:
            async with Checkpointer(**self._options()) as checkpointer:
                await (await checkpointer.save(tmp_path / "a", list(self.values()), overwrite=True))
                await checkpointer.metadata(tmp_path / "a")

        anyio.run(work, backend=backends()[0])

    def test_pieces_cover_every_chunk_once_and_in_order(self, tmp_path: Path) -> None:
        handler = self.make_handler()
        if isinstance(handler, TypeHandler):
            return

        values, info = self.values(), ParamInfo(("x",), (KeyKind.MAPPING,), "['x']", str(tmp_path))
        known: dict[Any, LeafSpec] = {}
        specs = handler.describe(values, [info] * len(values), known)
        demand(len(specs) == len(values), "describe must return one spec for each value")
        again = handler.describe(values[::-1], [info] * len(values), known)
        demand(list(again) == list(specs)[::-1], "what is described again must be described alike")
        for value, spec in zip(values, specs, strict=True):
            leaf = Leaf(0, info, value, spec, handler)
            for piece_bytes in (1, 1000, 1 << 20):
                ends: dict[tuple[int, ...], int] = {}
                for plan in handler.pieces(leaf, piece_bytes):
                    demand(plan.start == ends.get(plan.chunk, 0), "pieces of a chunk must be adjacent")
                    demand(len(plan.take()) == plan.nbytes, "take must return as many bytes as were planned")
                    demand(plan.cost >= 0, "a piece's cost must not be negative")
                    ends[plan.chunk] = plan.start + plan.nbytes

                demand(sum(ends.values()) == spec.nbytes, "the pieces must cover the whole leaf")
                demand(all(end == spec.chunk_nbytes for end in ends.values()), "and cover each chunk")

    def test_a_save_that_fails_or_is_cancelled_anywhere_leaves_nothing(self, tmp_path: Path) -> None:
        trial = self._trial(tmp_path)
        trial.sweep_save()

    def test_a_restore_that_is_cancelled_anywhere_holds_nothing(self, tmp_path: Path) -> None:
        trial = self._trial(tmp_path)
        trial.sweep_restore()

    def _trial(self, tmp_path: Path) -> Trial:
        tree = {"values": list(self.values()), "step": 7}

        def same(found: Any, expected: Any) -> bool:
            return found["step"] == 7 and self._all_same(found["values"], expected["values"])

        return Trial(str(tmp_path), tree, tree, same, self._options)

    def _all_same(self, found: Sequence[Any], expected: Sequence[Any]) -> bool:
        return len(found) == len(expected) and all(map(self.same, found, expected))

    def _options(self) -> Mapping[str, Any]:
        registry = default_handlers(entry_points=False)
        registry.register(self.leaf_type(), self.make_handler(), override=True)
        return {"registry": registry, "memory_limit": self.memory_limit}
