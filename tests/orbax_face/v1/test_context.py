"""Contexts and their options, as Orbax has them."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import orbax.checkpoint.experimental.v1 as _orbax_v1
import pytest
from orbax.checkpoint.experimental.v1._src.context import context as orbax_context

import penstock.orbax.v1 as penstock_v1
from penstock.orbax.v1.options import get_context

orbax_v1: Any = _orbax_v1  # it has no types

CURRENT: dict[Any, Any] = {orbax_v1: cast("Any", orbax_context).get_context, penstock_v1: get_context}
OPTIONS = (
    *("pytree", "array", "asynchronous", "multiprocessing", "file", "checkpointables", "pathways"),
    *("deletion", "memory", "safetensors", "atomicity"),
)


def defaults(options: Any) -> Any:
    """The default of every option, by name; of nested ones, too."""
    return {
        field.name: defaults(getattr(options, field.name))
        if dataclasses.is_dataclass(getattr(options, field.name))
        else getattr(options, field.name)
        for field in dataclasses.fields(options)
    }


# What is an object of either library, which stands for the same; and what only ours has.
OWN = {"registry", "array_metadata_store", "pytree_metadata_options", "mode", "on_missing"}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_and_their_defaults_are_those_of_orbax(name: str) -> None:
    def plain(found: Any) -> Any:
        return {
            key: plain(value) if isinstance(value, dict) else value
            for key, value in found.items()
            if key not in OWN
        }

    ours, theirs = (defaults(getattr(library.Context(), name)) for library in (penstock_v1, orbax_v1))
    assert ours.keys() == theirs.keys()
    assert plain(ours) == plain(theirs)


def test_the_context_is_in_force_inside_its_with(ocp: Any) -> None:
    current = CURRENT[ocp]
    context = ocp.Context()
    context.array.saving.use_zarr3 = False
    assert current().array.saving.use_zarr3
    with context as entered:
        assert entered is context
        assert current() is context
        inner = ocp.Context(context)
        inner.array.saving.use_ocdbt = False
        with inner, ocp.Context():
            assert current().array.saving.use_zarr3
        with inner:
            saving = current().array.saving
            assert (saving.use_zarr3, saving.use_ocdbt) == (False, False)
        assert current() is context
        assert current(ocp.Context()) is context
    assert current().array.saving.use_ocdbt


def test_a_thread_has_its_own(ocp: Any) -> None:
    with ocp.Context() as context, ThreadPoolExecutor(1) as threads:
        assert threads.submit(CURRENT[ocp]).result() is not context


def test_an_entered_context_cannot_be_changed(ocp: Any) -> None:
    context = ocp.Context()
    copied = ocp.Context(context)
    with context:
        for options, name, value in (
            (context.array.saving, "use_zarr3", False),
            (context.array.saving.storage_options, "dtype", np.int8),
            (context.pytree.loading, "partial_load", True),
            (context, "checkpoint_layout", "safetensors"),
        ):
            with pytest.raises(RuntimeError):
                setattr(options, name, value)

        copied.array.saving.use_zarr3 = False

    assert context.array.saving.use_zarr3
    context.array.saving.use_zarr3 = False


def test_options_may_be_given(ocp: Any) -> None:
    options = ocp.options.ArrayOptions(saving=ocp.options.ArrayOptions.Saving(use_zarr3=False))
    context = ocp.Context(array_options=options, checkpoint_layout="safetensors")
    options.saving.use_zarr3 = True

    assert not context.array.saving.use_zarr3
    assert context.checkpoint_layout is ocp.options.CheckpointLayout.SAFETENSORS
    with pytest.raises(ValueError, match="not a valid CheckpointLayout"):
        ocp.Context(checkpoint_layout="tape")


async def test_a_task_takes_its_context_along(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def task() -> None:
        seen.append(get_context())

    with penstock_v1.Context() as context:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(task)

    assert seen == [context]


def test_a_budget_is_kept(tmp_path: Path) -> None:
    context = penstock_v1.Context()
    context.memory.write_concurrent_bytes = context.memory.read_concurrent_bytes = 1 << 20
    tree = {str(n): np.full(100_000, n) for n in range(10)}
    with context:
        penstock_v1.save(tmp_path / "a", tree)
        loaded = penstock_v1.load(tmp_path / "a")

    for name, value in tree.items():
        np.testing.assert_array_equal(loaded[name], value)


def test_prioritised_leaves_are_asked_for_by_jax_keys(tmp_path: Path) -> None:
    asked: list[Any] = []

    def first(key: Any) -> bool:
        asked.append(key[0].key)
        return False

    context = penstock_v1.Context()
    context.memory.is_prioritized_key_fn = first
    with context:
        penstock_v1.save(tmp_path / "a", {"a": 1, "b": np.ones(3)})

    assert asked == ["a", "b"]


def test_the_directory_has_the_mode_asked_for(ocp: Any, tmp_path: Path) -> None:
    context = ocp.Context()
    context.file.path_permission_mode = 0o750
    with context:
        ocp.save(tmp_path / "a", {"a": 1})

    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o750


def test_a_save_that_is_done_is_told_of(tmp_path: Path) -> None:
    done: list[bool] = []
    context = penstock_v1.Context()
    context.asynchronous.post_finalization_callback = lambda: done.append((tmp_path / "a").exists())
    with context:
        penstock_v1.save(tmp_path / "a", {"a": 1})

    assert done == [True]
