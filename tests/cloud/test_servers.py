"""What a bucket in memory does, real servers do: through s3:// paths and the usual environment."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.cloud.server_processes import free_port
from tests.cloud.servers import ENDPOINTS, SECRET, Server

from penstock import Checkpointer
from penstock.errors import AccessDeniedError, InUseError, NotACheckpointError, StorageError, UnreachableError
from penstock.handlers.stores.buckets import MARK

AssertSame = Callable[[Any, Any], None]

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]


def state(step: int = 1) -> dict[str, Any]:
    return {
        "w": jnp.arange(6_000_000.0).reshape(-1, 1000) * step,
        "small": [np.full(10, at) for at in range(100)],
        "key": jax.random.key(step),
        "name": "run",
        "step": step,
    }


async def test_a_tree_is_saved_and_restored(environ: Server, assert_same: AssertSame) -> None:
    path = f"{environ.url()}/run/7"
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(path, state()))
        assert_same(await checkpointer.restore(path, like=state(2)), state())
        assert len((await checkpointer.metadata(path)).leaves) == 104
        assert (await checkpointer.verify(path)).n_leaves == 104


async def test_what_is_wrong_is_said(environ: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = environ.url()
    async with Checkpointer() as checkpointer:
        with pytest.raises(NotACheckpointError, match="does not exist"):
            await checkpointer.restore(f"{url}/none")
        for call in (
            lambda: checkpointer.restore(f"{environ.scheme}://no-such-bucket/run"),
            lambda: checkpointer.save(f"{environ.scheme}://no-such-bucket/run", {"a": np.ones(3)}),
        ):
            with pytest.raises(StorageError, match="there is no such bucket"):
                await cast("Any", call())

    monkeypatch.setenv(ENDPOINTS[environ.scheme], f"http://127.0.0.1:{free_port()}")
    async with Checkpointer(config=config_with(environ, retries=1)) as checkpointer:
        with pytest.raises(UnreachableError):
            await checkpointer.restore(f"{url}/run")


def config_with(server: Server, **options: Any) -> Any:
    from penstock import Config

    return Config.load(arguments={"store": {server.scheme: options}})


async def test_wrong_credentials_are_said_and_no_secret_is(
    environ: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environ.name not in {"SeaweedFS", "Azurite"}:
        pytest.skip(f"{environ.name} believes everybody")
    if environ.scheme == "az":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(SECRET[::-1].encode()).decode())
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET[::-1])
    async with Checkpointer() as checkpointer:
        with pytest.raises(AccessDeniedError) as caught:
            await (await checkpointer.save(f"{environ.url()}/run", {"a": np.ones(3)}))

    assert SECRET[::-1] not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("n_savers", [2, 8])
def test_of_many_savers_of_one_path_one_wins(environ: Server, n_savers: int) -> None:
    """Their files all have the same names, so that a mixture would be possible."""
    for _ in range(5):
        url = environ.url()

        def save(number: int, url: str = url) -> str:
            store = environ.bucket_store()
            try:
                token = store.begin_build(f"{url}/7", f"{url}/7.tmp")
            except StorageError as error:
                return type(error).__name__ if isinstance(error, InUseError) else str(error.errno)

            for name in ("a", "b", "c"):
                store.write_file(f"{token.place}/{name}", str(number).encode())

            store.publish(token)
            return "won"

        with ThreadPoolExecutor(n_savers) as pool:
            ended = list(pool.map(save, range(n_savers)))

        assert ended.count("won") == 1, ended
        store = environ.bucket_store()
        assert {store.read_file(f"{url}/7/{name}") for name in ("a", "b", "c")} == {
            str(ended.index("won")).encode()
        }
        assert store.list_directory(url) == ["7"]


SAVER = textwrap.dedent(
    """
    import os, signal, sys
    from penstock.handlers.stores.buckets.object_client import ObjectClient
    from penstock.config.config import StoreOptions
    from penstock.stores.store_finder import StoreFinder

    url, last = sys.argv[1], int(sys.argv[2])
    n = 0

    def dying(method):
        def call(self, *args):
            global n
            n += 1
            found = method(self, *args)
            if n == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return found
        return call

    for name in ("put", "create", "swap", "copy", "delete"):
        setattr(ObjectClient, name, dying(getattr(ObjectClient, name)))

    store = StoreFinder(None, StoreOptions()).at(url)
    token = store.begin_build(f"{url}/7", f"{url}/7.tmp")
    for name in ("a", "b"):
        file = store.create_data_file(f"{token.place}/d/{name}")
        file.write_at(0, [memoryview(b"data")])
        file.sync()
    store.write_file(f"{token.place}/document", b"document")
    store.publish(token)
    """
)


def run_saver(url: str, server: Server, last: int) -> subprocess.CompletedProcess[bytes]:
    """Save at `<url>/7` in a process that is killed after its request number `last`; 0: not at all."""
    return subprocess.run(
        [sys.executable, "-c", SAVER, url, str(last)],
        env={**os.environ, **server.environ()},
        capture_output=True,
        check=False,
    )


def test_a_saver_killed_after_any_request_leaves_all_or_nothing(environ: Server) -> None:
    store = environ.bucket_store()
    found: list[bool] = []
    while True:
        url = environ.url()
        store.write_file(f"{url}/6/{MARK}", b"another step")
        ended = run_saver(url, environ, len(found) + 1)
        there = store.kind(f"{url}/7") == "directory"
        assert store.list_directory(url) == (["6", "7"] if there else ["6"])
        assert not there or sorted(store.list_directory(f"{url}/7/d")) == ["a", "b"]
        found.append(there)
        again = run_saver(url, environ, 0)  # it removes what is left, or puts the mark
        assert again.returncode == 0 or b"is there already" in again.stderr
        assert store.list_directory(url) == ["6", "7"]
        assert store.list_directory(f"{url}/7") == [MARK, "d", "document"]
        assert store.read_file(f"{url}/6/{MARK}") == b"another step"
        if ended.returncode == 0:
            break

        assert ended.returncode == -9, ended.stderr

    # Claim, two files, document, claim again: nothing. The mark, the end of the claim, no kill: all of it.
    assert found == [False] * 5 + [True] * 3
