"""The spans that OpenTelemetry's own SDK receives."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import DestinationExistsError
from penstock.pipelines import save_pipeline

trace = pytest.importorskip("opentelemetry.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402

from penstock.telemetry import OpenTelemetrySpans  # noqa: E402

pytestmark = pytest.mark.anyio
TREE = {"w": np.ones(1000, np.float32)}


@dataclass
class Traced:
    provider: TracerProvider
    exporter: Any

    @property
    def tracer(self) -> Any:
        return self.provider.get_tracer("test")

    def spans(self) -> Sequence[Any]:
        found: Sequence[Any] = self.exporter.get_finished_spans()
        return found

    def named(self, name: str) -> Any:
        (found,) = [span for span in self.spans() if span.name == name]
        return found


@pytest.fixture
def traced() -> Traced:
    exporter = export.InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Traced(provider, exporter)


@dataclass(frozen=True)
class Tracing:
    """A stage that makes spans of its own."""

    tracer: Any

    @asynccontextmanager
    async def open(self, run: object, /) -> AsyncGenerator[Any]:
        async def passed_on(batch: Any) -> Any:
            with self.tracer.start_as_current_span("mine"):
                return batch

        yield passed_on


async def test_spans_of_stages_lie_in_that_of_the_save_which_lies_in_the_callers(
    tmp_path: Path, traced: Traced
) -> None:
    observer = OpenTelemetrySpans(traced.provider)
    pipeline = save_pipeline().insert_after("device_to_host", Tracing(traced.tracer))
    async with penstock.Checkpointer(observers=[observer], save_pipeline=pipeline) as checkpointer:
        with traced.tracer.start_as_current_span("training"):
            save = await checkpointer.save(tmp_path / "a", TREE)
            assert trace.get_current_span().is_recording()
        await save  # it goes on behind the span in which it was called
        with traced.tracer.start_as_current_span("serving"):
            await checkpointer.restore(tmp_path / "a")

    saved, restored = traced.named("penstock.save"), traced.named("penstock.restore")
    assert saved.parent.span_id == traced.named("training").context.span_id
    assert restored.parent.span_id == traced.named("serving").context.span_id
    assert traced.named("mine").parent.span_id == saved.context.span_id
    write = traced.named("penstock.stage.write")
    assert write.parent.span_id == saved.context.span_id
    assert traced.named("penstock.stage.read").parent.span_id == restored.context.span_id
    assert saved.attributes["penstock.path"] == str(tmp_path / "a")
    assert saved.attributes["penstock.nbytes"] == write.attributes["penstock.nbytes"] == 4000
    assert "is the bottleneck" in saved.attributes["penstock.bottleneck"]
    assert saved.status.is_ok
    slack_ns = 10**9  # the two clocks are read one after the other
    assert saved.start_time - slack_ns <= write.start_time <= write.end_time <= saved.end_time + slack_ns


async def test_a_failure_is_recorded_with_the_stage_that_failed(tmp_path: Path, traced: Traced) -> None:
    observer = OpenTelemetrySpans(traced.provider)
    async with penstock.Checkpointer(observers=[observer]) as checkpointer:
        await (await checkpointer.save(tmp_path / "a", TREE))
        with pytest.raises(DestinationExistsError):
            await (await checkpointer.save(tmp_path / "a", TREE))

    failed = traced.spans()[-1]
    assert (failed.name, failed.attributes["penstock.stage"]) == ("penstock.save", "flatten")
    assert not failed.status.is_ok
    assert [event.name for event in failed.events] == ["exception"]
