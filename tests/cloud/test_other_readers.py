"""What others read of our buckets, and we of theirs: Orbax on `gs://`, TensorStore on `s3://`."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.cloud.servers import Server

import penstock

pytestmark = pytest.mark.timeout(240)

ORBAX = textwrap.dedent(
    """
    import json, sys
    import fsspec

    endpoint, bucket_url = sys.argv[1:]
    fsspec.config.conf["gcs"] = fsspec.config.conf["gs"] = {"endpoint_url": endpoint, "token": "anon"}
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(bucket_url, options=ocp.CheckpointManagerOptions(read_only=True))
    steps = list(manager.all_steps())
    tree = ocp.PyTreeCheckpointer().restore(f"{bucket_url}/7")
    found = {"steps": steps, "w": np.asarray(tree["w"]).tolist(), "step": tree["step"]}
    ocp.PyTreeCheckpointer().save(f"{bucket_url}-orbax/1", {"a": jnp.arange(6.0), "b": np.ones(3)})
    print(json.dumps(found))
    """
)


def state() -> dict[str, Any]:
    return {"w": jnp.arange(300.0), "step": 7}


def test_orbax_and_penstock_read_each_other_on_gs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    if server.scheme != "gs":
        pytest.skip("Orbax takes no paths of other stores")
    pytest.importorskip("gcsfs", reason="by it Orbax reads gs://: pip install gcsfs")
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)

    url = server.url()
    for step in (6, 7):
        penstock.sync.save(f"{url}/{step}", state())

    for name, value in server.environ_of_orbax().items():
        monkeypatch.setenv(name, value)

    # penstock reads from that server itself, too
    monkeypatch.setenv("GOOGLE_BASE_URL", server.json_endpoint)

    ended = subprocess.run(
        [sys.executable, "-c", ORBAX, server.json_endpoint, url],
        capture_output=True,
        check=False,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found == {"steps": [6, 7], "w": np.arange(300.0).tolist(), "step": 7}
    np.testing.assert_array_equal(penstock.sync.restore(f"{url}/7", like=state())["w"], state()["w"])
    ours = penstock.sync.restore(f"{url}-orbax/1")
    assert np.asarray(ours["a"]).tolist() == list(range(6))
    assert np.asarray(ours["b"]).tolist() == [1, 1, 1]


def test_tensorstore_opens_the_database_on_s3(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    if server.scheme != "s3":
        pytest.skip("TensorStore's driver is of s3://")
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)

    import tensorstore as ts

    url = server.url()
    penstock.sync.save(f"{url}/7", state())
    base = {
        "driver": "s3",
        "bucket": "bucket",
        "path": url.removeprefix("s3://bucket/") + "/7/",
        "endpoint": server.endpoint,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "environment"},
        "s3_request_retries": {"max_retries": 4, "initial_delay": "100ms", "max_delay": "400ms"},
    }
    opened = ts.open(
        {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": "w/"}}, open=True
    ).result()
    assert opened.read().result().tolist() == np.arange(300.0).tolist()
