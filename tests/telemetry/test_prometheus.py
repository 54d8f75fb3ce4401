"""What Prometheus's own client shows of saves, restores, failures and the budget."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import penstock
from penstock.errors import DestinationExistsError
from penstock.pipelines import save_pipeline
from penstock.steps import CheckpointManager, Disk

prometheus = pytest.importorskip("prometheus_client")
from penstock.telemetry import Observer, PrometheusMetrics, Promotion  # noqa: E402

pytestmark = pytest.mark.anyio
TREE = {"w": np.ones(1000, np.float32), "b": np.ones(10)}
NBYTES = 4080


async def test_saves_and_restores_are_counted(tmp_path: Path) -> None:
    registry = prometheus.CollectorRegistry()
    async with penstock.Checkpointer(observers=[PrometheusMetrics(registry)]) as checkpointer:
        for step in range(2):
            await (await checkpointer.save(tmp_path / str(step), TREE))
        await checkpointer.restore(tmp_path / "1")
        async for _ in checkpointer.stream(tmp_path / "1"):
            pass

        text = prometheus.generate_latest(registry).decode()
        assert 'penstock_operations_under_way{operation="save"} 0.0' in text

    def value(name: str, **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(name, labels)
        return found

    assert value("penstock_operations_total", operation="save") == 2
    assert value("penstock_operations_total", operation="restore") == 2
    assert value("penstock_bytes_total", operation="save") == 2 * NBYTES
    assert value("penstock_operation_bytes_sum", operation="restore") == 2 * NBYTES
    assert value("penstock_operation_bytes_bucket", operation="save", le="10000.0") == 2
    assert value("penstock_operation_seconds_count", operation="save") == 2
    assert value("penstock_save_stall_seconds_count") == 2
    assert value("penstock_stage_busy_seconds_count", operation="restore", stage="read") == 2
    for doing in ("busy", "starved", "blocked", "memory_wait"):
        seconds = value("penstock_stage_seconds_total", operation="save", stage="write", doing=doing)
        assert seconds is not None
    work = value("penstock_stage_seconds_total", operation="save", stage="write", doing="busy")
    assert work is not None
    assert work > 0
    assert value("penstock_failures_total", operation="save", error="cancelled") is None


async def test_failures_and_cancellations_are_counted_apart(tmp_path: Path) -> None:
    registry = prometheus.CollectorRegistry()
    reached = anyio.Event()

    async def hold(batch: Any) -> Any:
        reached.set()
        await anyio.sleep_forever()
        return batch

    async with penstock.Checkpointer(observers=[PrometheusMetrics(registry)]) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", TREE))
        with pytest.raises(DestinationExistsError):
            await (await checkpointer.save(tmp_path / "a", TREE))

        holding = save_pipeline().insert_after("limit_bytes", hold)
        save = await checkpointer.save(tmp_path / "b", TREE, pipeline=holding)
        await reached.wait()
        save.cancel()
        with pytest.raises(penstock.errors.SaveCancelledError):
            await save

    def failures(error: str) -> float | None:
        labels = {"operation": "save", "error": error}
        found: float | None = registry.get_sample_value("penstock_failures_total", labels)
        return found

    assert (failures("DestinationExistsError"), failures("cancelled")) == (1, 1)
    assert registry.get_sample_value("penstock_operations_total", {"operation": "save"}) == 1


async def test_budgets_of_open_checkpointers_are_summed(tmp_path: Path) -> None:
    registry = prometheus.CollectorRegistry()

    def limit() -> float | None:
        found: float | None = registry.get_sample_value("penstock_memory_limit_bytes")
        return found

    async with penstock.Checkpointer(observers=[PrometheusMetrics(registry)], memory_limit=1000):
        assert limit() == 1000
        async with penstock.Checkpointer(observers=[PrometheusMetrics(registry)], memory_limit=500):
            assert limit() == 1500

    assert limit() == 0
    assert registry.get_sample_value("penstock_memory_leased_bytes") == 0


async def test_the_configuration_turns_observers_on_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TELEMETRY__OBSERVERS", "prometheus,opentelemetry")
    path = anyio.Path(tmp_path / "a")

    def saves() -> float:
        found: float | None = prometheus.REGISTRY.get_sample_value(
            "penstock_operations_total", {"operation": "save"}
        )
        return found or 0.0

    before = saves()
    await penstock.save(path, TREE)
    assert saves() == before + 1


async def test_promotions_are_counted_by_the_tier_that_they_came_to(tmp_path: Path) -> None:
    registry = prometheus.CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    observers: list[Observer] = [metrics, Broken()]
    tiers = [Disk(tmp_path / "near"), Disk(tmp_path / "between")]
    async with CheckpointManager(tmp_path / "far", tiers=tiers, observers=observers) as manager:
        save = await manager.save(1, TREE)
        assert save is not None
        report = await save

    assert list(report.promoted_s) == [str(tmp_path / "between"), str(tmp_path / "far")]
    assert report.staged_s <= report.kept_s <= min(report.promoted_s.values())
    assert max(report.promoted_s.values()) <= report.durable_s
    assert f"in {tmp_path}/far after" in str(report)
    assert registry.get_sample_value("penstock_save_kept_seconds_count") == 1
    for tier, path in (("disk", "between"), ("root", "far")):
        lag_s = registry.get_sample_value("penstock_promotion_lag_seconds_sum", {"tier": tier})
        assert lag_s == pytest.approx(report.promoted_s[str(tmp_path / path)], abs=0.05)
        assert registry.get_sample_value("penstock_promotion_seconds_count", {"tier": tier}) == 1
        assert registry.get_sample_value("penstock_promoted_bytes_total", {"tier": tier}) > NBYTES

    encoding = "penstock_encoding_processor_seconds_total"
    assert registry.get_sample_value(encoding, {"tier": "root"}) is None, "files were copied"
    metrics.promoted(Promotion("/far/2", "root", 10, 1.5, None, 0.75))
    assert registry.get_sample_value(encoding, {"tier": "root"}) == 0.75


class Broken:
    """An observer whose errors disturb nothing."""

    def observing(self, kind: str, path: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def watching(self, statistics: object) -> AbstractContextManager[Any]:
        return nullcontext()

    def promoted(self, promotion: Promotion, /) -> None:
        raise ZeroDivisionError
