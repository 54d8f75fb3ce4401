"""What every test runs under: eight CPU devices, strict dtypes, two event loops, no endless wait."""

from __future__ import annotations

import faulthandler
import functools
import gc
import inspect
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.collecting import count_all_as_old
from tests.event_loops import ASYNCIO, TRIO, Backend
from tests.memory_folder import MEMORY, ON_DISK, in_memory
from tests.thinning import kept
from tests.xla_settings import xla_flags

# jax reads these once, when it is first imported. Without importing it here, tests that need no jax
# stay quick.
if "jax" in sys.modules:
    message = "jax was imported before tests/conftest.py could configure it (by a pytest plugin?)"
    raise RuntimeError(message)
os.environ["XLA_FLAGS"] = f"{xla_flags(8)} {os.environ.get('XLA_FLAGS', '')}".strip()
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # set it to run the suite on an accelerator
# Of numpy and scipy: where one is imported, threads wait for work in a loop, which costs each process that
# tests start a tenth of a second of another processor.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import anyio
import pytest
import structlog
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import is_hypothesis_test, settings

gc.disable()  # while test modules are imported: what they make stays, and this takes an eighth of the time

ASYNC_TIMEOUT_S = 60.0

BOTH_LOOPS = (
    "tests/kernel/",
    "tests/contract/",
    "tests/steps/test_manager",
    "tests/steps/test_step_watch.py",
    "tests/handlers/coordinators/",
    "tests/handlers/stores/publishing/",
    "tests/checkpointer/test_checkpointer.py",
    "tests/checkpointer/test_hanging_reads.py",
    "tests/checkpointer/test_staging.py",
    "tests/checkpointer/test_streaming.py",
)
"""Here it matters which event loop runs. Elsewhere its second run shows the same again, and is slow. That a
stage is cancelled is shown on both, too: in that they differ."""

DISK = (
    "tests/handlers/leaves/test_spill.py",
    "tests/handlers/stores/test_",
    "tests/checkpointer/test_direct_io_saves.py",
    "tests/checkpointer/test_failed_syncs.py",
    "tests/checkpointer/test_full_disks.py",
    "tests/checkpointer/test_linked_paths.py",
    "tests/checkpointer/test_mapped_restore.py",
    "tests/checkpointer/test_without_locks.py",
)
"""These are about a file system and write to a disk. Others write to memory, where that can be."""

N_EXAMPLES = "PENSTOCK_TESTS_EXAMPLES"

# Wall-clock deadlines on a shared machine fail at random; pytest's own timeout stands. `make test` tries
# other examples each time; `make test-slow` tries more of them at once.
settings.register_profile(
    "penstock", deadline=None, print_blob=True, max_examples=int(os.environ.get(N_EXAMPLES, "30"))
)
settings.load_profile("penstock")


