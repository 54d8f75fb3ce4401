"""The layout rules of the repository, kept by test rather than by review.

A room is a folder of modules. Its `__init__` is its door, which may show what lies in other rooms: it counts
as a module, but not as a part of the room.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

import penstock
import penstock.embedding

ROOT = Path(__file__).parents[1]
FACE = ROOT / "src" / "penstock"
PARTS = ("kernel", "stages", "handlers")
# Which parts of penstock a part may import. The face, src/penstock, composes them all.
MAY_IMPORT = {
    "kernel": {"kernel"},
    "stages": {"kernel", "stages"},
    "handlers": {"kernel", "handlers"},
}
KERNEL_MAY_IMPORT = {"anyio", "structlog", "penstock", *sys.stdlib_module_names}
KERNEL_MAY_PLOT = {"stage_report.py"}  # once `report.plot()` is called


def modules_of(part: str) -> list[Path]:
    return sorted((ROOT / part).rglob("*.py"))


def library() -> list[Path]:
    parts = [path for part in PARTS for path in modules_of(part)]
    face = [path for path in FACE.rglob("*.py") if path.relative_to(FACE).parts[0] not in PARTS]
    return parts + sorted(face)


def inside_penstock(path: Path) -> tuple[str, ...]:
    """Where a module lies once installed: kernel/x.py is penstock/kernel/x.py."""
    return ("penstock", *path.relative_to(FACE if path.is_relative_to(FACE) else ROOT).parts)


@cache
def imports(path: Path) -> tuple[tuple[str, str], ...]:
    """Return each imported name, as `package.module` at least, with the place it is imported at."""
    return tuple(found_imports(path))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements of a module: a tenth of its nodes."""
    ahead = [tree]
    while ahead:
        node = ahead.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            ahead.extend(getattr(node, field, ()))


def found_imports(path: Path) -> Iterator[tuple[str, str]]:
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"


def module_of(path: Path) -> str:
    parts = inside_penstock(path.with_suffix(""))
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph() -> dict[str, set[str]]:
    """Say which of our modules each one imports, for type checkers only and inside functions, too."""
    files = {module_of(path): path for path in library()}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        named = {name if name in files else name.rpartition(".")[0] for name, _ in imports(path)}
        graph[module] = named & files.keys() - {module}

    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the sets of two or more nodes that all reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        ahead = list(graph[start])
        reached[start] = found = set[str]()
        while ahead:
            node = ahead.pop()
            if node not in found:
                found.add(node)
                ahead.extend(graph.get(node, ()))

    together = {frozenset(b for b in found if a in reached.get(b, ())) for a, found in reached.items()}
    return [set(cycle) for cycle in together if len(cycle) > 1]


def head(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("part", PARTS)
def test_src_shows_each_part_as_a_relative_link_to_the_top_level_folder(part: str) -> None:
    link = FACE / part

    assert link.is_symlink(), "check out with symlinks: git config core.symlinks true"
    assert link.readlink() == Path("..", "..", part)
    assert link.resolve() == ROOT / part


def test_every_package_on_disk_is_listed_for_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(inside_penstock(path)[:-1]) for path in library()}

    assert len(listed) == len(set(listed))
    assert set(listed) == found


def test_every_folder_with_modules_is_a_package() -> None:
    without = [path.parent for path in library() if not (path.parent / "__init__.py").is_file()]

    assert without == []


@pytest.mark.parametrize("part", PARTS)
def test_imports_point_down(part: str) -> None:
    wrong = [
        place
        for path in modules_of(part)
        for name, place in imports(path)
        if head(name) == "penstock" and (name + ".").split(".")[1] not in MAY_IMPORT[part]
    ]

    assert wrong == []


def test_the_kernel_imports_only_anyio_structlog_and_the_standard_library() -> None:
    wrong = [
        place
        for path in modules_of("kernel")
        for name, place in imports(path)
        if head(name) not in KERNEL_MAY_IMPORT
        and not (head(name) == "matplotlib" and path.name in KERNEL_MAY_PLOT)
    ]

    assert wrong == []


KERNEL_ROOMS = {
    "concurrency", "memory", "messages", "pipeline", "plugins", "protocols", "reports",
}  # fmt: skip
"""What a program without checkpoints could use, and the protocols. Rooms may leave it; none is added."""


def test_the_kernel_has_no_other_rooms() -> None:
    rooms = {path.parent.name for path in (ROOT / "kernel").glob("*/__init__.py")}

    assert rooms <= KERNEL_ROOMS


def test_the_library_does_not_import_asyncio() -> None:
    wrong = [place for path in library() for name, place in imports(path) if head(name) == "asyncio"]

    assert wrong == []


