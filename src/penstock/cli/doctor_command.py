"""`penstock doctor`: says what this machine and a file system give to checkpoints."""

from __future__ import annotations

__all__ = ("configure", "run", "settings")

import argparse
import fcntl
import json
import os
import platform
import re
import resource
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple, final

from penstock.cli.terminal import Output, Table, Tone, Toned, format_bytes
from penstock.config.config import Config
from penstock.handlers.stores.file_system import rename_only_to_absent
from penstock.handlers.stores.keeper.keeper_options import KeeperOptions
from penstock.handlers.stores.keeper.keeper_store import KeeperStore
from penstock.handlers.stores.keeper.messages import default_socket
from penstock.handlers.stores.publishing.paths import root_of, scheme_of
from penstock.keeper.process import running_keepers
from penstock.kernel.errors import KeeperLostError, PenstockError
from penstock.kernel.memory.memory_limit import auto_memory_limit, free_memory
from penstock.kernel.protocols.stores import Store
from penstock.kernel.words import counted
from penstock.steps.tier_record import levels_of
from penstock.stores.store_finder import store_of

_EXTRAS: Final = {
    "rich": "cli",
    "obstore": "cloud",
    "watchfiles": "watch",
    "google.protobuf": "proto",
    "starlette": "ui",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.description = (
        "Say what this machine and the file system of PATH give: direct I/O, huge pages, renames in one "
        "step, links, locks, limits, free space, versions. A small file is written below PATH and removed, "
        "or where PATH would be made. Of a bucket or a keeper: if it can be written and read. "
        "Settings from the environment are listed, secrets masked. The exit status is 1 if something is "
        "missing that penstock needs. In a pipe: one line for each, with tabs between what, value, verdict "
        "and remark."
    )
    parser.add_argument(
        "path", metavar="PATH", nargs="?", default=".", help="where checkpoints would go (here)"
    )
    parser.add_argument("--json", action="store_true", help="as one JSON document")


def run(options: argparse.Namespace, output: Output) -> int:
    """Print what was found.

    Raises:
        OSError: If nothing can be written at the path.
    """
    store, path = store_of(options.path)
    of_path = list(file_system_facts(path) if scheme_of(path) is None else store_facts(store, path))
    can_look = all(fact.verdict != "missing" for fact in of_path)
    facts = [
        *of_path,
        *(tier_facts(store, path) if can_look else ()),
        *keeper_facts(Config.load().store.keeper),
        *machine_facts(),
        *_packages(),
        *settings(),
    ]
    if options.json:
        output.say(json.dumps([fact._asdict() for fact in facts], indent=2))
    else:
        plain = [tuple(fact) for fact in facts]
        rows = [(fact.what, fact.value, _toned(fact.verdict), fact.remark) for fact in facts]
        output.table(Table(("what", "value", "", "remark"), rows, n_left=4, plain=plain))

    return 1 if any(fact.verdict == "missing" for fact in facts) else 0


_TONES: Final[Mapping[str, Tone]] = {"ok": "good", "slower": "warning", "missing": "bad"}


def _toned(verdict: str) -> str:
    return Toned(verdict, _TONES[verdict]) if verdict in _TONES else verdict


def _packages() -> list[Fact]:
    found: list[Fact] = []
    for module, extra in _EXTRAS.items():
        is_there = _is_there(module)
        remark = "" if is_there else f"pip install 'penstock[{extra}]'"
        found.append(
            Fact(
                module, "installed" if is_there else "not installed", "ok" if is_there else "optional", remark
            )
        )

    return found


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


_SECRET: Final = re.compile(r"key|token|secret|password|credential|auth", re.IGNORECASE)
_PASSWORD_IN_URL: Final = re.compile(r"(?<=://)[^/@\s]+@")
_FEW_FILES: Final = 1024
_PROBE: Final = ".penstock-doctor-"


@final
class Fact(NamedTuple):
    """One thing that was looked at."""

    what: str
    value: str
    verdict: str  #: `ok`, `slower`, `missing`, `optional`, or empty for what is only shown
    remark: str = ""  #: what it means, where it is not ok


def file_system_facts(path: str) -> Iterator[Fact]:
    """Try what penstock uses of the file system at `path`, in its own directory that is removed.

    Raises:
        OSError: If nothing can be written there.
    """
    place = path
    while not os.path.exists(place):  # the first save makes what is missing
        place = os.path.dirname(place)

    with tempfile.TemporaryDirectory(prefix=_PROBE, dir=place) as folder:
        here = Path(folder)
        status = os.statvfs(folder)
        yield Fact("path", path, "ok", "" if place == path else f"is not there yet; tried in {place}")
        yield Fact("file system", _file_system(place), "")
        yield Fact("free", format_bytes(status.f_bavail * status.f_frsize), "")
        yield _tried("direct I/O", _opens_direct(here), "slower", "arrays go through the page cache")
        yield _tried("rename in one step", _renames(here), "slower", "a name is claimed in two steps")
        yield _tried("hard links", _links(here), "slower", "unchanged files are copied, not shared")
        yield _tried("locks", _locks(here), "slower", "a claim file takes their place")
        yield _tried("preallocation", _allocates(here), "slower", "files grow as they are written")


def store_facts(store: Store, path: str) -> Iterator[Fact]:
    """Write a small file in a bucket or a keeper, read it, and remove it."""
    yield Fact("path", path, "")
    place = path if store.directories is None else root_of(path)  # or empty directories would stay above it
    folder, data = f"{place.rstrip('/')}/{_PROBE}{secrets.token_hex(4)}", secrets.token_bytes(64)
    began = time.perf_counter()
    try:
        store.make_directory(folder)
        try:
            store.write_file(f"{folder}/probe", data, create=True)
            is_same = store.read_file(f"{folder}/probe") == data
        finally:
            store.remove_tree(folder)

        seconds, free = time.perf_counter() - began, store.free_bytes(path)
    except PenstockError as error:
        yield Fact("write and read", "no", "missing", str(error))
        return

    yield _tried("write and read", is_same, "missing", "what is read is not what was written")
    yield Fact("a small file", f"{seconds * 1000:.1f} ms", "", "written, read and removed")
    if free is not None:
        yield Fact("free", format_bytes(free), "")
    if store.relies_on_single_writer():
        yield Fact("writers", "one", "slower", "the store cannot tell two programs that save to one path")


def tier_facts(store: Store, root: str) -> Iterator[Fact]:
    """Tell which tiers the run at a path has, if it is one, and whether they can be seen from here."""
    levels = levels_of(store, root)
    newest = max([step for level in levels for step in level.steps], default=None)
    for level in levels if len(levels) > 1 else ():
        name = level.label if level.label == "root" else f"tier {level.label}"
        if level.store is None:
            yield Fact(name, level.path, "slower", f"{level.problem}: its steps are not seen from here")
        else:
            latest = max(level.steps, default=None)
            where = "no step yet" if latest is None else f"newest step {latest}"
            yield Fact(name, level.path, "ok", where if latest == newest else f"{where}, of {newest}")


def keeper_facts(options: KeeperOptions) -> Iterator[Fact]:
    """Tell which keepers this user has here, and which of them programs with these settings find.

    One that listens elsewhere has steps that nothing started from here sees.
    """
    used = options.socket or default_socket()
    running = running_keepers()
    for socket in sorted({*running, used}, key=lambda each: (each != used, each)):
        try:
            status = KeeperStore(socket, answer_s=options.answer_s).status()
        except KeeperLostError as lost:
            if socket in running:
                yield Fact("keeper", socket, "slower", f"does not answer: {lost.problem}")
            continue

        whole = [step for step in status.steps if step.state == "whole"]
        holds = f"holds {counted(len(whole), 'step')}"
        if socket == used:
            yield Fact("keeper", socket, "ok", holds)
        else:
            why = "programs with another XDG_RUNTIME_DIR use it"
            advice = f"{why}; [store.keeper] socket names one for all"
            yield Fact("other keeper", socket, "slower", f"{holds} that are not seen from here: {advice}")


def machine_facts() -> Iterator[Fact]:
    """Tell memory, limits and versions. Loads none of the libraries."""
    yield Fact(
        "processors",
        str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "",
    )
    yield Fact("memory free", format_bytes(free_memory()), "")
    yield Fact("memory budget", format_bytes(auto_memory_limit()), "", "of memory_limit='auto'")
    yield _huge_pages()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _FEW_FILES
    yield Fact("open files", str(soft), "slower" if few else "ok", "raise it with ulimit -n" if few else "")
    yield Fact("python", platform.python_version(), "ok")
    for name in ("penstock", "jax", "jaxlib", "tensorstore", "numpy", "anyio"):
        try:
            yield Fact(name, version(name), "ok")
        except PackageNotFoundError:
            yield Fact(name, "not installed", "ok" if name == "penstock" else "missing")


def settings(environment: Mapping[str, str] = os.environ) -> Iterator[Fact]:
    """Tell the variables that penstock, jax and clients of buckets read, without secrets."""
    for name in sorted(environment):
        if name.startswith(("PENSTOCK_", "JAX_", "XLA_", "AWS_", "GOOGLE_", "AZURE_")):
            value = environment[name]
            shown = "********" if _SECRET.search(name) and value else _PASSWORD_IN_URL.sub("********@", value)
            yield Fact(name, shown, "")


def _tried(what: str, works: bool, otherwise: str, remark: str) -> Fact:
    return Fact(what, "yes", "ok") if works else Fact(what, "no", otherwise, remark)


def _opens_direct(folder: Path) -> bool:
    flag = getattr(os, "O_DIRECT", 0)
    try:
        number = os.open(folder / "direct", os.O_CREAT | os.O_WRONLY | flag, 0o600)
    except OSError:
        return False

    os.close(number)
    return bool(flag)


def _renames(folder: Path) -> bool:
    (folder / "from").mkdir()
    try:
        return rename_only_to_absent(str(folder / "from"), str(folder / "to"))
    except OSError:
        return False


def _links(folder: Path) -> bool:
    (folder / "one").touch()
    with suppress(OSError):
        os.link(folder / "one", folder / "two")
        return (folder / "two").stat().st_nlink == 2

    return False


def _locks(folder: Path) -> bool:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(number)

    return True


def _allocates(folder: Path) -> bool:
    with open(folder / "long", "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, 2**20)
        except (OSError, AttributeError):
            return False

    return True


def _huge_pages() -> Fact:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        chosen = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return Fact("huge pages", "unknown", "")

    value = chosen[1] if chosen else "unknown"
    return Fact(
        "huge pages",
        value,
        "slower" if value == "never" else "ok",
        "restores fault in small pages" * (value == "never"),
    )


def _file_system(path: str) -> str:
    """Return the type of the file system that the longest mount point above `path` has."""
    best, kind = "", "unknown"
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, point, found, *_ = line.split(" ")
            above = point.encode().decode("unicode_escape")
            if (path == above or path.startswith(above.rstrip("/") + "/")) and len(above) >= len(best):
                best, kind = above, found

    return kind
