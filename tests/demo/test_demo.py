"""The demo: its model, its picture, its verdict, and the whole of it once."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from tests.xla_settings import xla_flags

import penstock
from penstock.cli.terminal import CommandError, PlainOutput
from penstock.demo.acts import own_text, read_text, require_followed
from penstock.demo.corpus import Corpus
from penstock.demo.model import SIZES, State, count_parameters, init_state, train_step
from penstock.demo.process import TrainingLog
from penstock.demo.records import (
    DurableSave,
    FinishedStep,
    FollowedStep,
    Record,
    StartedTraining,
    decode,
    encode,
)
from penstock.demo.report import (
    curve,
    describe_followed,
    describe_save,
    differing_steps,
    disk_table,
    loss_table,
    losses_of,
    save_table,
    wrapped,
)
from penstock.demo.timeline import draw, timeline_of
from penstock.demo.training import unfinished
from penstock.kernel import Span, StageStatistics
from penstock.pipelines import save_pipeline

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
SMALL = SIZES["small"]
CORPUS = Corpus("to be or not to be, that is the question. " * 20)
SVG = "{http://www.w3.org/2000/svg}"


def demo_environment(**more: str) -> dict[str, str]:
    # Eight virtual devices in each of three processes would only take time.
    return {**os.environ, "XLA_FLAGS": xla_flags(1), "PYTHONPATH": str(SOURCE), **more}


def train(state: State, first: int, last: int) -> tuple[State, list[float]]:
    losses: list[float] = []
    for step in range(first, last + 1):
        state, loss = train_step(state, CORPUS.batch(0, step, SMALL), SMALL)
        losses.append(loss)

    return state, losses


def a_save() -> DurableSave:
    def spans_from(start: float) -> tuple[Span, ...]:
        return (Span(0, start, start + 0.5, 10), Span(1, 5.1, 5.2, 0))

    stages = tuple(
        StageStatistics(name, 2, 1, 1, 10, 0.01, 0.0, 0.0, 0.0, spans_from(5.0 + at))
        for at, name in enumerate(save_pipeline().names)
    )
    return DurableSave(20, "/run/20", 3, 30, 0.5, 9.0, 0.001, 5.0, {"staged": 5.5, "finalized": 14.0}, stages)


def test_training_is_deterministic_and_learns() -> None:
    _, first = train(init_state(SMALL, CORPUS.vocabulary, 0), 1, 12)
    _, second = train(init_state(SMALL, CORPUS.vocabulary, 0), 1, 12)

    assert [loss.hex() for loss in first] == [loss.hex() for loss in second]
    assert first[-1] < first[0] - 0.3


def test_the_full_model_has_a_few_million_parameters() -> None:
    assert 2_000_000 < count_parameters(init_state(SIZES["full"], 100, 0)) < 4_000_000


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    batch = CORPUS.batch(1, 5, SMALL)

    assert batch.shape == (SMALL.batch, SMALL.context + 1)
    np.testing.assert_array_equal(batch, CORPUS.batch(1, 5, SMALL))
    assert not np.array_equal(batch, CORPUS.batch(1, 6, SMALL))
    assert not np.array_equal(batch, CORPUS.batch(2, 5, SMALL))


async def test_a_restored_state_continues_bit_equal(tmp_path: Path) -> None:
    state, _ = train(init_state(SMALL, CORPUS.vocabulary, 0), 1, 3)
    async with penstock.Checkpointer() as checkpointer:
        save = await checkpointer.save(tmp_path / "3", state)
        state, went_on = train(state, 4, 6)  # which donates what is being saved
        await save
        restored = await checkpointer.restore(
            tmp_path / "3", like=init_state(SMALL, CORPUS.vocabulary, seed=1)
        )

    assert int(restored["step"]) == 3
    again, resumed = train(restored, 4, 6)
    assert [loss.hex() for loss in resumed] == [loss.hex() for loss in went_on]
    for ours, theirs in zip(jax.tree.leaves(state["opt"]), jax.tree.leaves(again["opt"]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_only_what_has_its_own_name_is_a_checkpoint(tmp_path: Path) -> None:
    assert unfinished(tmp_path) == []

    for name in ("5", "20", "100", "120.orbax-checkpoint-tmp", ".penstock-writer"):
        (tmp_path / name).mkdir()
    (tmp_path / "_PENSTOCK_REPORTS.json").touch()

    assert unfinished(tmp_path) == ["120.orbax-checkpoint-tmp"]
    assert [row[:2] for row in disk_table(str(tmp_path)).rows] == [
        ("5", "a checkpoint"),
        ("20", "a checkpoint"),
        ("100", "a checkpoint"),
        ("120.orbax-checkpoint-tmp", "left by the kill"),
    ]


def test_what_was_followed_must_be_what_the_trainer_had() -> None:
    def log(*losses: float, followed: Sequence[tuple[int, float]] = ()) -> TrainingLog:
        steps = [FinishedStep(at, loss.hex(), 0.0, 0.0) for at, loss in enumerate(losses, start=1)]
        found = [FollowedStep(step, loss.hex(), 0.1, 10, 100) for step, loss in followed]
        return TrainingLog(steps=steps, followed=found)

    require_followed(log(3.0, 2.0, 1.0), log(followed=[(1, 2.0), (2, 1.0), (3, 0.5)]))
    with pytest.raises(CommandError, match="another state of step 2"):
        require_followed(log(3.0, 2.0, 1.0), log(followed=[(1, 2.0), (2, 1.5)]))
    with pytest.raises(CommandError, match="evaluated nothing"):
        require_followed(log(3.0, 2.0), log())


@pytest.mark.parametrize(
    "record",
    [
        a_save(),
        FollowedStep(4, (0.1).hex(), 0.5, 10, 100),
        FinishedStep(3, (0.1).hex(), 1.0, 2.0),
        StartedTraining(10, 5),
    ],
    ids=type,
)
def test_records_travel_as_lines(record: Record) -> None:
    line = encode(record)

    assert "\n" not in line
    assert decode(line) == record


@pytest.mark.parametrize(
    "line", ["", "[]", "{}", '{"record": "Unknown"}', '{"record": "FinishedStep"}', "oops"]
)
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not a line of a training process"):
        decode(line)


def test_one_differing_bit_is_found() -> None:
    def log(*losses: float) -> TrainingLog:
        steps = [FinishedStep(at, loss.hex(), 0.0, 0.0) for at, loss in enumerate(losses, start=1)]
        return TrainingLog(steps=steps)

    reference = losses_of(log(3.0, 2.0, 1.0))

    assert differing_steps(reference, losses_of(log(3.0, 2.0, 1.0)), range(1, 4)) == []
    assert differing_steps(
        reference, losses_of(log(3.0, float(np.nextafter(2.0, 3.0)), 1.0)), range(1, 4)
    ) == [2]
    assert differing_steps(reference, losses_of(log(3.0, 2.0)), range(1, 4)) == [3]
    assert differing_steps(reference, losses_of(log(3.0, 2.0)), range(4, 5)) == [4]


def test_everything_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "52")
    save = replace(a_save(), step=75, staged_s=0.999, durable_s=0.999, stall_s=0.999)
    steps = [FinishedStep(step, float(np.float32(1 / 3)).hex(), 0.0, 5.0) for step in range(1, 100)]
    log = TrainingLog(steps=steps, saves=[save])
    losses = losses_of(log)
    out = io.StringIO()
    output = PlainOutput(out)

    output.say(wrapped("words " * 30 + "/a/path/that/is/kept/whole/so/that/it/can/be-copied"))
    output.say(describe_save(save))
    output.say(describe_followed(FollowedStep(75, (0.1).hex(), 0.999, 10, 100)))
    output.say(curve([2.0, 1.0] * 50))
    output.table(loss_table(losses, losses, [1, 99]))
    output.table(save_table({"resumed": log}))

    lines = out.getvalue().splitlines()
    assert "/a/path/that/is/kept/whole/so/that/it/can/be-copied" in lines
    assert [line for line in lines if len(line) > 52] == []


@pytest.mark.parametrize(("losses", "drawn"), [([], ""), ([1.0], "▁"), ([2.0, 1.0], "█▁")])
def test_the_curve_of_few_losses(losses: list[float], drawn: str) -> None:
    assert curve(losses) == drawn


def test_the_picture_has_a_lane_for_every_worker_and_a_line_for_every_milestone() -> None:
    log = TrainingLog(steps=[FinishedStep(21, "0x1p+0", 6.0, 8.0)])

    picture = ElementTree.fromstring(draw(timeline_of(log, a_save())))

    lanes = {str(group.get("id")): group for group in picture.iter(f"{SVG}g")}
    workers = [f"{name}-{worker}" for name in save_pipeline().names for worker in (1, 2)]
    assert list(lanes) == ["training", *workers]
    assert all(len(group.findall(f"{SVG}rect")) > 1 for group in lanes.values())
    assert [text.text for text in picture.iter(f"{SVG}text") if text.get("class") == "milestone"] == [
        "save()",
        "staged",
        "finalized",
    ]


def test_the_text_is_real_and_long_enough() -> None:
    text, what = own_text()

    assert "penstock" in what
    assert len(text) > 20_000
    assert "checkpoint" in text


def test_a_text_that_cannot_be_learned_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("too short")

    with pytest.raises(CommandError, match="too short"):
        read_text(tmp_path / "short")
    with pytest.raises(CommandError, match="cannot read"):
        read_text(tmp_path / "absent")


@pytest.mark.process
@pytest.mark.timeout(240)  # four processes that start jax and compile
def test_the_whole_demo(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    picture = tmp_path / "timeline.svg"
    command = [sys.executable, "-m", "penstock.cli", "demo", "--small", "--steps", "14", "--every", "4"]

    run = subprocess.run(
        [*command, "--picture", str(picture)],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=demo_environment(TMPDIR=str(temporary)),
        cwd=tmp_path,
    )

    assert (run.returncode, run.stderr) == (0, "")
    said = " ".join(run.stdout.split())
    assert "8.orbax-checkpoint-tmp left by the kill" in said
    # On a busy machine the training comes to step 12 before it is killed, and that save is cut short, too.
    passed_over = r"(12\.orbax-checkpoint-tmp, )?8\.orbax-checkpoint-tmp"
    assert re.search(f"Found step 4, passed over {passed_over}", said)
    # How many steps it did before it was killed depends on the machine; one at least after the save began.
    assert re.search(r"Bit-equal: all (9|1\d) losses before the kill and all 10 after the resume", said)
    assert re.search(r"followed: restored step (4|8|12) in", said)
    assert re.search(
        r"Bit-equal, too: what the second process found from what it restored of [123] steps?", run.stdout
    )
    assert ElementTree.parse(picture).getroot().tag == f"{SVG}svg"
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.process
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    process: subprocess.Popen[str]
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "demo", "--small"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=demo_environment(TMPDIR=str(tmp_path)),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "saved step" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert "Removed" in process.stdout.read()
        assert process.stderr.read() == ""

    assert process.returncode == 128 + signal.SIGINT
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.process
def test_a_failing_training_process_fails_the_demo(tmp_path: Path) -> None:
    arguments: list[Any] = ["demo", "--small", "--steps", "12", "--every", "4", "--keep", tmp_path / "kept"]
    run = subprocess.run(
        [sys.executable, "-m", "penstock.cli", *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        env=demo_environment(JAX_PLATFORMS="no_such_platform"),
        cwd=tmp_path,
    )

    assert run.returncode == 1
    assert "a training process ended with status 1" in run.stderr
    assert "no_such_platform" in run.stderr
