"""Registries of type handlers, and handlers as workers of penstock's stages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import penstock
from penstock.checkpointer import pipelines
from penstock.handlers.leaves import array, numpy_array, scalar
from penstock.handlers.leaves import scalar as string
from penstock.handlers.leaves.adapted_handler import AdaptedHandler
from penstock.orbax import type_handlers as ours
from penstock.orbax.serialization import MergeProcessFiles
from penstock.orbax.stage_workers import StageWorkers, TypeHandlerLookup, UnknownTypeError

theirs: Any = ocp.type_handlers
BOTH = pytest.mark.parametrize("library", [ours, theirs], ids=["penstock", "orbax"])


@BOTH
def test_a_registry_has_what_it_was_given(library: Any) -> None:
    numbers = library.ScalarHandler()
    registry = library.create_type_handler_registry((int, numbers))
    assert registry.get(int) is registry.get(bool) is registry.get("scalar") is numbers
    assert registry.has(int)
    assert not registry.has(float)
    assert not registry.has("np.ndarray")
    for kind in (float, "np.ndarray"):
        with pytest.raises(ValueError, match=r"np\.ndarray|float"):
            registry.get(kind)


@BOTH
def test_a_type_is_registered_once_unless_overridden(library: Any) -> None:
    first, second = library.ScalarHandler(), library.ScalarHandler()
    registry = library.create_type_handler_registry((int, first))
    with pytest.raises(ValueError, match="registered"):
        registry.add(int, second)
    with pytest.raises(ValueError, match="registered"):
        registry.add(bool, second)  # its base has a handler

    registry.add(int, second, override=True, ignore_warnings=True)
    assert registry.get(int) is registry.get("scalar") is second


@BOTH
def test_a_typestr_belongs_to_one_handler_unless_overridden(library: Any) -> None:
    first, second = library.ScalarHandler(), library.ScalarHandler()
    registry = library.create_type_handler_registry((int, first))
    with pytest.raises(ValueError, match="typestr"):
        registry.add(float, second)

    registry.add(float, second, override=True, ignore_warnings=True)
    assert registry.get(int) is first
    assert registry.get(float) is registry.get("scalar") is second


@BOTH
def test_a_function_may_say_which_types_are_meant(library: Any) -> None:
    handler = library.NumpyHandler()
    registry = library.create_type_handler_registry()
    registry.add(str, handler, func=lambda kind: kind.__name__.startswith("s"))
    assert registry.get(set) is handler
    assert not registry.has(list)


def test_a_derived_type_does_not_take_the_place_of_its_base() -> None:
    """In Orbax int would have no handler afterwards."""
    numbers, flags = ours.ScalarHandler(), ours.ScalarHandler()
    registry = ours.create_type_handler_registry((int, numbers))
    registry.add(bool, flags, override=True)
    assert registry.get(bool) is flags
    assert registry.get(int) is numbers


@BOTH
def test_the_registry_of_the_process_begins_with_these(library: Any) -> None:
    kinds = library.supported_types()
    assert kinds == [int, float, bytes, np.number, np.ndarray, jax.Array, str, type(...)]
    named = [(kind, library.get_type_handler(kind).typestr()) for kind in kinds]
    assert named == [
        *((kind, "scalar") for kind in (int, float, bytes, np.number)),
        *((np.ndarray, "np.ndarray"), (jax.Array, "jax.Array"), (str, "string"), (type(...), "placeholder")),
    ]
    assert not library.has_type_handler(complex)
    assert isinstance(library.create_type_handler_registry(), ours.TypeHandlerRegistry)


@pytest.mark.parametrize("value", [1, 1.5, "x", b"x", np.float32(1), np.ones(1), None, {}, [], ()])
def test_supported_types_are_orbax_s(value: object) -> None:
    assert ours.is_supported_type(value) is theirs.is_supported_type(value) is True
    assert ours.is_supported_empty_value(value) == theirs.is_supported_empty_value(value)


@pytest.mark.parametrize("value", [1j, object(), {"a": 1}, [1], np.bool_(True)])
def test_types_without_a_handler_are_not_supported(value: object) -> None:
    assert ours.is_supported_type(value) is theirs.is_supported_type(value) is False


def test_standard_handlers_can_be_replaced_by_others() -> None:
    kinds: list[Any] = [int, float, bytes, np.number, np.ndarray, jax.Array]
    before = [ours.get_type_handler(kind) for kind in kinds]
    try:
        ours.register_standard_handlers_with_options(metadata_key="zz", use_ocdbt=True, ts_context=None)
        for kind, handler in zip(kinds, before, strict=True):
            assert ours.get_type_handler(kind) is not handler
            assert type(ours.get_type_handler(kind)) is type(handler)
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            ours.register_type_handler(kind, handler, override=True)


async def test_placeholders_are_given_back() -> None:
    handler = ours.get_type_handler(type(...))
    infos: Any = [None, None]
    assert await handler.deserialize(infos) == [..., ...]
    with pytest.raises(NotImplementedError):
        await handler.serialize([...], infos)
    with pytest.raises(NotImplementedError):
        await handler.metadata(infos)


# As workers of stages


class Loud(ours.ArrayHandler):
    """Reads and writes as its base, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        self.said += [f"write {info.name} {[str(key) for key in info.keypath]}" for info in infos]
        return await super().serialize(values, infos, args)

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        self.said += [f"read {info.name}" for info in infos]
        return await super().deserialize(infos, args)


