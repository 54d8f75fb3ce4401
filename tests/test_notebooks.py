"""`penstock.sync` in a notebook: cells of a real IPython kernel."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel", reason="a notebook is IPython's kernel: pip install ipykernel")
client = pytest.importorskip("jupyter_client", reason="speaks to the kernel: pip install jupyter_client")

SOURCE = Path(__file__).parents[1] / "src"
PREPARED = """
import asyncio, os, numpy as np, penstock, penstock.sync as ps
from penstock.errors import RunningLoopError
tree = {"a": np.arange(3.0), "b": 1}
"""

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(115),  # a kernel starts, and imports jax
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the client's, when it starts and ends
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
Run = Callable[[str], "Cell"]


class Cell:
    """What a cell printed, and what it raised."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        kinds = [(message["msg_type"], message["content"]) for message in messages]
        self.out = "".join(content["text"] for kind, content in kinds if kind == "stream")
        self.error = next((content for kind, content in kinds if kind == "error"), None)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Run]]:
    folder = tmp_path_factory.mktemp("notebook")
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    manager = client.KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel(cwd=str(folder), env={**os.environ, "PYTHONPATH": path, "IPYTHONDIR": str(folder)})
    talk = manager.blocking_client()
    talk.start_channels()
    talk.wait_for_ready(timeout=100)

    def run(code: str) -> Cell:
        messages: list[dict[str, Any]] = []
        talk.execute_interactive(code, output_hook=messages.append, timeout=100)
        return Cell(messages)

    assert run(PREPARED).error is None
    yield manager, run
    talk.stop_channels()
    if manager.is_alive():
        manager.shutdown_kernel(now=True)


def test_functions_work_in_a_cell(kernel: tuple[Any, Run]) -> None:
    _, run = kernel

    assert run("ps.save('one', tree); print(ps.restore('one')['a'])").out == "[0. 1. 2.]\n"
    # So they do in a cell that awaits something, which IPython runs as a task.
    assert run("await asyncio.sleep(0)\nprint(ps.metadata('one').nbytes)").out == "32\n"


def test_objects_persist_over_cells(kernel: tuple[Any, Run]) -> None:
    _, run = kernel

    assert run("c = ps.Checkpointer(); s = c.save('kept', tree)").error is None
    assert run("print(s.result().n_leaves)").out == "2\n"
    assert run("print(c.restore('kept')['b']); c.close(); c.close()").out == "1\n"
    closed = run("c.restore('kept')")
    assert closed.error is not None
    assert closed.error["ename"] == "ClosedError"


def test_a_cell_that_is_run_again_finds_its_root_free(kernel: tuple[Any, Run]) -> None:
    _, run = kernel

    for step in (1, 2):  # the first manager goes when its name gets the second one
        cell = run(f"m = ps.CheckpointManager('run'); m.save({step}, tree); m.wait(); print(m.latest_step())")
        assert (cell.error, cell.out) == (None, f"{step}\n")

    assert run("m.close(); m = None; print(ps.CheckpointManager('run').all_steps())").out == "(1, 2)\n"


def test_other_running_loops_are_refused(kernel: tuple[Any, Run]) -> None:
    _, run = kernel

    in_a_task = run("""
async def work():
    try:
        ps.save('never', tree)
    except RunningLoopError as error:
        print('refused')
await asyncio.create_task(work())
""")
    assert in_a_task.out == "refused\n"
    in_a_thread = run("""
import threading
thread = threading.Thread(target=lambda: asyncio.run(work()))
thread.start(); thread.join()
""")
    assert in_a_thread.out == "refused\n"
    assert run("print(os.path.exists('never'))").out == "False\n"


@pytest.mark.parametrize(
    "code",
    [
        "ps.restore('nothing')",
        "await penstock.restore('nothing')",
        "async with penstock.Checkpointer() as c:\n    await c.restore('nothing')",
        "penstock.orbax.StandardCheckpointer().restore(os.path.abspath('nothing'))",
    ],
)
def test_tracebacks_show_the_cell_and_one_function_of_ours(kernel: tuple[Any, Run], code: str) -> None:
    _, run = kernel

    error = run(f"import penstock.orbax\n{code}").error

    assert error is not None
    assert error["ename"] == "NotACheckpointError"
    shown = "\n".join(error["traceback"])
    assert "restore" in shown
    assert "site-packages" not in shown
    assert shown.count("src/penstock/") == 1
    assert len(shown.splitlines()) < 20


def test_progress_shows_in_a_cell(kernel: tuple[Any, Run]) -> None:
    _, run = kernel
    if run("import rich").error is not None:
        pytest.skip("rich draws the bar: pip install rich")

    cell = run("ps.save('shown', tree, progress='rich'); print(ps.restore('shown', progress=True)['b'])")

    assert cell.error is None
    assert "save shown" in cell.out
    assert "restore shown" in cell.out
    assert "━" in cell.out


def test_what_is_open_ends_with_the_interpreter(kernel: tuple[Any, Run]) -> None:
    manager, run = kernel

    opened = run("print(os.getcwd()); c = ps.Checkpointer(); s = c.save('last', tree)")
    assert opened.error is None
    manager.shutdown_wait_time = 100.0  # until it is killed
    manager.shutdown_kernel()  # asks it to end, and waits

    assert (Path(opened.out.splitlines()[0]) / "last" / "_METADATA").exists()
