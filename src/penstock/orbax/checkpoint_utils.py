"""The module `checkpoint_utils` of Orbax's API: waiting for steps that another process saves. Blocking."""

from __future__ import annotations

__all__ = (
    "PLACEHOLDER",
    "checkpoints_iterator",
    "construct_restore_args",
    "to_shape_dtype_struct",
    "wait_for_new_checkpoint",
)

import errno
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, final

from penstock import handlers as built_in
from penstock import kernel
from penstock.embedding import blocking
from penstock.errors import StorageError
from penstock.orbax.arrays import to_shape_dtype_struct
from penstock.orbax.item_files import bucket_url, handler_path, path_text, place_of, store_at
from penstock.orbax.standard_handler import construct_restore_args
from penstock.orbax.step import STEP_NAME, NameFormat, standard_name_format
from penstock.orbax.type_handlers import PLACEHOLDER
from penstock.steps import Watch

_SNAPSHOTS: Final = "_SNAPSHOTS"

_NONE: Final = -1

_LEAST_S: Final = 0.001


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
    """Wait until a step exists, and yield the latest.

    While the block runs, no penstock on this machine deletes the step, and a snapshot of it exists:
    a directory of links to its files, or of copies where the file system has no links. In a bucket there is
    no snapshot, and who deletes the step does not wait: a restore of it may then fail.

    Args:
        checkpoint_dir: The directory of the steps, which need not exist yet.
        until_step: Wait for this step or a later one.
        seconds_to_sleep: The time between two looks.
        timeout: The longest wait in seconds; by default there is no limit.
        timeout_fn: Called after the timeout at every look. The wait goes on unless it returns True.
        step_prefix: What precedes the number of a step, followed by an underscore.
        step_format_fixed_length: The number of digits, filled up with zeros.
        step_name_format: How steps are named, in place of the other two.
        snapshot_dir: The directory of snapshots; by default `_SNAPSHOTS` among the steps. Not for buckets.
        set_immutable: Has no effect.
        ignore_snapshot_errors: Whether to go on without a snapshot if files have disappeared.

    Yields:
        The number of the step, or -1 if the wait ended without one.
    """
    root = place_of(checkpoint_dir)
    names = step_name_format or standard_name_format(
        step_prefix=step_prefix, step_format_fixed_length=step_format_fixed_length
    )
    snapshots = _snapshots_of(root, snapshot_dir)
    is_over = _Timeout(timeout, seconds_to_sleep, timeout_fn)
    steps = _later_steps(root, names, until_step, max(seconds_to_sleep, _LEAST_S), is_over)
    step = blocking.run_sync(anext, steps, _NONE)
    snapshot = None
    try:
        if step != _NONE and snapshots is not None:
            snapshot = _snapshot(
                path_text(names.find_step(root, step).path), snapshots, forgiving=bool(ignore_snapshot_errors)
            )
        yield step
    finally:
        blocking.run_sync(steps.aclose)
        _remove(snapshot)


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
    """Yield the latest step each time that there is a later one.

    Steps that are overtaken while the body of the loop runs are skipped. While it runs, its step is
    safe; see `wait_for_new_checkpoint`.

    Args:
        checkpoint_dir: See `wait_for_new_checkpoint`.
        min_interval_secs: The least time from one step to the next look.
        seconds_to_sleep: See `wait_for_new_checkpoint`.
        timeout: The longest wait in seconds for a later step, after which the iteration ends.
        timeout_fn: Called after the timeout. The wait goes on unless it returns True.
        step_prefix: See `wait_for_new_checkpoint`.
        step_format_fixed_length: See `wait_for_new_checkpoint`.
        step_name_format: See `wait_for_new_checkpoint`.
        snapshot_dir: Emptied first of what an earlier iteration left.
        set_immutable: See `wait_for_new_checkpoint`.
        ignore_snapshot_errors: See `wait_for_new_checkpoint`.
    """
    root = place_of(checkpoint_dir)
    snapshots = _snapshots_of(root, snapshot_dir)
    _remove(snapshots)
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


def _later_steps(
    root: Any, names: NameFormat[Any], until_step: int | None, interval_s: float, is_over: Callable[[], bool]
) -> Watch:
    """Watch for the latest step, `until_step` or a later one."""
    return Watch(
        store_at(root),
        kernel.Threads(1),
        path_text(root),
        _AnyNames(names),
        after=None if until_step is None else until_step - 1,
        latest_only=True,
        until=is_over,
        interval_s=interval_s,
    )


@final
class _Timeout:
    """Return whether a wait is over; called when there is no step yet."""

    def __init__(self, timeout_s: float | None, sleep_s: float, decides: Callable[[], bool] | None) -> None:
        self._last_look_s = None if timeout_s is None else time.monotonic() + timeout_s - sleep_s
        self._decides = decides

    def __call__(self) -> bool:
        if self._last_look_s is None or time.monotonic() <= self._last_look_s:
            return False

        return self._decides is None or self._decides()


@final
class _AnyNames:
    """Finds steps under any name that ends in a number, preferring the names of a format."""

    def __init__(self, names: NameFormat[Any]) -> None:
        self._names = names

    def name(self, step: int, /) -> str:
        return self._names.build_name(step)

    def step(self, name: str, /) -> int | None:
        found = STEP_NAME.fullmatch(name)
        return None if found is None else int(found[1])


def _snapshots_of(root: Any, chosen: Any) -> Any | None:
    """Return the directory of snapshots; None in a bucket, which has no links."""
    if bucket_url(root) is not None:
        return None

    return root / _SNAPSHOTS if chosen is None else handler_path(chosen)


def _snapshot(path: str, snapshots: Any, *, forgiving: bool) -> str:
    """Share the files of a step with a directory among the snapshots; return that directory."""
    snapshot = path_text(snapshots / os.path.basename(path))
    store = built_in.LocalStore()
    try:
        if store.kind(snapshot) is None:
            _share_tree(store, path, snapshot)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        if not forgiving:  # what Orbax raises, whose copy is `shutil.copytree`
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
        kernel.get_logger().warning("step.no_snapshot", step=os.path.basename(path), error=repr(error))

    return snapshot


def _share_tree(store: built_in.LocalStore, source: str, target: str) -> None:
    """Make a directory with the files of another one, its folders included. Files are shared, not copied."""
    store.make_directory(target)
    folders = store.list_folders(source)
    for name in store.list_directory(source):
        inner, outer = os.path.join(target, name), os.path.join(source, name)
        if name in folders:
            _share_tree(store, outer, inner)
        else:
            _share_file(store, outer, inner)


def _share_file(store: built_in.LocalStore, source: str, target: str) -> None:
    try:
        store.share(source, target)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            raise
        shutil.copyfile(source, target)  # another file system, or one without links


def _remove(directory: Any | None) -> None:
    """Remove a snapshot, if there is one. What cannot be removed stays: it is of no harm."""
    if directory is not None:
        with suppress(StorageError):
            built_in.LocalStore().remove_tree(path_text(directory))
