"""`penstock demo`: train, save meanwhile, kill in the middle of a save, resume, compare bit for bit."""

from __future__ import annotations

__all__ = ("DemoOptions", "own_text", "read_text", "require_followed", "run_demo")

import shutil
import signal
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, final

import anyio
from anyio import CancelScope, Event, create_task_group, move_on_after, open_signal_receiver

import penstock
from penstock.cli.terminal import CommandError, Output, format_bytes
from penstock.demo import report
from penstock.demo.bucket import BUCKET, bucket_on_loopback
from penstock.demo.process import TrainingLog, run_training
from penstock.demo.records import DurableSave, FinishedStep, FollowedStep, Record, Restored
from penstock.demo.timeline import draw, timeline_of
from penstock.kernel.words import counted

LEAST_LETTERS = 1000  # of a text
PATIENCE_S = 30.0  # with the second process, once the first one has ended


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the command line."""

    text: Path | None = None  #: None: penstock's own
    steps: int = 85
    every: int = 25
    size: str = "full"
    seconds: float = 40.0  #: to aim at, by training fewer steps on a slow machine
    keep: Path | None = None  #: None: a temporary directory, removed at the end
    picture: Path = field(default=Path("penstock-demo-timeline.svg"))
    store: str = "disk"  #: or `s3`


def run_demo(options: DemoOptions, output: Output) -> int:
    """Run the demo and return the exit status: 0, or 128 + the signal that ended it.

    Raises:
        CommandError: If it cannot run, or if what it is to show is not so.
        OSError: If its files cannot be written.
    """
    if options.steps < 3 * options.every or options.every < 1:
        raise CommandError("it takes three saves at least: make --steps three times --every, or more")

    text, what = read_text(options.text)
    with ExitStack() as ends:
        directory = ends.enter_context(_open_directory(options.keep, output))
        (directory / "text.txt").write_text(text, "utf-8")
        if options.store == "s3":
            ends.enter_context(bucket_on_loopback(directory / "seaweedfs"))
            output.say(
                report.wrapped(
                    f"SeaweedFS, an object store, runs on loopback; checkpoints go to s3://{BUCKET}."
                )
            )

        demo = _Demo(options, output, directory)
        return anyio.run(demo, f"{what}, {len(text):,} characters")


@final
class _Demo:
    """The four acts, and what the three processes have told."""

    def __init__(self, options: DemoOptions, output: Output, directory: Path) -> None:
        self._options = options
        self._output = output
        self._directory = directory
        self._began = time.monotonic()
        self._reference = self._killed = self._resumed = self._follower = TrainingLog()
        self._news = Event()

    async def __call__(self, text: str) -> int:
        received: list[int] = []
        failure: Exception | None = None
        async with create_task_group() as tasks:
            tasks.start_soon(_end_on_signal, tasks.cancel_scope, received)
            try:
                await self._train(text)
                await self._kill()
                await self._resume()
                self._conclude()
            except Exception as error:
                failure = error  # raised below, as it is and not in a group

            tasks.cancel_scope.cancel()

        if failure is not None:
            raise failure
        if received:
            self._say(f"\nended by {signal.Signals(received[0]).name}")

        return 128 + received[0] if received else 0

    async def _train(self, text: str) -> None:
        options, output = self._options, self._output
        output.headline("1  Train, and save while training goes on")
        self._say(
            f"A small transformer learns {text}. It saves every {options.every} steps; each step donates the "
            "state that is being saved. A second process follows it: restores steps as they come, and trains "
            "one step from each."
        )
        failure: Exception | None = None
        async with create_task_group() as beside:
            beside.start_soon(self._follow)
            try:
                self._reference = await self._process("reference", options.steps, seconds=options.seconds)
                with move_on_after(PATIENCE_S):
                    await self._caught_up()
            except Exception as error:
                failure = error  # raised below, as it is and not in a group

            beside.cancel_scope.cancel()

        if failure is not None:
            raise failure

        if len(self._reference.steps) < options.steps:
            self._say(f"It ended early, to keep the demo near {options.seconds:.0f} s on this machine.")

        started, losses = self._reference.started, _losses(self._reference)
        assert started is not None
        self._say(
            f"{started.n_parameters:,} parameters, {len(losses)} steps, "
            f"loss {losses[0]:.2f} to {fmean(losses[-10:]):.2f}"
        )
        output.say(report.curve(losses))

    async def _kill(self) -> None:
        output = self._output
        last = len(self._reference.steps)
        hold_at = max(2, round(0.6 * (last // self._options.every))) * self._options.every
        output.headline("2  Kill it in the middle of a save")
        self._say(
            f"The same from the start, in a new process, which dies while it saves step {hold_at}. So that "
            "it surely dies half-way, that one save has a stage more, before `commit`, which lets half of "
            "the bytes pass and then waits. Training goes on meanwhile."
        )
        self._killed = await self._process("run", last, hold_at=hold_at)
        log = self._killed
        if log.returncode != -signal.SIGKILL or log.held is None:
            raise CommandError(f"the process was to be killed, and ended with status {log.returncode}")

        self._say(
            f"Sent SIGKILL after step {log.steps[-1].step}: step {hold_at} was staged, "
            f"{format_bytes(log.held.nbytes)} of it were written. In its place are now:"
        )
        table = report.bucket_table if self._options.store == "s3" else report.disk_table
        output.table(await anyio.to_thread.run_sync(table, self._root("run")))

    async def _resume(self) -> None:
        output = self._output
        output.headline("3  Resume in a new process")
        self._resumed = await self._process("run", len(self._reference.steps))
        if self._resumed.restored is None:
            raise CommandError("the new process found no checkpoint")

    def _conclude(self) -> None:
        output, options = self._output, self._options
        output.headline("4  The verdict")
        reference = report.losses_of(self._reference)
        other = report.losses_of(self._killed, self._resumed)
        assert self._resumed.restored is not None
        resumed_from = self._resumed.restored.step
        steps = [1, resumed_from, resumed_from + 1, self._killed.steps[-1].step, len(reference)]
        output.table(report.loss_table(reference, other, sorted(set(steps))))
        logs = {"first": self._reference, "killed": self._killed, "resumed": self._resumed}
        self._compare()
        self._say("\nThe saves: how long the event loop was stalled at most, and what was trained meanwhile.")
        output.table(report.save_table(logs))
        save = _most_telling(self._reference)
        options.picture.write_text(draw(timeline_of(self._reference, save)), "utf-8")
        self._say(f"\nThe stages of the save of step {save.step}, as a picture: {options.picture}")
        if options.keep is not None:
            self._say(f"The checkpoints: {self._directory}; look at one with `penstock show`")

        self._say(f"{time.monotonic() - self._began:.0f} s in all.")

    def _compare(self) -> None:
        last = len(self._reference.steps)
        assert self._resumed.restored is not None
        n_killed, first = self._killed.steps[-1].step, self._resumed.restored.step + 1
        _require_equal("killed", self._reference, self._killed, range(1, n_killed + 1))
        _require_equal("resumed", self._reference, self._resumed, range(first, last + 1))
        require_followed(self._reference, self._follower)
        self._succeed(
            f"Bit-equal: all {n_killed} losses before the kill and all {last + 1 - first} after the resume "
            "are those of the uninterrupted run."
        )
        followed = self._follower.followed
        peak, limit = max(step.peak_bytes for step in followed), followed[0].limit_bytes
        self._succeed(
            "Bit-equal, too: what the second process found from what it restored of "
            f"{counted(len(followed), 'step')}, "
            f"with {format_bytes(peak)} of its {format_bytes(limit)} of memory."
        )

    async def _follow(self) -> None:
        """Run the second process beside the first, until this is cancelled."""

        def note(log: TrainingLog, record: Record) -> bool:
            self._follower = log
            if isinstance(record, FollowedStep):
                self._output.say(report.describe_followed(record))

            self._news.set()
            self._news = Event()
            return False

        try:
            await run_training(self._common("reference"), note, self._directory / "compiled", "follower")
        except (OSError, ValueError) as error:  # that it found nothing is noticed in the end
            self._say(f"the second process failed: {error}")

    async def _caught_up(self) -> None:
        """Wait until the second process has evaluated the last step that the first one saved."""
        last = self._reference.saves[-1].step
        while not any(step.step == last for step in self._follower.followed):
            await self._news.wait()

    def _root(self, folder: str) -> str:
        if self._options.store == "s3":
            return f"s3://{BUCKET}/{folder}"

        directory = self._directory / folder
        directory.mkdir(exist_ok=True)
        return str(directory)

    def _common(self, folder: str) -> dict[str, Any]:
        return {
            "directory": self._root(folder),
            "text": str(self._directory / "text.txt"),
            "size": self._options.size,
        }

    def _say(self, text: str) -> None:
        self._output.say(report.wrapped(text))

    def _succeed(self, text: str) -> None:
        self._output.success(report.wrapped(text))

    async def _process(self, folder: str, steps: int, **more: Any) -> TrainingLog:
        """Run a training process under a progress bar, and say what it saves."""
        options = {
            **self._common(folder),
            "steps": steps,
            "every": self._options.every,
            "began": time.monotonic(),
            **more,
        }
        with self._output.bar(steps) as bar:

            def watch(log: TrainingLog, record: Record) -> bool:
                if isinstance(record, FinishedStep):
                    bar.show(record.step, f"loss {float.fromhex(record.loss):.2f}")
                elif isinstance(record, DurableSave):
                    self._output.say(report.describe_save(record))
                elif isinstance(record, Restored):
                    self._say(report.describe_restore(record))

                return _is_in_the_middle(log)

            log = await run_training(options, watch, self._directory / "compiled")

        if log.returncode and log.held is None:
            raise CommandError(
                f"a training process ended with status {log.returncode}:\n{log.errors.strip()}"
            )

        return log


def _is_in_the_middle(log: TrainingLog) -> bool:
    """Return whether the held save is staged and half written, and a step was done since it began."""
    held = log.held
    if held is None or log.steps[-1].step == held.step:
        return False

    return any(staged.step == held.step for staged in log.staged)


def _require_equal(name: str, reference: TrainingLog, other: TrainingLog, steps: range) -> None:
    differing = report.differing_steps(report.losses_of(reference), report.losses_of(other), steps)
    if differing:
        raise CommandError(
            f"NOT bit-equal: the {name} process differs from the uninterrupted one in the losses of "
            f"{len(differing)} of {len(steps)} steps, first in step {differing[0]}"
        )


def require_followed(reference: TrainingLog, follower: TrainingLog) -> None:
    """Whatever was evaluated from outside must be what the trainer itself had in its next step."""
    if not follower.followed:
        raise CommandError(f"the second process evaluated nothing:\n{follower.errors.strip()}")

    losses = report.losses_of(reference)
    for step in follower.followed:
        if losses.get(step.step + 1, step.loss) != step.loss:
            problem = f"the second process restored another state of step {step.step}"
            raise CommandError(f"NOT bit-equal: {problem}")


def _losses(log: TrainingLog) -> list[float]:
    return [float.fromhex(step.loss) for step in log.steps]


def _most_telling(log: TrainingLog) -> DurableSave:
    """Choose the save during which most training steps were done; of several, the last."""
    return max(log.saves, key=lambda save: (log.steps_during(save), save.step))


def read_text(path: Path | None) -> tuple[str, str]:
    """Return a text, and in a few words what it is: the one at `path`, or penstock's own.

    Raises:
        CommandError: If it cannot be read, or is too short to learn from.
    """
    if path is None:
        return own_text()

    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error

    if len(text) < LEAST_LETTERS:
        raise CommandError(f"{path} is too short: {len(text)} characters, of {LEAST_LETTERS} needed")

    return text, str(path)


def own_text() -> tuple[str, str]:
    """Return the source of penstock's kernel, and what it is in a few words."""
    kernel = Path(penstock.__file__).parent / "kernel"
    text = "\n".join(path.read_text("utf-8") for path in sorted(kernel.rglob("*.py")))
    return text, "the source of penstock's kernel"


@contextmanager
def _open_directory(keep: Path | None, output: Output) -> Generator[Path]:
    """Yield an empty directory; name it, and remove it afterwards unless it is to be kept."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise CommandError(f"{keep} is not empty")

        yield keep
        return

    path = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    output.say(
        report.wrapped(f"Checkpoints go to {path}, which is removed at the end (--keep DIR keeps them).")
    )
    try:
        yield path
    finally:
        shutil.rmtree(path)
        output.say(f"Removed {path}.")


async def _end_on_signal(scope: CancelScope, received: list[int]) -> None:
    """Wait for Ctrl-C or a request to end, note which, and cancel `scope`."""
    with open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            received.append(number)
            scope.cancel()
            return