def test_nothing_is_imported_around_penstock() -> None:
    # `kernel.x` beside `penstock.kernel.x` would be a second module with a second set of classes.
    everything = library() + sorted((ROOT / "tests").rglob("*.py"))
    wrong = [place for path in everything for name, place in imports(path) if head(name) in {*PARTS, ""}]

    assert wrong == []


PUBLIC_DOORS = ("errors", "handlers", "items", "kernel", "pipelines", "steps")
"""The public modules of `penstock` that a face may import, with their public names, next to the root and the
seam."""


def is_of_the_seam(name: str) -> bool:
    """Whether the Orbax face may import this name of penstock: its own, the seam's, or a public one."""
    _, *inner = name.split(".")
    if inner[0] in {"orbax", "embedding"}:
        return True
    if len(inner) == 1:
        return inner[0] in {*penstock.__all__, *PUBLIC_DOORS}

    door, public = inner[0], ".".join(inner[1:])
    return door in PUBLIC_DOORS and public in importlib.import_module(f"penstock.{door}").__all__


def test_the_orbax_face_imports_the_seam_and_public_names_alone() -> None:
    face = [path for path in library() if path.is_relative_to(FACE / "orbax")]
    wrong = [
        place
        for path in face
        for name, place in imports(path)
        if head(name) == "penstock" and not is_of_the_seam(name)
    ]

    assert face
    assert wrong == []


def test_what_is_not_of_the_seam_is_told_apart() -> None:
    assert is_of_the_seam("penstock.Checkpointer")
    assert is_of_the_seam("penstock.errors.ConfigError")
    assert not is_of_the_seam("penstock.kernel.errors.ConfigError")
    assert not is_of_the_seam("penstock.steps.step_names")
    assert not is_of_the_seam("penstock.stages")
    assert not is_of_the_seam("penstock.kernel.pipeline")
    assert is_of_the_seam("penstock.kernel.Store")
    assert list(names_through_doors("from penstock import handlers as h, kernel\nkernel.Store\nh.a.b")) == [
        "penstock.kernel.Store",
        "penstock.handlers.a",
    ]


def names_through_doors(text: str) -> Iterator[str]:
    """Yield the names that a module takes from the public modules that it has imported whole."""
    nodes = list(ast.walk(ast.parse(text)))
    doors = {
        alias.asname or alias.name: alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "penstock"
        for alias in node.names
        if alias.name in PUBLIC_DOORS
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in doors:
            yield f"penstock.{doors[node.value.id]}.{node.attr}"


def test_the_orbax_face_takes_public_names_alone_from_the_public_modules() -> None:
    face = [path for path in library() if path.is_relative_to(FACE / "orbax")]
    taken = {(path.name, name) for path in face for name in names_through_doors(path.read_text())}

    assert taken
    assert {(place, name) for place, name in taken if not is_of_the_seam(name)} == set()


def test_the_seam_has_a_sentence_for_each_name_and_no_name_that_no_face_uses() -> None:
    used = {
        name.removeprefix("penstock.embedding.")
        for path in library()
        if path.is_relative_to(FACE / "orbax")
        for name, _ in imports(path)
        if name.startswith("penstock.embedding.")
    }
    described = re.findall(r"^    (\w+): [A-Z]", penstock.embedding.__doc__ or "", re.MULTILINE)

    assert set(penstock.embedding.__all__) == used
    assert sorted(described) == sorted(penstock.embedding.__all__)


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}) == [{"b", "c"}]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_files_import_each_other() -> None:
    assert cycles(import_graph()) == []


def test_no_rooms_import_each_other() -> None:
    # What an `__init__` imports does not count: it shows the names of rooms further in, and says nothing
    # about what the modules beside it need. Who imports from an `__init__` imports from its room.
    graph = import_graph()
    doors = {module_of(path) for path in library() if path.name == "__init__.py"}
    rooms: dict[str, set[str]] = defaultdict(set)
    for module, others in graph.items():
        if module not in doors:
            room = module.rpartition(".")[0]
            rooms[room] |= {other if other in doors else other.rpartition(".")[0] for other in others} - {
                room
            }

    assert cycles(rooms) == []


IS_ABOUT = {"configuration": "config", "orbax_face": "orbax"}
"""Folders of tests that have another name than the room that they are about."""

