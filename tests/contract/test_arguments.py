"""Each argument of a public constructor is checked when it is given, and not at the first use."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock
from penstock import config
from penstock.errors import (
    ConfigError,
    NoHandlerError,
    PipelineError,
    RunningLoopError,
    SpecError,
    StructureMismatchError,
    UnknownMetricError,
)
from penstock.stages import Encode, Read, Write
from penstock.steps import EverySteps, KeepBest, KeepLast, StepNames


class Wrong:
    """Nothing that any argument takes."""

    def __repr__(self) -> str:
        return "Wrong()"


NEEDED: Mapping[str, Mapping[str, Any]] = {
    "CheckpointManager": {"root": "/tmp/never-made"},
    "Disk": {"path": "/tmp/never-made"},
    "KeepBest": {"n": 1, "metric": "loss"},
    "PerProcess": {"value": 1},
}
RETURNED = {
    "CheckpointMetadata", "GcReport", "LeafMetadata", "LeafStream", "Progress", "RegulatorStatistics",
    "RepairReport", "RestoreReport", "SaveFuture", "SaveMoment", "SaveReport", "SealReport", "StepInfo",
    "StepMetadata", "VerifyReport", "Watch",
}  # fmt: skip
"""What no caller makes: what calls return, and what policies are shown."""
OF_ANY_KIND = {
    ("PerProcess", "value"),  # a leaf
    ("SaveArgs", "dtype"),  # only a save knows numpy's
    ("HandlerRegistry", "entry_points"),  # anything is true or false
    ("FlowOptions", "stage_options"),  # a stage that is configured checks its own
    ("SaveFlowOptions", "stage_options"),
    ("RestoreFlowOptions", "stage_options"),
}


def constructors() -> Iterator[tuple[Any, str]]:
    """Every public class that a caller configures, with each of its parameters."""
    for module in (penstock, penstock.steps, config, penstock.pipelines):
        for each in (getattr(module, name) for name in module.__all__):
            is_made = inspect.isclass(each) and each.__name__ not in RETURNED
            if not is_made or getattr(each, "_is_protocol", False) or issubclass(each, Exception | Enum):
                continue
            for name, parameter in inspect.signature(each).parameters.items():
                is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
                if is_one and (each.__name__, name) not in OF_ANY_KIND:
                    yield each, name


@pytest.mark.parametrize(
    ("made", "name"), [pytest.param(*one, id=f"{one[0].__name__}-{one[1]}") for one in constructors()]
)
def test_an_argument_of_another_kind_is_refused_at_once(made: Any, name: str) -> None:
    arguments = {**NEEDED.get(made.__name__, {}), name: Wrong()}
    # What takes a path says what Python says.
    errors: Any = TypeError if name == "root" else (SpecError, ConfigError, PipelineError)
    is_first = inspect.signature(made).parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY
    with pytest.raises(errors, match=r"Wrong(\(\))?"):
        made(Wrong()) if is_first else made(**arguments)


def test_options_are_written_in_python_as_in_a_file() -> None:
    given: Any = "2GiB"
    assert config.MemoryOptions(limit_bytes=given).limit_bytes == 2 * 2**30
    given = "500ms"
    assert config.StoppingOptions(read_s=given).read_s == 0.5
    with pytest.raises(ConfigError, match=r"memory\.save_concurrent_bytes.*must be positive, not 0"):
        config.MemoryOptions(save_concurrent_bytes=0)


def test_a_stage_checks_its_options() -> None:
    given: Any = "many"
    for stage in (Write, Read, Encode):
        with pytest.raises(ConfigError, match="must be a whole number, not 'many'"):
            stage(concurrency=given)


@pytest.mark.anyio
async def test_numbers_stand_for_the_policies_that_people_mean(tmp_path: Path) -> None:
    async with penstock.CheckpointManager(tmp_path / "run", save_when=2, keep=3) as manager:
        for step in range(12):
            save = await manager.save(step, {"a": np.arange(3)})
            if save is not None:
                await save

        await manager.wait()
        assert manager.all_steps() == (6, 8, 10)


def test_a_number_that_cannot_be_meant_is_refused() -> None:
    with pytest.raises(SpecError, match="at least 1"):
        penstock.CheckpointManager("/tmp/never-made", save_when=0)
    with pytest.raises(SpecError, match="at least 0"):
        penstock.CheckpointManager("/tmp/never-made", keep=-1)


@pytest.mark.parametrize("given", [3, None, "loss"])
def test_what_is_combined_with_a_policy_is_a_policy(given: Any) -> None:
    for policy in (KeepLast(3), EverySteps(100)):
        made: Any = policy
        with pytest.raises(SpecError, match="takes policies, not"):
            _ = made | given
        with pytest.raises(SpecError, match="takes policies, not"):
            _ = made & given


def test_a_budget_of_a_few_bytes_asks_for_gigabytes() -> None:
    with pytest.raises(ConfigError, match="write '8GiB'"):
        penstock.Checkpointer(memory_limit=8)


@pytest.mark.anyio
@pytest.mark.parametrize("given", ["Loss", "LOSS", "los"])
async def test_a_metric_that_is_misspelt_is_refused_at_the_first_save(tmp_path: Path, given: str) -> None:
    keep = KeepBest(1, "loss") | KeepLast(1)
    async with penstock.CheckpointManager(tmp_path / "run", keep=keep) as manager:
        with pytest.raises(UnknownMetricError, match=given):
            await manager.save(0, {"a": np.arange(3)}, metrics={given: 1.0})


@pytest.mark.anyio
@pytest.mark.parametrize("read_only", [False, True])
async def test_steps_of_other_names_are_told_where_a_manager_is_opened(
    tmp_path: Path, read_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    await penstock.save(tmp_path / "step_100", {"a": np.arange(3)})
    async with penstock.CheckpointManager(tmp_path, read_only=read_only) as manager:
        assert manager.latest_step() is None
    assert "step.other_names" in caplog.text
    assert "names=['step_100'] named_like='1'" in caplog.text

    caplog.clear()
    async with penstock.CheckpointManager(tmp_path, names=StepNames("step"), read_only=True) as manager:
        assert manager.latest_step() == 100
    assert "step.other_names" not in caplog.text


def test_a_plain_with_names_the_blocking_twin() -> None:
    for made in (penstock.Checkpointer(), penstock.CheckpointManager("/tmp/never-made")):
        entered: Any = made
        with pytest.raises(TypeError, match=rf"async with.*penstock\.sync\.{type(made).__name__}"), entered:
            pass


@pytest.mark.anyio
async def test_a_checkpointer_is_refused_in_the_loop_of_another_thread(tmp_path: Path) -> None:
    async with penstock.Checkpointer() as checkpointer:

        def elsewhere() -> None:
            anyio.run(checkpointer.save, tmp_path / "x", {"a": np.arange(3)})

        with pytest.raises(RunningLoopError, match="of another thread"):
            await anyio.to_thread.run_sync(elsewhere)

    assert not (tmp_path / "x").exists()


@dataclass
class Plain:
    """A dataclass that jax does not know."""

    weights: Any


@pytest.mark.anyio
async def test_a_dataclass_that_is_no_node_is_told_how_it_becomes_one(tmp_path: Path) -> None:
    with pytest.raises(NoHandlerError, match=r"jax\.tree_util\.register_dataclass"):
        await penstock.save(tmp_path / "x", {"model": Plain(np.arange(3))})


@pytest.mark.anyio
async def test_a_mesh_that_does_not_fit_is_answered_by_what_would(tmp_path: Path) -> None:
    await penstock.save(tmp_path / "x", {"w": np.ones((8, 3), np.float32)})
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    spec = PartitionSpec(None, "x")  # type: ignore[no-untyped-call]  # jax's
    struct = jax.ShapeDtypeStruct((8, 3), np.float32, sharding=NamedSharding(mesh, spec))  # type: ignore[no-untyped-call]
    like = {"w": struct}
    with pytest.raises(StructureMismatchError) as caught:
        await penstock.restore(tmp_path / "x", like=like)

    assert [difference.kind for difference in caught.value.differences] == ["sharding"]
    assert "must divide" in str(caught.value)
    assert "rename" not in str(caught.value)
