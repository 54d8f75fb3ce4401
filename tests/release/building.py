"""Builds the sdist and the wheel twice, from two copies of the tree, and compares every byte."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

from tests.release.places import ROOT, WORK, quietly, tools

__all__ = ("build", "normalised")

DIST = ROOT / "dist"


def tracked_files() -> list[str]:
    """What git keeps, but for what was deleted and not yet committed."""
    run = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = run.stdout.decode().split("\0")
    return [name for name in names if name and (os.path.lexists(ROOT / name))]


def copied(folder: Path, umask: int) -> Path:
    """Copy the tree, with the rights that a user of such a umask would have and no old times."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
        if not (folder / name).is_symlink():
            (folder / name).chmod(0o666 & ~umask)

    return folder


def normalised(sdist: bytes, epoch: int) -> bytes:
    """The same sdist with sorted members that have one time, one owner and usual rights."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(sdist)) as old,
        gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=epoch) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            content = old.extractfile(member) if member.isfile() else None
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, content)

    return packed.getvalue()


def built(source: Path, out: Path, epoch: int) -> dict[str, bytes]:
    """The files that are built of one copy: the sdist of the tree, and the wheel of the sdist."""
    shutil.rmtree(out, ignore_errors=True)
    env = {"SOURCE_DATE_EPOCH": str(epoch)}
    build_sdist = (tools(), "-m", "build", "--no-isolation", "--sdist", "--outdir", out, source)
    quietly(*build_sdist, env=env)
    (sdist,) = out.glob("*.tar.gz")
    sdist.write_bytes(normalised(sdist.read_bytes(), epoch))
    with tarfile.open(sdist) as packed:
        packed.extractall(out / "unpacked", filter="data")
    (unpacked,) = (out / "unpacked").iterdir()
    quietly(tools(), "-m", "build", "--no-isolation", "--wheel", "--outdir", out, unpacked, env=env)
    (wheel,) = out.glob("*.whl")
    return {path.name: path.read_bytes() for path in (sdist, wheel)}


def build() -> Path:
    """Build both files into `dist/`, and return the wheel.

    Raises:
        SystemExit: If two builds differ, or twine finds fault with what will be shown of the project.
    """
    WORK.mkdir(parents=True, exist_ok=True)
    epoch = int(quietly("git", "log", "-1", "--format=%ct", cwd=ROOT))
    first = built(copied(WORK / "one", 0o022), WORK / "one-dist", epoch)
    second = built(copied(WORK / "another place", 0o077), WORK / "another-dist", epoch)
    if differing := [name for name in first if first[name] != second.get(name)]:
        raise SystemExit(
            f"two builds differ: {', '.join(differing)}; compare one-dist and another-dist in {WORK}"
        )

    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    for name, content in first.items():
        (DIST / name).write_bytes(content)
        print(f"  {hashlib.sha256(content).hexdigest()}  {name}, {len(content):,} bytes, twice the same")
    print(
        " ",
        quietly(tools(), "-m", "twine", "check", "--strict", *DIST.iterdir()).strip().replace("\n", "\n  "),
    )
    return wheel_of(DIST)


def wheel_of(folder: Path) -> Path:
    """The wheel that lies there."""
    (found,) = folder.glob("*.whl")
    return found