IS_ALSO_ABOUT = {
    "stages/rules": ("handlers.formats", "handlers.leaves", "handlers.stores", "kernel"),
    "bench/codecs.py": ("handlers.formats", "handlers.leaves", "kernel"),
    "bench/contenders/raw.py": ("kernel.memory",),
    "bench/steps.py": ("handlers.formats",),
    "bench/tiers.py": ("handlers.stores", "keeper"),
    "checkpointer/strange_checkpoints.py": ("handlers.formats", "handlers.ocdbt"),
    "checkpointer/test_base_links.py": ("stages.reuse",),
    "kernel/pipeline/test_runner.py": ("kernel.concurrency",),
    "tools/test_convert_together.py": ("handlers.coordinators",),
    "tuning/test_failures.py": ("reports",),
    "verification/test_copying.py": ("kernel.concurrency",),
    "checkpointer/test_description.py": ("handlers.formats",),
    "checkpointer/test_direct_io_saves.py": ("handlers.stores",),
    "checkpointer/test_documents_within_the_budget.py": ("handlers.ocdbt",),
    "checkpointer/test_explained_runs.py": ("reports",),
    "checkpointer/test_failed_syncs.py": ("handlers.stores",),
    "checkpointer/test_hostile_checkpoints.py": ("handlers.formats",),
    "checkpointer/test_linked_paths.py": ("handlers.stores",),
    "checkpointer/test_other_programs.py": ("handlers.stores",),
    "checkpointer/test_staging.py": ("reports",),
    "cli": ("inspection",),
    "collecting.py": ("event_loop",),
    "contract/ending.py": ("handlers.stores",),
    "demo": ("cli",),
    "docs/test_docs_bottleneck.py": ("reports",),
    "docs/test_docs_tuning.py": ("reports",),
    "handlers/formats": ("handlers.formats", "handlers.ocdbt"),
    "handlers/formats/codecs": ("handlers.leaves",),
    "handlers/formats/safetensors/test_many_tensors.py": ("stages.planning",),
    "handlers/layouts/test_discovery.py": ("inspection",),
    "handlers/leaves/test_spill.py": ("handlers.stores", "kernel.memory"),
    "interop": ("handlers.formats",),
    "keeper": ("handlers.stores", "kernel.memory"),
    "keeper/test_memory_tier.py": ("handlers.formats", "steps"),
    "kernel/messages/test_read_leaves.py": ("kernel.concurrency",),
    "kernel/protocols/test_shared_checks.py": ("handlers.formats",),
    "orbax_face/test_joint_builds.py": ("checkpointer",),
    "orbax_face/test_running_loop.py": ("blocking",),
    "orbax_face/test_type_registry.py": ("checkpointer", "handlers.leaves"),
    "processes": ("handlers.formats", "orbax"),
    "proofs": ("checkpointer", "handlers", "keeper", "kernel", "stages", "testing"),
    "proofs/forked_keepers.py": ("steps",),
    "proofs/tiers.py": ("steps", "stores"),
    "rewriting": ("handlers.formats", "stores", "verification"),
    "release/test_release.py": ("handlers.formats",),
    "stages/joint/test_part_columns.py": ("handlers", "stages.messages"),
    "stages/pytree/test_description_cache.py": ("handlers.formats",),
    "stages/stage_rig.py": ("handlers.stores",),
    "stages/test_device_to_host.py": ("kernel.memory",),
    "stages/test_write_arranged.py": ("handlers.formats",),
    "steps/test_finishing.py": ("handlers.coordinators",),
    "steps/test_tier_record.py": ("handlers.formats", "handlers.layouts"),
    "steps/test_unmarked_steps.py": ("inspection",),
    "tools/test_convert.py": ("handlers.formats",),
    "tools/test_repair_documents.py": ("handlers.ocdbt",),
    "tools/test_repair_safetensors.py": ("handlers.formats",),
    "tools/test_replaced_sources.py": ("cli", "inspection"),
    "tuning/test_search.py": ("config", "kernel.memory", "reports"),
    "typing/test_signatures.py": ("checkpointer",),
    "ui": ("inspection",),
    "verification": ("handlers.formats",),
}
"""Tests, and folders of tests, that are about modules of other rooms, too."""


def rooms_of_tests(path: Path) -> Iterator[str]:
    """The rooms that a module of tests is about: that of its folder, and those of `IS_ALSO_ABOUT`."""
    inside = path.relative_to(ROOT / "tests").parts
    if len(inside) > 1:
        yield ".".join((IS_ABOUT.get(inside[0], inside[0]), *inside[1:-1]))
    for end in range(1, len(inside) + 1):
        yield from IS_ALSO_ABOUT.get("/".join(inside[:end]), ())


def is_in(module: str, room: str) -> bool:
    return f"{module}.".startswith(f"{room}.")


