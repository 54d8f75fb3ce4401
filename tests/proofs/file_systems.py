"""The recorded courses on tmpfs and overlay, mounted for this, and on any folder. `make file-systems`.

A mount needs no right but that of a user namespace: this program starts itself again below `unshare -Urm`.
Overlay gets a checkpoint and a root of steps in its lower layer, too, as in the image of a container: those
can be read, and linked to; whether they can be replaced is up to the file system. If they cannot, the call
fails and they stay.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
from tests.proofs.recorded_courses import (
    COURSES,
    LAYOUTS,
    Recording,
    pairs,
)

from penstock.errors import StorageError
from penstock.steps import KeepLast

MOUNTED = ("tmpfs", "overlay")


def mount(kind: str, place: Path) -> Path:
    """Mount a file system below `place`, the lower layer of an overlay filled before; return where."""
    run = Path(tempfile.mkdtemp(dir=place))
    _call("mount", "-t", "tmpfs", "none", str(run))
    if kind == "tmpfs":
        return run

    lower, upper, work, merged = (run / name for name in ("lower", "upper", "work", "merged"))
    for path in (lower, upper, work, merged):
        path.mkdir()

    anyio.run(fill, lower)
    options = f"lowerdir={lower},upperdir={upper},workdir={work},userxattr"
    _call("mount", "-t", "overlay", "overlay", "-o", options, str(merged))
    return merged


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


async def fill(folder: Path) -> None:
    """Save a checkpoint and a root of steps."""
    recording = Recording(folder, LAYOUTS["ocdbt"])
    async with recording.checkpointer() as checkpointer:
        await recording.save(checkpointer, "old", 1)

    async with recording.manager() as manager:
        for step in (1, 2):
            await recording.save_step(manager, step)


async def finish(folder: Path, course: str, layout: str) -> None:
    """Run a course in a folder, which is made, and check its end."""
    folder.mkdir()
    recording = Recording(folder, LAYOUTS[layout])
    await COURSES[course](recording)
    for name, numbers in recording.allowed.items():
        path = folder / name if "new" in recording.allowed else folder / "run" / name
        (expected,) = numbers
        found = await number_at(recording, path)
        assert found == expected, f"{course}, {layout}: {name} holds {found}, not {expected}"


async def number_at(recording: Recording, path: Path) -> int | None:
    """Say which state is at a path; None if nothing is there."""
    if not path.exists():
        return None

    async with recording.checkpointer() as checkpointer:
        number = await recording.number_at(checkpointer, path)
        assert number is not None, f"{path} is a mixture"
        return number


async def use_lower_layer(folder: Path, say: Callable[[str], object]) -> None:
    """Read, link to, replace and delete what lies in the lower layer."""
    recording = Recording(folder, LAYOUTS["ocdbt"])
    async with recording.checkpointer() as checkpointer:
        await recording.save(checkpointer, "linked", 3, base=folder / "old")
        assert await number_at(recording, folder / "linked") == 3
        await _may_be_refused(
            recording.save(checkpointer, "old", 4, overwrite=True), "overwriting in the lower layer", say
        )
        assert await number_at(recording, folder / "old") in (1, 4)

    async with recording.manager(keep=KeepLast(2)) as manager:
        await recording.save_step(manager, 3)
        await manager.wait()
        await _may_be_refused(manager.delete(2), "deleting a step in the lower layer", say)
        found = {step: await number_at(recording, folder / "run" / str(step)) for step in manager.all_steps()}

    assert not [path.name for path in (*folder.iterdir(), *(folder / "run").iterdir()) if "-tmp" in path.name]
    assert found.items() <= {1: 1, 2: 2, 3: 3}.items()
    assert 3 in found
    on_disk = {int(path.name) for path in (folder / "run").iterdir() if path.name.isdigit()}
    assert {*found} == on_disk


async def _may_be_refused(work: Awaitable[None], what: str, say: Callable[[str], object]) -> None:
    try:
        await work
    except StorageError as error:
        say(f"{what} is refused: {error}")
    else:
        say(f"{what} works")


def run_again_below_mounts() -> int:
    """Start this program again where it may mount; return its exit status."""
    with tempfile.TemporaryDirectory(prefix="penstock-mounts-", ignore_cleanup_errors=True) as place:
        command = ["unshare", "-Urm", sys.executable, "-m", "tests.proofs.file_systems"]
        return subprocess.run([*command, *sys.argv[1:], "--inside", place], check=False).returncode


def main() -> None:
    """Parse the command line; mount, and run the courses."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--on", nargs="*", default=list(MOUNTED), help="tmpfs, overlay, or folders")
    parser.add_argument("--courses", nargs="*", default=list(COURSES), choices=list(COURSES))
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    inside: Path | None = options.inside
    if inside is None:
        sys.exit(run_again_below_mounts())

    for where in options.on:
        folder = mount(where, inside) if where in MOUNTED else Path(where)
        for at, (course, layout) in enumerate(pairs(options.courses, options.layouts)):
            anyio.run(finish, folder / f"course-{at}", course, layout)

        sys.stdout.write(f"{where}: {len(pairs(options.courses, options.layouts))} courses\n")
        if where == "overlay":
            anyio.run(use_lower_layer, folder, lambda line: sys.stdout.write(f"overlay: {line}\n"))


if __name__ == "__main__":
    main()
