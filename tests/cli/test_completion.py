"""What a shell completes: a real bash on a pseudo-terminal, by what `completion bash` prints."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.conftest import Said, Stored

import penstock
from penstock.cli.completers import Completer, config_keys, item_names, leaf_names, metric_names, step_numbers

SOURCE = Path(__file__).parents[2] / "src"
PROMPT = "ready> "
_PATIENCE_S = 60.0


class Shell:
    """An interactive bash without anybody's settings."""

    def __init__(self, ours: int) -> None:
        self._ours = ours

    def said_until(self, text: str) -> str:
        """Read until `text` was said."""
        said, until = "", time.monotonic() + _PATIENCE_S
        while text not in said:
            if not select.select([self._ours], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"no {text!r} in {said!r}")

            said += os.read(self._ours, 65536).decode()

        return said

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def completed(self, line: str) -> str:
        """Return what a line becomes where one word fits."""
        self.type(f"{line}\t#")  # what is typed behind it shows where it ends
        said = self.said_until("#").partition("#")[0]
        self.run("\x15")
        return said

    def run(self, command: str) -> None:
        """Run a command, and wait for what it prints, which is not how it is typed, and for the prompt."""
        self.type(f"{command} echo do''ne\n")
        self.said_until(f"done\r\n{PROMPT}")

    def offered(self, line: str) -> set[str]:
        """Return the words that are listed where several fit."""
        self.type(f"{line}\t")
        said = self.said_until(f"{PROMPT}{line}")
        self.run("\x15")  # which erases the line
        words = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]|\x07", "", said).split()
        return {*words} - {*line.split(), PROMPT.strip()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completed")
    with penstock.sync.CheckpointManager(folder / "run") as manager:
        for step in (1000, 1500, 2000):
            tree = {"params": {"head": step, "body": {"w": [1.0], "b": 2}}, "opt_state": [1, 2]}
            manager.save(step, tree, metrics={"loss": 0.5, "eval": {"accuracy": 1.0}})

    return folder / "run"


@contextmanager
def opened_shell(folder: Path) -> Generator[Shell]:
    command = folder / "penstock"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
    command.chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("BASH")},
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(SOURCE),
        "PS1": PROMPT,
        "TERM": "dumb",
        "INPUTRC": "/dev/null",
        "HOME": str(folder),
    }
    ours, terminal = os.openpty()
    with subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        cwd=folder,
        env=environment,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    ) as shell:
        os.close(terminal)
        try:
            opened = Shell(ours)
            opened.said_until(PROMPT)
            opened.run('eval "$(penstock completion bash)"; bind "set show-all-if-ambiguous on";')
            yield opened
        finally:
            shell.kill()
            os.close(ours)


@pytest.mark.process
def test_bash_completes_commands_options_steps_leaves_metrics_and_keys(run: Path) -> None:
    with opened_shell(run.parent) as shell:
        assert {"show", "ls", "diff", "demo"} <= shell.offered("penstock ")
        assert {"--unfold", "--histogram", "--only"} <= shell.offered("penstock show --")
        assert shell.offered("penstock show run --step ") == {"1000", "1500", "2000"}
        assert shell.offered("penstock show run --only params.") == {"params.body", "params.head"}
        assert shell.offered("penstock cat run params.body.") == {"params.body.b", "params.body.w"}
        assert shell.offered("penstock show run --item ") == {"default", "metrics"}
        assert shell.offered("penstock ls run --best ") == {"eval/accuracy", "loss"}
        assert shell.offered("penstock config reference memory.") >= {"memory.limit_bytes"}
        assert shell.offered("penstock diff run ") >= {"1000", "1500", "2000"}
        assert shell.completed("penstock show run --step 15") == "penstock show run --step 1500 "
        assert shell.completed("penstock ls run --best lo") == "penstock ls run --best loss "


def offered(complete: Completer, prefix: str, **words: object) -> list[str]:
    return list(complete(prefix=prefix, parsed_args=Namespace(**words)))


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("", ["opt_state", "params", "loss", "eval"]),
        ("par", ["params", "params.body", "params.head"]),  # what follows keeps the word open
        ("params.h", ["params.head"]),
        ("params.body", ["params.body", "params.body.b", "params.body.w"]),
        ("x", []),
    ],
)
def test_leaves_are_offered_node_by_node(run: Path, prefix: str, words: list[str]) -> None:
    assert offered(leaf_names, prefix, path=str(run), step=None, item=None) == words


@pytest.mark.parametrize("complete", [step_numbers, leaf_names, item_names, metric_names])
@pytest.mark.parametrize("path", [None, "nothing", "s3://bucket/run"])
def test_nothing_is_offered_where_nothing_can_be_looked_at(complete: Completer, path: str | None) -> None:
    assert offered(complete, "", path=path) == []


def test_keys_of_the_configuration_are_offered_table_by_table() -> None:
    assert offered(config_keys, "mem")[:2] == ["memory", "memory.limit_bytes"]
    assert "save.write.concurrency" in offered(config_keys, "save.write.")


def test_steps_are_offered_for_whatever_names_the_run(stored: Stored) -> None:
    for name in ("path", "first", "source"):
        assert offered(step_numbers, "", **{name: str(stored.run)}) == ["0", "1", "2"]
    assert offered(step_numbers, "2", path=[str(stored.run)]) == ["2"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_printed_for_each_shell(call: Callable[..., Said], shell: str) -> None:
    said = call("completion", shell)

    assert said.status == 0
    assert "penstock" in said.out
