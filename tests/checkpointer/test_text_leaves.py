"""A handler of any type may keep its leaves as text: what it stores comes back, or is refused at the save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from penstock import Checkpointer, HandlerRegistry, SaveFormat
from penstock.errors import InvalidLeafError
from penstock.handlers import SafetensorsLayout, default_handlers
from penstock.kernel import Leaf, LeafSpec, ParamInfo, ReadLeaves, StoredRows, Target

pytestmark = pytest.mark.anyio


class FractionHandler:
    """Keeps a fraction as its text."""

    typestr = "fractions.Fraction"

    def describe(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], known: dict[Any, LeafSpec]
    ) -> Sequence[LeafSpec]:
        return [LeafSpec(self.typestr, text=str(value)) for value in values]

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[Any]:
        return iter(())

    def targets(self, stored: StoredRows, likes: Sequence[Any] | None) -> Sequence[Target]:
        return [Target()] * len(stored)

    def build(self, leaves: ReadLeaves) -> Sequence[Any]:
        return [Fraction(leaf.stored.spec.text or "0") for leaf in leaves]


def registry() -> HandlerRegistry:
    handlers = default_handlers()
    handlers.register(Fraction, FractionHandler())
    return handlers


TREE = {
    "a": Fraction(22, 7),
    "b": {"c.d": Fraction(-1, 3), "e": "text", "f": None},
    "g": [Fraction(1), 2.5, {}],
}


@pytest.mark.parametrize("ocdbt", [True, False])
async def test_text_of_a_type_that_is_no_string_comes_back(tmp_path: Path, ocdbt: bool) -> None:
    async with Checkpointer(registry=registry(), save_format=SaveFormat(ocdbt=ocdbt)) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", TREE))
        assert await checkpointer.restore(tmp_path / "1", like=TREE) == TREE
        assert await checkpointer.restore(tmp_path / "1") == TREE


async def test_safetensors_refuse_text_that_would_come_back_as_a_string(tmp_path: Path) -> None:
    async with Checkpointer(registry=registry(), layout=SafetensorsLayout()) as checkpointer:
        with pytest.raises(InvalidLeafError, match=r"\['a'\].*kept as text") as caught:
            await (await checkpointer.save(tmp_path / "a.safetensors", {"a": Fraction(1, 2)}))

    assert caught.value.key_path == "['a']"
    assert not list(tmp_path.iterdir())
