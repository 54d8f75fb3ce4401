"""Waiting for steps that another process saves. Blocking."""

from __future__ import annotations

__all__ = ("checkpoints_iterator", "wait_for_new_checkpoint")

import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog

from penstock.handlers.stores.local import LocalStore
from penstock.kernel.errors import StorageError
from penstock.orbax.common.handler_paths import handler_path, path_text

_SNAPSHOTS: Final = "_SNAPSHOTS"
_NONE: Final = -1


@contextmanager
def wait_for_new_checkpoint(
    checkpoint_dir: Any,
    *,
    until_step: int | None = None,
    seconds_to_sleep: int = 1,
    timeout: int | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
    snapshot_dir: Any = None,
    set_immutable: bool | None = None,
    ignore_snapshot_errors: bool | None = True,
) -> Generator[int]:
    """Wait until there is a step, and yield the latest.

    As long as the block runs, no penstock on this machine deletes the step, and there is a snapshot of it:
    a directory of links to its files, or of copies where the file system has none.

    Args:
        checkpoint_dir: Of the steps; it need not be there yet.
        until_step: Wait for this step or a later one.
        seconds_to_sleep: How often to look.
        timeout: Seconds to wait at most; by default for ever.
        timeout_fn: Called then, and every time after; the wait goes on unless it returns True.
        step_prefix: What stands before the number of a step, and an underscore.
        step_format_fixed_length: To how many digits it is filled up with zeros.
        step_name_format: How steps are named instead.
        snapshot_dir: Where snapshots are; by default in `_SNAPSHOTS` among the steps.
        set_immutable: Without effect.
        ignore_snapshot_errors: Whether a snapshot need not be made if files are gone.

    Yields:
        The number of the step, or -1 if the wait is over and there is none.
    """
    root = handler_path(checkpoint_dir)
    names = step_name_format or _standard(step_prefix, step_format_fixed_length)
    snapshots = root / _SNAPSHOTS if snapshot_dir is None else handler_path(snapshot_dir)
    deadline = None if timeout is None else time.time() + timeout
    held: tuple[int, _Held] | None = None
    while held is None:
        step = max(_steps(root), default=None)
        if step is not None and (until_step is None or step >= until_step):
            held = _hold(root, names, step, snapshots, forgiving=bool(ignore_snapshot_errors))
        if held is not None:
            break

        late = deadline is not None and time.time() + seconds_to_sleep > deadline
        if late and (timeout_fn is None or timeout_fn()):
            break

        time.sleep(seconds_to_sleep)

    try:
        yield _NONE if held is None else held[0]
    finally:
        if held is not None:
            held[1].release()


def checkpoints_iterator(
    checkpoint_dir: Any,
    *,
    min_interval_secs: int = 0,
    seconds_to_sleep: int = 1,
    timeout: int | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
    snapshot_dir: Any = None,
    set_immutable: bool | None = None,
    ignore_snapshot_errors: bool | None = True,
) -> Iterator[int]:
    """Yield the latest step again and again, each time that there is a later one.

    Steps that come and are overtaken while the body of the loop runs are skipped. As long as it runs,
    its step is safe; see `wait_for_new_checkpoint`.

    Args:
        checkpoint_dir: See `wait_for_new_checkpoint`.
        min_interval_secs: Seconds from one step to the next look, at least.
        seconds_to_sleep: See there, as for the following.
        timeout: Seconds to wait for a later step; then the iteration ends.
        timeout_fn: Called then; the wait goes on unless it returns True.
        step_prefix: See there.
        step_format_fixed_length: See there.
        step_name_format: See there.
        snapshot_dir: What an earlier iteration left there is removed.
        set_immutable: See there.
        ignore_snapshot_errors: See there.
    """
    root = handler_path(checkpoint_dir)
    snapshots = root / _SNAPSHOTS if snapshot_dir is None else handler_path(snapshot_dir)
    shutil.rmtree(path_text(snapshots), ignore_errors=True)
    latest: int | None = None
    while True:
        with wait_for_new_checkpoint(
            root,
            until_step=None if latest is None else latest + 1,
            seconds_to_sleep=seconds_to_sleep,
            timeout=timeout,
            timeout_fn=timeout_fn,
            step_prefix=step_prefix,
            step_format_fixed_length=step_format_fixed_length,
            step_name_format=step_name_format,
            snapshot_dir=snapshots,
            set_immutable=set_immutable,
            ignore_snapshot_errors=ignore_snapshot_errors,
        ) as step:
            if step == _NONE:
                if timeout_fn is None or timeout_fn():
                    return

                continue

            since, latest = time.time(), step
            yield step

        time.sleep(max(0.0, since + min_interval_secs - time.time()))


class _Held:
    """A step that is not deleted, and its snapshot."""

    def __init__(self, hold: Any, snapshot: str) -> None:
        self._hold = hold
        self._snapshot = snapshot

    def release(self) -> None:
        self._hold.release()
        shutil.rmtree(self._snapshot, ignore_errors=True)


def _standard(prefix: str | None, length: int | None) -> Any:
    # Here, because it imports what refers to this module.
    from penstock.orbax.v0.manager.step_name_formats import standard_name_format

    return standard_name_format(step_prefix=prefix, step_format_fixed_length=length)


def _steps(root: Any) -> list[int]:
    from penstock.orbax.v0.manager.directory_utils import checkpoint_steps

    return checkpoint_steps(root)


def _hold(root: Any, names: Any, step: int, snapshots: Any, *, forgiving: bool) -> tuple[int, _Held] | None:
    """Hold a step and make its snapshot; None if it was deleted meanwhile."""
    try:
        path = path_text(names.find_step(root, step).path)
        hold = LocalStore().hold_reading(path)
    except (StorageError, ValueError):
        if step not in _steps(root):
            return None
        raise

    snapshot = path_text(snapshots / os.path.basename(path))
    try:
        if not os.path.exists(snapshot):
            shutil.copytree(path, snapshot, copy_function=_link)
    except (FileNotFoundError, shutil.Error) as error:
        if not forgiving:
            hold.release()
            raise
        structlog.get_logger("penstock.orbax").warning("step.no_snapshot", step=step, error=repr(error))

    return step, _Held(hold, snapshot)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # of another file system, or one without links
        shutil.copy2(source, target)

    return target