@pytest.fixture(scope="module", params=[ASYNCIO, TRIO], ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Backend:
    """Every async test runs on both event loops; on asyncio in debug mode, if the environment says so."""
    backend: Backend = request.param
    return backend


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In place of pytest's own, in memory if possible, but for tests of a disk.

    Half the time of a test that saves is spent waiting for a disk. `make test-all` uses one for all.
    """
    if request.node.nodeid.startswith(DISK) or os.environ.get(ON_DISK) or not in_memory():
        yield tmp_path_factory.mktemp("folder")
        return

    made = Path(tempfile.mkdtemp(prefix="penstock-", dir=MEMORY))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _nothing_old_is_collected_again() -> None:
    count_all_as_old()  # here all test modules are imported
    gc.enable()


@pytest.fixture(autouse=True)
def _structlog_stays_as_it_is() -> Iterator[None]:
    """Once configured in this process, as by `capture_logs`, it takes the events of all later tests."""
    yield
    left = structlog.is_configured()
    structlog.reset_defaults()
    assert not left, "the test leaves structlog configured"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Cancel an async test that hangs, before pytest-timeout interrupts it from outside.

    The error then names the line that waited. A `timeout` marker of more than 120 s moves this limit too.
    """
    function = pyfuncitem.obj
    if not inspect.iscoroutinefunction(function):
        return (yield)

    marker = pyfuncitem.get_closest_marker("timeout")
    limit_s = max(ASYNC_TIMEOUT_S, float(marker.args[0]) / 2) if marker and marker.args else ASYNC_TIMEOUT_S

    @functools.wraps(function)
    async def limited(**arguments: object) -> None:
        with anyio.fail_after(limit_s):
            await function(**arguments)

    pyfuncitem.obj = limited
    try:
        return (yield)
    finally:
        pyfuncitem.obj = function


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a test whose limit is longer than most have its worker ended that much later, too.

    `faulthandler_timeout` is the same for all tests. It ends the process, with what that was still to run.
    """
    marker, usual_s = item.get_closest_marker("timeout"), float(item.config.getini("timeout"))
    if marker is None or not marker.args or marker.args[0] <= usual_s:
        return

    later_s = marker.args[0] - usual_s + float(item.config.getini("faulthandler_timeout"))
    # pytest sees to it that this is taken back, as it has begun the same for each test.
    faulthandler.dump_traceback_later(later_s, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Call slow what repeats another test: most tests on trio, sweeps, and most cases of a thinned test."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        # What takes longest is first. A worker begins with hundreds of tests in a row, and so has all that
        # wait for one job: no other worker waits for it.
        items.sort(key=lambda item: not item.nodeid.startswith("tests/processes/"))

    thinned: defaultdict[object, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if _parameters(item).get("anyio_backend") == TRIO and not _runs_on_both(item):
            item.add_marker(pytest.mark.slow)

        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.examples)

        if item.get_closest_marker("sweep") and "plain" not in item.name:
            item.add_marker(pytest.mark.slow)

        if item.get_closest_marker("thinned") is not None:
            loop = str(_parameters(item).get("anyio_backend"))
            thinned[item.parent, getattr(item, "originalname", None), loop].append(item)

    for cases in thinned.values():
        marker = cases[0].get_closest_marker("thinned")
        assert marker is not None
        for item, is_kept in zip(cases, kept([_choices(item) for item in cases], *marker.args), strict=True):
            if not is_kept:
                item.add_marker(pytest.mark.slow)


def _parameters(item: pytest.Item) -> Mapping[str, object]:
    return getattr(getattr(item, "callspec", None), "params", {})


def _choices(item: pytest.Item) -> Mapping[str, int]:
    return getattr(getattr(item, "callspec", None), "indices", {})


def _runs_on_both(item: pytest.Item) -> bool:
    is_cancelled_stage = item.nodeid.startswith("tests/stages/") and "cancel" in item.name
    return is_cancelled_stage or item.nodeid.startswith(BOTH_LOOPS)


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Any, Any], None]:
    """Fail unless two trees have the same nodes and leaf types, dtypes and shardings, bit for bit."""
    return _assert_same


def _assert_same(found: Any, expected: Any) -> None:
    import jax

    def flat(tree: Any) -> tuple[Any, Any]:
        return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)

    (leaves, treedef), (wanted, wanted_treedef) = flat(found), flat(expected)
    assert treedef == wanted_treedef
    for (path, leaf), (_, want) in zip(leaves, wanted, strict=True):
        assert _exactly(leaf) == _exactly(want), jax.tree_util.keystr(path)


def _exactly(leaf: Any) -> tuple[object, ...]:
    """All that must be equal of two leaves; NaNs count by their bits."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if isinstance(leaf, jax.Array):
        keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        host = np.asarray(jax.random.key_data(leaf) if keys else leaf)
        return type(leaf), leaf.dtype, leaf.shape, leaf.sharding, leaf.committed, host.tobytes()
    if isinstance(leaf, (np.ndarray, np.generic)):
        return type(leaf), leaf.dtype, leaf.shape, leaf.tobytes()
    if isinstance(leaf, (float, complex)):
        return type(leaf), np.asarray(leaf).tobytes()

    return type(leaf), leaf
