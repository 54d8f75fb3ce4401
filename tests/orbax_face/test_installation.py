"""`penstock.orbax.install()` and `python -m penstock.orbax`: programs of others, as they are."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint  # and so it is in use here, and in every test that shares the process
import pytest

import penstock.orbax
from penstock.orbax import install
from penstock.orbax.installation import NOT_THERE_YET, PRIVATE_MODULES, OrbaxInUseError

PROGRAM = """\
import json, logging, sys
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
from orbax.checkpoint import checkpoint_utils, v1
from orbax.checkpoint.checkpoint_managers import LatestN
from flax.training import checkpoints, train_state

tree = {"w": jnp.arange(3.0)}
assert jax.experimental.array_serialization.serialization.TS_CONTEXT is not None  # nobody imported it
options = ocp.CheckpointManagerOptions(preservation_policy=LatestN(1))
with ocp.CheckpointManager(sys.argv[1], options=options) as manager:
    for step in range(3):
        manager.save(step, args=ocp.args.StandardSave(tree))
    manager.wait_until_finished()
    steps = list(manager.all_steps())
checkpoints.save_checkpoint(sys.argv[2], tree, step=4)
found = checkpoints.restore_checkpoint(sys.argv[2], target=tree)
modules = sys.modules.items()
names = sorted(name for name, module in modules if module.__name__.startswith("orbax.checkpoint."))
print(json.dumps({
    "argv": sys.argv[1:], "name": __name__, "steps": steps, "same": v1 is ocp_v1,
    "found": found["w"].tolist(), "library": ocp.__name__, "flax": checkpoints.ocp.__name__,
    "real": names,
}))
"""


def run(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=120, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_for_orbax_runs_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    places = [str(tmp_path / "steps"), str(tmp_path / "flax")]

    said = json.loads(run("-m", "penstock.orbax", "program.py", *places, cwd=tmp_path))

    assert said["argv"] == places
    assert said["name"] == "__main__"
    assert said["steps"] == [2]
    assert said["found"] == [0, 1, 2]
    assert said["same"]
    assert said["library"] == said["flax"] == "penstock.orbax"
    assert said["real"] == ["orbax.checkpoint._src", "orbax.checkpoint.experimental"]  # which lead to ours
    with orbax.checkpoint.CheckpointManager(tmp_path / "steps") as manager:
        assert manager.restore(2)["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_a_program_finds_what_python_would_find(tmp_path: Path, as_module: bool) -> None:
    beside = tmp_path if as_module else tmp_path / "folder"  # of a module, what lies where it is called
    beside.mkdir(exist_ok=True)
    (beside / "helper.py").write_text("import orbax.checkpoint as ocp\nname = ocp.__name__\n")
    (beside / "script.py").write_text("import helper, sys\nprint(helper.name, sys.argv[1:], __name__)\n")

    how = ["-m", "script"] if as_module else ["folder/script.py"]
    said = run("-m", "penstock.orbax", *how, "-m", cwd=tmp_path)

    assert said.strip() == "penstock.orbax ['-m'] __main__"


def test_without_a_script_the_usage_is_shown(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock.orbax", "--help"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert done.stderr.startswith("usage: ")


def test_installing_is_refused_while_orbax_is_in_use() -> None:
    with pytest.raises(OrbaxInUseError) as refused:
        install()

    assert __name__ in refused.value.holders
    assert isinstance(refused.value, RuntimeError)
    assert sys.modules["orbax.checkpoint"] is orbax.checkpoint


def test_installing_is_logged_and_taken_back(tmp_path: Path) -> None:
    said = run("-c", TAKEN_BACK, cwd=tmp_path)

    assert said.splitlines() == [
        "orbax.replaced",
        "penstock.orbax",
        "penstock.orbax again",
        "penstock.orbax stands in the place of orbax.checkpoint, and has no '_src.composite'",
        "orbax.checkpoint True",
    ]


TAKEN_BACK = """\
import importlib, logging, sys
import penstock.orbax

class Show(logging.Handler):
    def emit(self, record):
        print(record.penstock["event"])

logging.getLogger("penstock").addHandler(Show())
logging.getLogger("penstock").setLevel("INFO")
real = importlib.import_module("orbax.checkpoint")
name = real.__name__
hidden = id(real)
del real
with penstock.orbax.install():
    print(importlib.import_module("orbax.checkpoint").__name__)
    penstock.orbax.install()
    import orbax.checkpoint.handlers
    print(orbax.checkpoint.__name__, "again")
    del orbax
    try:
        importlib.import_module("orbax.checkpoint._src.composite")
    except ModuleNotFoundError as error:
        print(error)
import orbax.checkpoint
print(orbax.checkpoint.__name__, id(orbax.checkpoint) == hidden)
"""


def test_private_modules_that_programs_import_lead_to_public_names(tmp_path: Path) -> None:
    said = run("-c", PRIVATE, cwd=tmp_path)

    assert said.splitlines() == [
        "penstock.orbax.type_handlers True",
        "True",
        "cannot import name 'ArrayMetadataSerializer'",
        "penstock.orbax stands in the place of Orbax, and has no orbax.checkpoint._src.path.step.nothing",
        "orbax.patch_ignored orbax.checkpoint._src.path.step.is_path_finalized",
        "penstock.orbax.emergency penstock.orbax.emergency",
        "NotImplementedError initialize_multi_tier_checkpointing",
        "False",
    ]


PRIVATE = """\
import logging
import penstock.orbax
installation = penstock.orbax.install()
import orbax.checkpoint as ocp
from orbax.checkpoint._src.arrays import sharding
from orbax.checkpoint._src.serialization.type_handlers import ArrayHandler
import orbax.checkpoint._src.checkpoint_managers.save_decision_policy as policies
print(ocp.type_handlers.__name__, ArrayHandler is ocp.type_handlers.ArrayHandler)
print(
    sharding.construct_maximal_shardings is ocp.arrays.construct_maximal_shardings
    and policies.FixedIntervalPolicy is ocp.checkpoint_managers.FixedIntervalPolicy
)
try:
    from orbax.checkpoint._src.metadata.array_metadata_store import ArrayMetadataSerializer