def test_tests_import_from_doors_and_from_the_rooms_that_they_are_about() -> None:
    # So files can move without a change of all tests. A module at the top of a part is a room of one file.
    files = {module_of(path).removeprefix("penstock."): path for path in library()}
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        about = [*rooms_of_tests(path)]
        for name, place in imports(path):
            module = name.removeprefix("penstock.")
            if module not in files:
                module = module.rpartition(".")[0]

            room = module.rpartition(".")[0]
            if module not in files or files[module].name == "__init__.py" or room in {"", *PARTS}:
                continue
            if not any(is_in(room, each) or is_in(each, room) for each in about):
                wrong.append(place)

    assert wrong == []


def test_what_tests_are_also_about_is_there() -> None:
    rooms = {module_of(path.parent / "room.py").rpartition(".")[0] for path in library()}

    assert [name for name in IS_ALSO_ABOUT if not (ROOT / "tests" / name).exists()] == []
    assert {f"penstock.{room}" for rooms in IS_ALSO_ABOUT.values() for room in rooms} <= rooms


@pytest.mark.process
@pytest.mark.parametrize(
    ("also", "loaded"),
    [
        ("", []),
        # These are here to show that the first one could fail.
        (", numpy", ["numpy"]),
        (", jax, tensorstore", ["jax", "numpy", "tensorstore"]),
    ],
)
def test_importing_penstock_loads_no_array_library(also: str, loaded: list[str]) -> None:
    program = f"""
import penstock{also}, sys
print(*[name for name in ("jax", "numpy", "tensorstore") if name in sys.modules])
"""
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT / "src"
    )

    assert run.stdout.split() == loaded


@pytest.mark.process
@pytest.mark.timeout(115)  # pip fetches the build backend; faulthandler ends the run at 120 s
def test_the_sdist_and_the_wheel_hold_the_library_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in (*PARTS, "src", "tests"):
        # The links are copied as links, as git would.
        no_builds = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=no_builds)

    sdist = built_sdist(source, tmp_path)
    wheel = built_wheel(sdist, tmp_path)
    with tarfile.open(sdist) as tar:
        packed = {PurePosixPath(name) for name in tar.getnames()}
    held = {PurePosixPath(name) for name in zipfile.ZipFile(wheel).namelist()}

    expected = {PurePosixPath(*inside_penstock(path)) for path in library()}
    expected.add(PurePosixPath("penstock", "py.typed"))
    page = [path for path in (FACE / "ui" / "page").iterdir() if path.is_file()]
    expected |= {PurePosixPath("penstock", "ui", "page", path.name) for path in page}
    assert {".css", ".html", ".js"} <= {path.suffix for path in page}
    recipes = [path.name for path in (FACE / "recipes").glob("*.toml")]
    expected |= {PurePosixPath("penstock", "recipes", name) for name in recipes}
    assert "llama.toml" in recipes
    info = f"penstock-{penstock.__version__}.dist-info"
    assert {path for path in held if path.parts[0] == "penstock"} == expected
    assert {path.parts[0] for path in held} == {"penstock", info}
    assert PurePosixPath(info, "licenses", "LICENSE") in held

    top = PurePosixPath(f"penstock-{penstock.__version__}")
    papers = {
        "CHANGELOG.md",
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
        "setup.cfg",
    }
    assert {path.parts[1] for path in packed if path != top} == {*papers, "src"}
    sources = {path.relative_to(top / "src") for path in packed if path.suffix and "src" in path.parts}
    assert {path for path in sources if path.parts[0] == "penstock"} == expected


BUILD = """
import os, sys
from setuptools import build_meta
os.chdir(sys.argv[1])
print(build_meta.build_sdist(sys.argv[2]))
"""


def built_sdist(source: Path, folder: Path) -> Path:
    """Build the sdist with the backend of pyproject.toml, which stays in `folder/tools` for the wheel."""
    needed = tomllib.loads((source / "pyproject.toml").read_text())["build-system"]["requires"]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    tools = folder / "tools"
    install = [*pip, "install", "--no-compile", "--target", str(tools), *needed]
    subprocess.run(install, check=True, stdin=subprocess.DEVNULL)
    environment = {**os.environ, "PYTHONPATH": str(tools)}
    build = [sys.executable, "-c", BUILD, str(source), str(folder)]
    subprocess.run(build, check=True, env=environment, stdout=subprocess.DEVNULL)
    (sdist,) = folder.glob("penstock-*.tar.gz")
    return sdist


def built_wheel(sdist: Path, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "tools")}
    subprocess.run(
        [*pip, "--wheel-dir", str(folder), str(sdist)], check=True, env=environment, stdin=subprocess.DEVNULL
    )
    (wheel,) = folder.glob("penstock-*.whl")
    return wheel
