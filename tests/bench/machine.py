"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import penstock

PACKAGES = ("jax", "jaxlib", "orbax-checkpoint", "tensorstore", "safetensors", "numpy", "anyio")
ROOT = Path(__file__).parents[2]


def facts(folder: Path) -> dict[str, Any]:
    """Describe this machine, what is installed on it, and the file system of `folder`."""
    device, mounted, kind = file_system(folder)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _after("/proc/cpuinfo", "model name"),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "huge_pages": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": platform.release(),
        "file_system": f"{kind} on {device} at {mounted}",
        "python": sys.version.split()[0],
        "versions": {"penstock": penstock.__version__, **{name: _version(name) for name in PACKAGES}},
    }


def commit() -> str:
    """The commit of this checkout, with a plus if files differ from it; empty outside of one."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def file_system(folder: Path) -> tuple[str, str, str]:
    """Device, mount point and type of the file system that `folder` is on."""
    place = folder.resolve()
    found = ("?", "?", "?")
    for line in _text("/proc/self/mounts").splitlines():
        device, mounted, kind = line.split()[:3]
        if place.is_relative_to(mounted) and len(mounted) >= len(found[1] if found[1] != "?" else ""):
            found = (device, mounted, kind)

    return found


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return run.stdout.strip()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _after(path: str, key: str) -> str:
    lines = (line.partition(":") for line in _text(path).splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "")


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