except ImportError as error:
    print(str(error).partition(" from ")[0])
try:
    ocp._src.path.step.nothing
except AttributeError as error:
    print(error)

class Show(logging.Handler):
    def emit(self, record):
        print(record.penstock["event"], record.penstock["name"])

logging.getLogger("penstock").addHandler(Show())
ocp._src.path.step.is_path_finalized = lambda path: True  # gemma does

import orbax.checkpoint.experimental.emergency.checkpoint_manager as one
import orbax.checkpoint.experimental.emergency.replicator_checkpoint_manager as other
from orbax.checkpoint.experimental.emergency.multi_tier_checkpointing import initialization
print(one.CheckpointManager.__module__, other.ReplicatorCheckpointManager.__module__)
try:
    initialization.initialize_multi_tier_checkpointing()
except NotImplementedError as error:
    print("NotImplementedError", error.name)
installation.remove()
print(hasattr(penstock.orbax, "_src") or hasattr(penstock.orbax, "experimental"))
"""


def test_the_handlers_that_a_checkpoint_names_are_found(tmp_path: Path) -> None:
    """As Simply finds them, and in what either library has saved."""
    for library in (orbax.checkpoint, penstock.orbax):
        names: dict[str, Any] = {
            "array": library.args.ArraySave(np.arange(3)),
            "json": library.args.JsonSave({"a": 1}),
            "key": library.args.JaxRandomKeySave(jax.random.key(1)),
            "state": library.args.NumpyRandomKeySave(np.random.get_state()),
            "tree": library.args.PyTreeSave({"a": np.arange(3)}),
            "standard": library.args.StandardSave({"a": np.arange(3)}),
        }
        with library.Checkpointer(library.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(tmp_path / library.__name__, args=library.args.Composite(**names))

    said = run(
        "-c", LOCATED, str(tmp_path / "orbax.checkpoint"), str(tmp_path / "penstock.orbax"), cwd=tmp_path
    )

    handlers = [
        *("array ArrayCheckpointHandler", "json JsonCheckpointHandler", "key JaxRandomKeyCheckpointHandler"),
        *("standard StandardCheckpointHandler", "state NumpyRandomKeyCheckpointHandler"),
        "tree PyTreeCheckpointHandler",
    ]
    assert said.splitlines() == handlers * 2


LOCATED = """\
import pydoc, sys
import penstock.orbax
penstock.orbax.install()
import orbax.checkpoint as ocp
for path in sys.argv[1:]:
    for name, handler in sorted(ocp.metadata.get_step_metadata(path).item_handlers.items()):
        found = pydoc.locate(handler)
        assert issubclass(found, ocp.CheckpointHandler) and found.__module__.startswith("penstock.")
        print(name, found.__name__)
"""


def test_each_private_module_has_names_of_the_one_of_orbax() -> None:
    for name, places in PRIVATE_MODULES.items():
        theirs = vars(importlib.import_module(f"orbax.checkpoint.{name}"))
        ours = {one for place in places for one in importlib.import_module(f"penstock.orbax.{place}").__all__}
        assert not places or ours & theirs.keys(), name
        assert theirs.keys() >= {*NOT_THERE_YET.get(name, ())}, name


def test_installing_works_where_orbax_is_not_installed(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "class Without(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name.partition('.')[0] == 'orbax' else find(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = Without\n"
        "import penstock.orbax\n"
        "with penstock.orbax.install():\n"
        "    import orbax.checkpoint as ocp\n"
        "    print(ocp.__name__)\n"
        "print('orbax' in sys.modules)\n"
    )

    assert run("-c", script, cwd=tmp_path).split() == ["penstock.orbax", "False"]


def test_flags_of_orbax_can_be_set_while_it_is_replaced_and_orbax_defines_them_afterwards(
    tmp_path: Path,
) -> None:
    script = (
        "import sys\n"
        "from absl import flags\n"
        "import penstock.orbax\n"
        "installed = penstock.orbax.install()\n"
        "import orbax.checkpoint as ocp\n"
        "flag = ocp.multihost.EXPERIMENTAL_ORBAX_USE_DISTRIBUTED_PROCESS_ID\n"
        "flags.FLAGS.mark_as_parsed()\n"
        "before = flag.value\n"
        "flags.FLAGS.experimental_orbax_use_distributed_process_id = True\n"
        "print(before, flag.value, ocp.multihost.use_experimental_distributed_process_id())\n"
        "installed.remove()\n"
        "print(flag.value)\n"
        "for name in [name for name in sys.modules if name.startswith('orbax')]: del sys.modules[name]\n"
        "import orbax.checkpoint\n"
        "print('experimental_orbax_use_distributed_process_id' in flags.FLAGS)\n"
    )

    assert run("-c", script, cwd=tmp_path).split() == ["False", "True", "False", "False", "True"]


def test_pathways_is_told_apart_and_refused() -> None:
    multihost = penstock.orbax.multihost
    assert not multihost.is_pathways_controller()
    assert not multihost.is_pathways_colocated_runtime_active()
    assert not multihost.is_cloud_pathways_persistence_enabled()
    with pytest.raises(NotImplementedError, match="Pathways"):
        multihost.mark_pathways_colocated_runtime_active()
