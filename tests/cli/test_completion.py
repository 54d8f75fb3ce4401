"""What a shell completes: real bash, zsh and fish, by what `completion` prints for each."""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
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


SHELLS = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        'eval "$(penstock completion bash)"; bind "set show-all-if-ambiguous on";',
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        (
            "unsetopt prompt_cr prompt_sp zle_bracketed_paste list_ambiguous; autoload -U compinit; "
            'compinit -u; eval "$(penstock completion zsh)";'
        ),
    ),
}
"""Interactive shells without anybody's settings, and what they are to run first."""


class Shell:
    """An interactive shell."""

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
        said = said.replace("\x1b[?2004h", "")  # zsh marks that it takes pastes, before the line or after
        return re.sub(r".\x08", "", said)  # and takes back the space after a word, and writes it again

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
        return {*words} - {*line.split(), PROMPT.strip(), "--"}  # which zsh has before what a word means


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completed")
    with penstock.sync.CheckpointManager(folder / "run") as manager:
        for step in (1000, 1500, 2000):
            tree = {"params": {"head": step, "body": {"w": [1.0], "b": 2}}, "opt_state": [1, 2]}
            manager.save(step, tree, metrics={"loss": 0.5, "eval": {"accuracy": 1.0}})

    return folder / "run"


def environment_of(folder: Path) -> dict[str, str]:
    """Put the command into a folder, and return what a shell sees that has it on its path."""
    command = folder / "penstock"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
    command.chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("BASH")},
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(SOURCE),
        "PS1": PROMPT,
        "TERM": "dumb",
        "INPUTRC": "/dev/null",
        "HOME": str(folder),
    }


@contextmanager
def opened_shell(name: str, folder: Path) -> Generator[Shell]:
    program, first = SHELLS[name]
    ours, terminal = os.openpty()
    with subprocess.Popen(
        program,
        cwd=folder,
        env=environment_of(folder),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    ) as shell:
        os.close(terminal)
        try:
            opened = Shell(ours)
            opened.said_until(PROMPT)
            opened.run(first)
            yield opened
        finally:
            shell.kill()
            os.close(ours)


LINES = {
    "penstock ": {"show", "ls", "diff", "demo"},
    "penstock show --": {"--unfold", "--histogram", "--only"},
    "penstock show run --step ": {"1000", "1500", "2000"},
    "penstock show run --only params.": {"params.body", "params.head"},
    "penstock cat run params.body.": {"params.body.b", "params.body.w"},
    "penstock show run --item ": {"default", "metrics"},
    "penstock ls run --best ": {"eval/accuracy", "loss"},
    "penstock config reference memory.": {"memory.limit_bytes"},
    "penstock diff run ": {"1000", "1500", "2000"},
}
"""Words that a shell offers for a line."""

NOT_ALL = {"penstock ", "penstock show --", "penstock config reference memory.", "penstock diff run "}
"""Here it offers others, too."""


def check_offers(offered: Callable[[str], set[str]], every: int) -> None:
    """Compare what a shell offers for every n-th of the lines with what is there.

    The words are the command's. So `make test` asks one shell for all of them, and others for a part.
    """
    for line, words in [*LINES.items()][::every]:
        found = offered(line)
        assert words <= found if line in NOT_ALL else words == found


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "every"), [("bash", 1), ("zsh", 3), pytest.param("zsh", 1, marks=pytest.mark.slow)]
)
def test_a_shell_completes_commands_options_steps_leaves_metrics_and_keys(
    run: Path, name: str, every: int
) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name}")

    with opened_shell(name, run.parent) as shell:
        check_offers(shell.offered, every)
        assert shell.completed("penstock show run --step 15") == "penstock show run --step 1500 "
        assert shell.completed("penstock ls run --best lo") == "penstock ls run --best loss "


@pytest.mark.process
@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_fish_completes_the_same(run: Path, every: int) -> None:
    def offered(line: str) -> set[str]:
        asked = f"penstock completion fish | source; complete --do-complete {shlex.quote(line)}"
        said = subprocess.run(
            ["fish", "--no-config", "-c", asked],
            cwd=run.parent, env=environment_of(run.parent), check=True, capture_output=True, text=True,
        )  # fmt: skip
        assert said.stderr == ""
        return {each.partition("\t")[0] for each in said.stdout.splitlines()}  # what a word means follows it

    check_offers(offered, every)
    assert offered("penstock show run --step 15") == {"1500"}


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
