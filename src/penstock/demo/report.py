"""The conclusions of the demo from the records, as text."""

from __future__ import annotations

__all__ = (
    "curve",
    "describe_followed",
    "describe_restore",
    "describe_save",
    "differing_steps",
    "disk_table",
    "is_of_a_step",
    "loss_table",
    "losses_of",
    "save_table",
    "wrapped",
)

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from penstock.cli.terminal import Table, format_bytes
from penstock.demo.bucket import objects_below
from penstock.demo.process import TrainingLog
from penstock.demo.records import DurableSave, FollowedStep, Restored
from penstock.kernel.words import counted

BARS = "▁▂▃▄▅▆▇█"
LEFT = "left by the kill"
WIDEST = 96  # columns of a sentence, which is hard to read in longer lines


def wrapped(text: str) -> str:
    """Return sentences in lines that fit the terminal, broken between words."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    # A path is kept whole, so that it can be copied.
    return textwrap.fill(
        text, width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )


def is_of_a_step(name: str) -> bool:
    """Return whether something is a step, or might have become one: a manager keeps more there."""
    return name.partition(".")[0].isdecimal()


def losses_of(*logs: TrainingLog) -> dict[int, str]:
    """Return the loss of each step as its hexadecimal text; where logs overlap, the last one counts."""
    return {step.step: step.loss for log in logs for step in log.steps}


def differing_steps(
    reference: Mapping[int, str], other: Mapping[int, str], steps: Iterable[int]
) -> list[int]:
    """Return those of `steps` whose loss is not the same to the last bit, or that one side lacks."""
    return [step for step in steps if step not in reference or reference[step] != other.get(step)]


def curve(losses: Sequence[float], width: int = 40) -> str:
    """Draw losses as one line of bars."""
    if not losses:
        return ""

    groups = [losses[at * len(losses) // width : (at + 1) * len(losses) // width] for at in range(width)]
    means = [sum(group) / len(group) for group in groups if group]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def describe_restore(found: Restored) -> str:
    """Say in a line what a process resumes from."""
    return (
        f"Found step {found.step}, passed over {', '.join(found.passed_over) or 'nothing'}; restored "
        f"{found.n_leaves} leaves, {format_bytes(found.nbytes)}, in {found.seconds * 1e3:.0f} ms."
    )


def describe_save(save: DurableSave) -> str:
    """Say in a line what a save was."""
    return (
        f"  saved step {save.step}: staged in {save.staged_s * 1e3:.0f} ms, "
        f"durable in {save.durable_s * 1e3:.0f} ms"
    )


def describe_followed(step: FollowedStep) -> str:
    """Say in a line what a process that follows found."""
    return (
        f"  followed: restored step {step.step} in {step.restored_s * 1e3:.0f} ms, "
        f"loss {float.fromhex(step.loss):.2f}"
    )


def save_table(logs: Mapping[str, TrainingLog]) -> Table:
    """Make the table of every save, by the name of the process that made it."""
    columns = ("process", "step", "staged", "durable", "stalled", "trained")
    return Table(columns, [row for name, log in logs.items() for row in _save_rows(name, log)])


def loss_table(reference: Mapping[int, str], other: Mapping[int, str], steps: Sequence[int]) -> Table:
    """Make the table that shows the losses of some steps, to the last bit."""
    rows: list[tuple[str, ...]] = []
    for step in steps:
        ours, theirs = reference.get(step, "none"), other.get(step, "none")
        same = "equal" if ours == theirs else "DIFFERENT"
        rows.append((str(step), _short(ours), _short(theirs), same))

    return Table(("loss of step", "uninterrupted", "killed, resumed", ""), rows, n_left=0)


def _short(loss: str) -> str:
    """Return a hexadecimal text without the zeros that a float32 leaves at its end."""
    digits, _, exponent = loss.partition("p")
    return f"{digits.rstrip('0')}p{exponent}" if exponent else loss


def bucket_table(url: str) -> Table:
    """Make the table of what lies below `s3://demo/...`, where a mark makes a checkpoint."""
    found = objects_below(url)
    rows: list[tuple[str, ...]] = []
    for name in sorted({path.partition("/")[0] for path in found}, key=lambda name: _by_step(Path(name))):
        sizes = [size for path, size in found.items() if path.partition("/")[0] == name]
        what = "a checkpoint" if f"{name}/commit_success.txt" in found else LEFT
        rows.append((name, what, format_bytes(sum(sizes))))

    return Table(("name", "what it is", "in the bucket"), rows, n_left=2)


def disk_table(directory: str) -> Table:
    """Make the table of what lies in a directory of checkpoints."""
    rows: list[tuple[str, ...]] = []
    shown = [entry for entry in Path(directory).iterdir() if is_of_a_step(entry.name)]
    for entry in sorted(shown, key=_by_step):
        files = [path for path in entry.rglob("*") if path.is_file()]
        nbytes = sum(path.stat().st_size for path in files)
        what = "a checkpoint" if entry.name.isdecimal() else LEFT
        rows.append((entry.name, what, format_bytes(nbytes)))

    return Table(("name", "what it is", "on disk"), rows, n_left=2)


def _by_step(path: Path) -> tuple[int, str]:
    step = path.name.partition(".")[0]
    return (int(step) if step.isdecimal() else 0, path.name)


def _save_rows(name: str, log: TrainingLog) -> Iterator[tuple[str, ...]]:
    for save in log.saves:
        yield (
            name,
            str(save.step),
            _ms(save.staged_s),
            _ms(save.durable_s),
            _ms(save.stall_s),
            counted(log.steps_during(save), "step"),
        )

    if log.held is not None:
        staged = next(save for save in log.staged if save.step == log.held.step)
        yield (name, str(log.held.step), _ms(staged.seconds), "killed", "", "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
