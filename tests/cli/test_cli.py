"""The command line: what it says, what it returns, and what it does not import."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.unsealed import unseal

import penstock
from penstock.cli import main
from penstock.handlers import LocalStore
from penstock.testing import FaultyStore

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspect") / "step_7"
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))  # type: ignore[no-untyped-call]  # jax's
    tree = {
        "weights": jax.device_put(jnp.ones((4, 3), jnp.bfloat16), sharding),
        "key": jax.random.key(3),
        "step": 7,
        "name": "run",
    }
    penstock.sync.save(path, tree, custom_metadata={"loss": 0.5})
    return path


@pytest.mark.process
@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_version_and_help_load_no_array_library(argument: str) -> None:
    program = f"""
import sys
from penstock.cli import main
try:
    main([{argument!r}])
except SystemExit as end:
    print(end.code, *[name for name in ("jax", "numpy", "rich", "tensorstore") if name in sys.modules])
"""
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=SOURCE
    )

    *said, last = run.stdout.splitlines()
    assert last == "0"
    assert penstock.__version__ in said[0] or "demo" in "".join(said)


_NEVER = ("tensorstore", "matplotlib", "rich", "pygments", "argcomplete", "structlog", "difflib")
_OF_SAVES = (
    "penstock.checkpointer",
    "penstock.reports",
    "penstock.config.config",
    "penstock.steps.keep_policies",
)
"""What a command that looks needs not: jax besides, which takes a second of the processor."""


@pytest.mark.thinned(2)
@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "untouched"),
    [
        (["--help"], ["penstock.config", "penstock.checkpointer", "numpy"]),
        (["config", "show"], ["penstock.checkpointer", "numpy"]),
        (["ls", "{}"], [*_NEVER, *_OF_SAVES, "asyncio", "penstock.handlers.layouts.auto_layout"]),
        (
            ["show", "{}"],
            [*_NEVER, *_OF_SAVES, "asyncio", "penstock.stages.reading", "penstock.kernel.messages"],
        ),
        (["du", "{}"], [*_NEVER, *_OF_SAVES, "asyncio", "penstock.kernel.messages"]),
        (["verify", "{}"], [*_NEVER, "penstock.checkpointer.engine"]),
        (["cat", "{}"], [*_NEVER, *_OF_SAVES]),
        (["diff", "{}", "{}"], [*_NEVER, *_OF_SAVES]),
        (["show", "{}", "--histogram"], [*_NEVER, *_OF_SAVES]),
    ],
)
def test_a_command_that_only_looks_loads_little(
    checkpoint: Path, arguments: list[str], untouched: list[str]
) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "penstock"]
    given = [argument.format(checkpoint) for argument in arguments]
    run = subprocess.run([*command, *given], check=True, capture_output=True, text=True, cwd=SOURCE)

    loaded = [line.rpartition("|")[2].strip() for line in run.stderr.splitlines()]
    assert "penstock.cli" in loaded
    for name in (*untouched, "jax"):
        assert not [other for other in loaded if other == name or other.startswith(f"{name}.")], name


def test_convert_there_and_back(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, back = str(tmp_path / "m.safetensors"), str(tmp_path / "back")

    assert main(["convert", str(checkpoint), there, "--metadata", "by=me=you", "--memory", "1MiB"]) == 0
    assert main(["convert", there, back]) == 0
    assert main(["convert", there, str(tmp_path / "flat"), "--flat"]) == 0

    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{there}: 4 leaves, 40 B, in ")
    assert penstock.sync.metadata(back).custom_metadata == {"loss": 0.5, "by": "me=you"}
    assert penstock.sync.restore(back)["name"] == "run"


def test_convert_into_shards(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--format", "safetensors", "--max-shard-bytes", "20", "--overwrite"]
    for _ in range(2):
        assert main(["convert", str(checkpoint), str(tmp_path / "m"), *arguments]) == 0

    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-shard-bytes", "5Gb"], "--max-shard-bytes: '5Gb' is not a number of bytes"),
        (["--metadata", "alone"], "--metadata alone: not of the form KEY=TEXT"),
        (["--max-shard-bytes", "5GB"], "--max-shard-bytes is for safetensors; give --format"),
    ],
)
def test_convert_says_in_a_line_what_is_wrong(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["convert", str(checkpoint), str(tmp_path / "x"), *arguments]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"penstock: {said}")
    assert list(tmp_path.iterdir()) == []


def test_verify_says_what_is_damaged(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "c"))
    assert main(["verify", str(copy)]) == 0
    assert "intact" in capsys.readouterr().out

    for file in (copy / "d").iterdir():
        data = bytearray(file.read_bytes())
        if len(data) == 40:  # the arrays; the other is the index
            data[0] ^= 1
            file.write_bytes(data)

    assert main(["verify", str(copy)]) == 1
    said = capsys.readouterr().out
    assert "not those that were written" in said
    assert "DAMAGED, 1 of its leaves" in said
    assert any(path in said for path in ("['weights']", "['key']", "['step']"))

    assert main(["verify", "--json", str(copy)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["intact"] is False
    assert document["damages"][0]["offset"] == 0
    assert len(document["damages"][0]["key_paths"]) == 1


def drop_integrity(path: Path) -> None:
    unseal(path)
    (path / "_PENSTOCK_INTEGRITY").unlink()
    (path / "commit_success.txt").write_text("Checkpoint commit was successful")


def flip_manifest(path: Path) -> None:
    data = bytearray((path / "manifest.ocdbt").read_bytes())
    data[40] ^= 1
    (path / "manifest.ocdbt").write_bytes(data)


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (lambda _: None, 0, "intact"),
        (flip_manifest, 1, "DAMAGED"),
        (shutil.rmtree, 3, "NO CHECKPOINT"),
        (drop_integrity, 4, "NOT CHECKED AS A WHOLE"),
    ],
)
def test_verify_has_a_status_for_each_result(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
    status: int,
    said: str,
) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "c"))
    change(copy)

    assert main(["verify", str(copy)]) == status
    assert f"{copy}: {said}" in capsys.readouterr().out
    assert main(["verify", "--json", str(copy)]) == status
    assert json.loads(capsys.readouterr().out)["intact"] is (status == 0)


def test_verify_says_what_the_medium_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FaultyStore(LocalStore())
    store.fail_on("file.read_at")
    monkeypatch.setattr("penstock.stores.store_finder.LocalStore", lambda **_: store)

    assert main(["verify", str(checkpoint)]) == 5
    assert "could not be read: Input/output error" in capsys.readouterr().out


def test_seal_records_what_verify_then_compares(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "c"))
    (copy / "_PENSTOCK_INTEGRITY").unlink()
    (copy / "commit_success.txt").write_text("Checkpoint commit was successful")
    assert main(["verify", str(copy)]) == 4

    assert main(["seal", str(copy)]) == 0
    assert f"{copy}: 1 record written (" in capsys.readouterr().out
    assert main(["verify", str(copy)]) == 0
    capsys.readouterr()
    assert main(["seal", "--json", str(copy)]) == 0
    assert json.loads(capsys.readouterr().out)["unchanged"] == [str(copy)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("show", ["the following arguments are required: PATH", "try: penstock show --help"]),
        ("shwo .", ["there is no command 'shwo'; did you mean 'show'?", "try: penstock --help"]),
        ("cat . --only x", ["cat has no option --only", "try: penstock cat --help"]),
        ("show . --onyl x", ["show has no option --onyl; did you mean --only?", "try: penstock show --help"]),
        ("show . x", ["show takes no argument 'x'", "try: penstock show --help"]),
        ("", ["the following arguments are required: COMMAND", "try: penstock --help"]),
    ],
)
def test_wrong_usage_ends_with_status_2_and_two_lines(
    capsys: pytest.CaptureFixture[str], words: str, said: list[str]
) -> None:
    try:
        status: object = main(words.split())
    except SystemExit as end:
        status = end.code

    assert status == 2
    assert capsys.readouterr().err.splitlines() == [f"penstock: {said[0]}", said[1]]


@pytest.mark.parametrize("traceback", ["", "full"])
def test_an_expected_error_is_one_line_unless_all_of_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, traceback: str
) -> None:
    monkeypatch.setenv("PENSTOCK_TRACEBACK", traceback)

    assert main(["show", str(tmp_path / "nothing")]) == 1

    *more, last = capsys.readouterr().err.splitlines()
    assert last == f"penstock: {tmp_path / 'nothing'}: does not exist"
    assert more[:1] == (["Traceback (most recent call last):"] if traceback else [])


def test_a_step_of_a_manager_is_converted_to_its_one_tree_with_its_metrics(tmp_path: Path) -> None:
    tree = {"w": np.arange(3.0)}
    with penstock.sync.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, tree, metrics={"loss": 0.5}, custom_metadata={"by": "me"})

    for name in ("m.safetensors", "m.npz"):
        assert main(["convert", str(tmp_path / "run" / "1"), str(tmp_path / name)]) == 0

    restored = penstock.sync.restore(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(restored["w"], tree["w"])
    metadata = penstock.sync.metadata(tmp_path / "m.safetensors").custom_metadata
    assert metadata == {"by": "me", "metrics": {"loss": 0.5}}
    assert main(["diff", str(tmp_path / "run"), str(tmp_path / "m.safetensors")]) == 0


def test_a_step_of_several_items_is_not_converted_to_one_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = penstock.items.Composite(state={"w": np.ones(2)}, about=penstock.items.Json({"a": 1}))
    with penstock.sync.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, items, metrics={"loss": 0.5})

    assert main(["convert", str(tmp_path / "run" / "1"), str(tmp_path / "m.safetensors")]) == 1
    assert "convert one of them, as in --item state" in capsys.readouterr().err


@pytest.mark.process
def test_a_reader_that_leaves_is_no_failure(checkpoint: Path) -> None:
    command = f"{sys.executable} -m penstock show {checkpoint} | true; echo ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True, cwd=SOURCE)

    assert (run.stdout, run.stderr) == ("0\n", "")


@pytest.mark.process
def test_an_installed_penstock_has_the_demo(tmp_path: Path) -> None:
    shutil.copytree(SOURCE / "penstock", tmp_path / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "penstock.cli", "demo", "--steps", "2", "--every", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env=environment)

    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("penstock: it takes three saves at least")


@pytest.mark.parametrize(
    "words",
    [
        "ls",
        "show",
        "du",
        "cat",
        "diff . .",
        "repair . new",
        "convert . new",
        "cp . new",
        "rm",
        "gc",
        "seal",
        "watch --timeout 0",
    ],
)
@pytest.mark.parametrize("name", ["notes.txt", "arrays.npz"])
def test_a_file_that_is_no_checkpoint_is_refused_with_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, name: str
) -> None:
    file = tmp_path / name
    file.write_text("hello")
    command, _, rest = words.partition(" ")
    given = rest.replace(".", str(file)) if "." in rest else f"{rest} {file}"

    status = main([command, *given.replace("new", str(tmp_path / "new")).split()])
    said = capsys.readouterr().err

    assert status != 0 or command == "gc"
    assert "Not a directory" not in said
    assert [path.name for path in tmp_path.iterdir()] == [name]