@pytest.mark.parametrize(
    ("handler", "native"),
    [
        (ours.ArrayHandler(), array.ArrayHandler),
        (ours.SingleReplicaArrayHandler(), array.ArrayHandler),
        (ours.NumpyHandler(), numpy_array.NumpyHandler),
        (ours.ScalarHandler(), scalar.ScalarHandler),
        (ours.StringHandler(), string.StringHandler),
        (ours.NumpyHandler(metadata_key="x"), AdaptedHandler),
        (ours.ArrayHandler(enable_write_sharding_file=False, array_metadata_store=None), array.ArrayHandler),
        (ours.ArrayHandler(metadata_key="x"), AdaptedHandler),
        (ours.StringHandler("other.json"), AdaptedHandler),
        (Loud(), AdaptedHandler),
    ],
)
def test_who_was_not_changed_is_penstock_s_own_handler(handler: Any, native: type) -> None:
    worker = StageWorkers().of(handler)
    assert type(worker) is native
    assert worker.typestr == handler.typestr()
    if native is not AdaptedHandler:
        assert StageWorkers().of(handler) is worker  # one object, so that what is known of it stays known


def test_a_method_that_was_set_on_the_instance_counts() -> None:
    handler = ours.NumpyHandler()
    handler.serialize = handler.serialize  # type: ignore[method-assign]  # the point of the test
    assert type(StageWorkers().of(handler)) is AdaptedHandler


def registry_of(handler: Any) -> Any:
    return ours.create_type_handler_registry(
        (jax.Array, handler), (int, ours.ScalarHandler()), (np.ndarray, ours.NumpyHandler())
    )


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("database", [True, False])
async def test_arrays_of_a_changed_handler_are_found_by_everybody(database: bool, tmp_path: Path) -> None:
    loud = Loud()
    tree = {"a": jnp.arange(8.0), "n": np.arange(3), "i": [1, 2]}
    workers = StageWorkers(
        use_ocdbt=database, save_args={"a": ours.SaveArgs(dtype=np.dtype(jnp.bfloat16))}.get
    )
    form = penstock.SaveFormat(ocdbt=database)
    pipeline = pipelines.save_pipeline().insert_before("finalize", MergeProcessFiles(), called="merge")
    async with penstock.Checkpointer(
        registry=TypeHandlerLookup(registry_of(loud), workers), save_pipeline=pipeline, save_format=form
    ) as checkpointer:
        await (await checkpointer.save(tmp_path / "x", tree))
        back = await checkpointer.restore(tmp_path / "x")

    assert loud.said == ["write a [\"['a']\"]", "read a"]
    assert (tmp_path / "x" / "ocdbt.process_0").exists() is database
    async with penstock.Checkpointer() as checkpointer:
        again = await checkpointer.restore(tmp_path / "x")

    orbax = await asyncio.to_thread(ocp.PyTreeCheckpointer().restore, tmp_path / "x")
    for found in (back, again, orbax):
        assert found["a"].dtype == jnp.bfloat16
        assert np.array_equal(found["a"], np.arange(8.0))
        assert np.array_equal(found["n"], np.arange(3))
        assert found["i"] == [1, 2]


async def test_a_type_without_a_handler_is_an_error_of_orbax_s_kind(tmp_path: Path) -> None:
    async with penstock.Checkpointer(
        registry=TypeHandlerLookup(registry_of(ours.ArrayHandler()))
    ) as checkpointer:
        for value in (1.5, "text", np.bool_(True)):
            with pytest.raises(ValueError, match=r"\['a'\].*no type handler") as caught:
                await checkpointer.save(tmp_path / "x", {"a": value, "none": None, "empty": {}})
            assert isinstance(caught.value, UnknownTypeError)
            assert isinstance(caught.value, TypeError)

        await (await checkpointer.save(tmp_path / "x", {"a": 1, "none": None, "empty": {}, "tuple": ()}))
        assert await checkpointer.restore(tmp_path / "x") == {"a": 1, "none": None, "empty": {}, "tuple": ()}

    assert not (tmp_path / "y").exists()


async def test_a_stored_type_without_a_handler_is_an_error(tmp_path: Path) -> None:
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save(tmp_path / "x", {"a": "text"}))
    async with penstock.Checkpointer(
        registry=TypeHandlerLookup(registry_of(ours.ArrayHandler()))
    ) as checkpointer:
        with pytest.raises(UnknownTypeError, match=r"\['a'\].*'string'"):
            await checkpointer.restore(tmp_path / "x")
