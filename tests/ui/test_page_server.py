"""The server of the page: what it answers, and to whom."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import anyio
import httpx
import numpy as np
import pytest

pytest.importorskip("starlette", reason="`penstock ui` needs it: pip install 'penstock[ui]'")

import penstock
from penstock.errors import NotACheckpointError
from penstock.inspection.stored_leaves import LeafFacts
from penstock.inspection.texts import one_line
from penstock.kernel import KeyKind
from penstock.steps import CheckpointManager, Disk, EverySteps
from penstock.stores import store_of
from penstock.ui.layer_norms import LayerNorms, layers_to_measure
from penstock.ui.page_data import differences, tree_data
from penstock.ui.page_server import make_app, make_server, open_socket
from penstock.ui.run_reader import RunReader

KEEPING = penstock.Config.load(environ={}, arguments={"telemetry": {"keep_reports": 5}})
EVIL = "\x1b]0;owned\x07<script>alert(1)</script>\u202e"
PORT = 4321
HERE = f"http://127.0.0.1:{PORT}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ui") / "run"
    with penstock.sync.CheckpointManager(path) as manager:
        for step in (1, 2):
            tree = {"params": {"w": np.full((4, 4), step, np.float32)}, EVIL: np.zeros(2), "note": EVIL}
            manager.save(step, tree, metrics={"loss": 1 / step, "bad": float("nan"), EVIL: 1})

    return path


def browser(root: Path, **more: Any) -> httpx.AsyncClient:
    app = make_app([store_of(root)], PORT, "secret", "opening")
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HERE, **more)


@asynccontextmanager
async def opened(root: Path) -> AsyncGenerator[httpx.AsyncClient]:
    async with browser(root) as client:
        answer = await client.get("/?token=secret")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        yield client


async def test_the_token_becomes_a_cookie_in_each_browser_that_has_the_address(root: Path) -> None:
    async with opened(root) as client:
        cookie = next(iter(client.cookies.jar))
        assert cookie.has_nonstandard_attr("HttpOnly")
        assert cookie.value != "secret"
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/?token=secret")).status_code == 303  # of the same browser: away with it
        client.cookies.clear()
        assert (await client.get("/")).status_code == 403
        assert (await client.get("/?token=secret")).status_code == 303  # a second browser
        assert (await client.get("/api/run")).status_code == 200


async def test_the_token_that_a_browser_is_started_with_is_good_once(root: Path) -> None:
    """Others on this machine see the arguments of its programs."""
    async with browser(root) as client:
        assert (await client.get("/?token=opening")).status_code == 303
        assert (await client.get("/api/run")).status_code == 200
        client.cookies.clear()
        assert (await client.get("/?token=opening")).status_code == 403
        assert (await client.get("/?token=secret")).status_code == 303


@pytest.mark.parametrize(
    "path", ["/", "/page.js", "/api/run", "/api/tree?name=1", "/?token=wrong", "/?token=", "/x"]
)
async def test_every_request_without_the_token_is_refused(root: Path, path: str) -> None:
    async with browser(root) as client:
        answer = await client.get(path)

    assert answer.status_code == 403
    assert str(root) not in answer.text


async def test_kept_reports_are_data_of_strangers(root: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(root, tmp_path / "run"))
    async with penstock.CheckpointManager(run, config=KEEPING) as manager:
        await manager.save(3, {"a": 1})
    file = run / "_PENSTOCK_REPORTS.json"
    good = json.loads(file.read_bytes())["reports"][0]
    stages = [{**good["stages"][0], "name": EVIL}]
    changed = {
        **good,
        "name": EVIL,
        "explanation": EVIL,
        "stages": stages,
        "rows": [{"label": EVIL, "bars": []}],
    }
    file.write_text(json.dumps({"reports": [changed]}))
    async with opened(run) as client:
        found = (await client.get("/api/run")).json()["reports"]
        assert [report["label"] for report in found] == [one_line(EVIL)]
        assert "\x1b" not in json.dumps(found, ensure_ascii=False)

        damages: tuple[tuple[str, Any], ...]
        damages = (("ended_at", 1e300), ("ended_at", -1), ("nbytes", "x"), ("rows", [{}]))
        for member, value in damages:
            file.write_text(json.dumps({"reports": [{**good, member: value}]}))
            answer = await client.get("/api/run")
            assert (answer.status_code, answer.json()["reports"]) == (200, []), member


@pytest.mark.parametrize("cookie", ["", "wrong", "secret", '"', "é"])
async def test_a_wrong_cookie_is_refused(root: Path, cookie: str) -> None:
    async with browser(root) as client:
        headers = {b"Cookie": f"penstock-{PORT}={cookie}".encode("latin-1")}
        assert (await client.get("/api/run", headers=headers)).status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": f"evil.example:{PORT}"}, 421),
        ({"Host": "127.0.0.1:1"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": f"http://localhost:{PORT}"}, 403),
        ({"Origin": HERE}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),  # another port of this machine
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Host": f"localhost:{PORT}", "Origin": f"http://localhost:{PORT}"}, 200),
    ],
)
async def test_host_and_origin_are_checked(root: Path, headers: dict[str, str], status: int) -> None:
    async with opened(root) as client:
        (cookie,) = client.cookies.jar
        answer = await client.get("/api/run", headers={**headers, "Cookie": f"{cookie.name}={cookie.value}"})

    assert answer.status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_requests_that_would_change_something_are_refused(root: Path, method: str) -> None:
    async with opened(root) as client:
        assert (await client.request(method, "/api/run")).status_code == 405


async def test_every_answer_forbids_what_the_page_does_not_need(root: Path) -> None:
    async with opened(root) as client:
        # A link elsewhere leads to the page itself.
        assert (await client.get("/", headers={"Sec-Fetch-Site": "cross-site"})).status_code == 200
        for path in (
            "/",
            "/page.js",
            "/strips.js",
            "/checkpoints.js",
            "/elements.js",
            "/page.css",
            "/api/run",
            "/api/tree?name=7",
        ):
            answer = await client.get(path)
            assert answer.headers["content-security-policy"].startswith(
                "default-src 'none'; script-src 'self'"
            )
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"


async def test_the_run_has_its_steps_metrics_and_sizes(root: Path) -> None:
    async with opened(root) as client:
        run = (await client.get("/api/run")).json()

    steps = {step["name"]: step for step in run["steps"]}
    assert sorted(steps) == ["1", "2"]
    assert steps["2"]["metrics"]["loss"] == 0.5
    assert steps["2"]["metrics"]["bad"] is None
    assert steps["2"]["started_at"] <= steps["2"]["committed_at"]
    assert steps["1"]["nbytes"] > 64
    assert [report["staged_s"] <= report["seconds"] for report in run["reports"]] == [True, True]
    losses = {report["label"]: report["metrics"]["loss"] for report in run["reports"]}
    assert losses == {"1": 1, "2": 0.5}
    assert [event["what"] for event in run["events"]] == ["opened", "closed"]


async def test_the_tree_has_its_leaves_and_a_treemap(root: Path) -> None:
    async with opened(root) as client:
        tree = (await client.get("/api/tree?name=2&width=400&height=300")).json()

    item = next(item for item in tree["items"] if item["name"] == "default")
    assert "['params']['w']" in [leaf["key_path"] for leaf in item["leaves"]]
    largest = max(item["rectangles"], key=lambda shape: shape["width"] * shape["height"])
    assert largest["title"].startswith("['params']: 64 bytes")
    assert 0.7 < largest["width"] * largest["height"] / (400 * 300) < 0.9  # 64 of 80 bytes


async def test_two_steps_are_compared(root: Path) -> None:
    async with opened(root) as client:
        structure = (await client.get("/api/diff?first=1&second=2")).json()
        values = (await client.get("/api/diff?first=1&second=2&values=1")).json()

    assert structure["values"] is None
    assert structure["structure"] == []
    assert [row["key_path"] for row in values["values"]] == ["['loss']", "['params']['w']"][::-1]
    assert values["values"][0]["different"] == "16 of 16"


@pytest.mark.parametrize("name", ["3", "../run/1", "/etc", ".", "", "1/default"])
async def test_only_listed_checkpoints_are_opened(root: Path, name: str) -> None:
    async with opened(root) as client:
        for answer in (
            await client.get("/api/tree", params={"name": name}),
            await client.get("/api/diff", params={"first": "1", "second": name}),
        ):
            assert answer.status_code == 422
            assert "has no checkpoint" in answer.json()["error"]


async def test_no_answer_has_control_characters(root: Path) -> None:
    async with opened(root) as client:
        for path in (
            "/api/run",
            "/api/tree?name=2",
            "/api/diff?first=1&second=2&values=1",
            f"/api/tree?name={quote(EVIL)}",
        ):
            assert_printable((await client.get(path)).json())


def assert_printable(value: Any) -> None:
    if isinstance(value, str):
        assert value.isprintable()
    elif isinstance(value, dict):
        for key, inner in value.items():
            assert key.isprintable()
            assert_printable(inner)
    elif isinstance(value, list):
        for inner in value:
            assert_printable(inner)


def test_the_page_server_listens_on_this_machine_alone() -> None:
    with open_socket() as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "path",
    [
        "//evil.example",
        "//evil.example/..",
        "/\\\\evil.example",
        "http://evil.example/",
        "/%2f/evil.example",
        "/x",
    ],
)
async def test_the_token_leads_to_the_page_and_nowhere_else(root: Path, path: str) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    scope = {
        "type": "http", "method": "GET", "path": unquote(path), "query_string": b"token=secret&a=//b",
        "headers": [(b"host", f"127.0.0.1:{PORT}".encode())],
    }  # fmt: skip
    await make_app([store_of(root)], PORT, "secret")(scope, receive, send)

    assert sent[0]["status"] == 303
    assert dict(sent[0]["headers"])[b"location"] == b"/?a=%2F%2Fb"


async def test_the_page_has_no_web_sockets(root: Path) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await make_app([store_of(root)], PORT, "secret")({"type": "websocket", "path": "/"}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


@asynccontextmanager
async def served(root: Path, **limits: Any) -> AsyncGenerator[int]:
    """Serve the page for the block; yield the port. Uvicorn runs on asyncio alone."""
    with open_socket() as listening:
        port: int = listening.getsockname()[1]
        server = make_server(make_app([store_of(root)], port, "secret"), **limits)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [listening])
            try:
                yield port
            finally:
                server.should_exit = True


ON_ASYNCIO = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""As uvicorn runs."""


@ON_ASYNCIO
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"])
async def test_who_sends_no_whole_request_is_shut_out(root: Path, sent: bytes) -> None:
    async with served(root, request_s=0.1) as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        if sent:
            await stream.send(sent)
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await stream.receive()


@ON_ASYNCIO
async def test_a_second_request_that_stays_half_is_shut_out(root: Path) -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    async with served(root, request_s=0.1) as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(request)
        assert (await stream.receive()).startswith(b"HTTP/1.1 421")
        await stream.send(request[:20])
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:  # the rest of the answer may come first
                await stream.receive()


@ON_ASYNCIO
async def test_connections_that_send_nothing_keep_nobody_out(root: Path) -> None:
    async with served(root, most=3) as port, AsyncExitStack() as stack:
        idle = [
            await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", port)) for _ in range(10)
        ]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/")).status_code == 403

        for stream in idle[:7]:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()


async def saved(manager: penstock.CheckpointManager, step: int) -> None:
    save = await manager.save(step, {"a": 1})
    assert save is not None
    await save


async def test_what_did_not_change_is_not_told_again(root: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(root, tmp_path / "run"))
    async with opened(run) as client:
        first = (await client.get("/api/run")).json()
        again = (await client.get("/api/run", params={"seen": first["version"]})).json()
        assert (again["steps"], again["gone"], again["reports"], again["n_steps"]) == ([], [], None, 2)

        async with penstock.CheckpointManager(run) as manager:
            await saved(manager, 3)
            await manager.delete(1)
        then = (await client.get("/api/run", params={"seen": again["version"]})).json()

    assert [step["name"] for step in then["steps"]] == ["3"]
    assert (first["is_whole"], again["is_whole"], then["is_whole"]) == (True, False, False)
    assert then["gone"] == ["1"]
    assert sorted(report["label"] for report in then["reports"]) == ["1", "2", "3"]
    assert ("deleted", "1") in [(event["what"], event["label"]) for event in then["events"]]


def test_many_steps_are_read_the_newest_first_within_a_budget_of_time(root: Path) -> None:
    store, path = store_of(root)
    reader = RunReader(store, path, read_s=0.0, check_s=0.0)
    found = reader.look(0)
    assert ([step["name"] for step in found["steps"]], found["n_unread"]) == (["2"], 1)
    found = reader.look(found["version"])
    assert ([step["name"] for step in found["steps"]], found["n_unread"]) == (["1"], 0)


async def test_a_run_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    run = tmp_path / "not" / "yet"
    async with opened(run) as client:
        assert (await client.get("/api/run")).json()["kind"] == "waiting"
        run.mkdir(parents=True)
        assert (await client.get("/api/run")).json()["kind"] == "waiting"
        async with penstock.CheckpointManager(run) as manager:
            await saved(manager, 1)
        found = (await client.get("/api/run")).json()

    assert (found["kind"], [step["name"] for step in found["steps"]]) == ("root", ["1"])


async def test_steps_of_two_runs_are_compared(root: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(root, tmp_path / "other"))
    shutil.rmtree(other / "1")
    app = make_app([store_of(root), store_of(other)], PORT, "secret")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HERE) as client:
        await client.get("/?token=secret")
        assert (await client.get("/api/runs")).json() == {"n_runs": 2}
        assert (await client.get("/api/run?run=1")).json()["n_steps"] == 1
        asked: dict[str, str] = {
            "first": "1",
            "first_run": "0",
            "second": "2",
            "second_run": "1",
            "values": "1",
        }
        found = (await client.get("/api/diff", params=asked)).json()
        assert found["n_values"] == 2
        asked = {**asked, "second": "1"}
        assert (await client.get("/api/diff", params=asked)).status_code == 422  # the other run has none


async def test_norms_are_those_of_the_values(root: Path) -> None:
    async with opened(root) as client:
        await client.get("/api/run")
        found = (await client.get("/api/norms")).json()
        assert (list(found["norms"]), found["n_unread"]) == (["2"], 1)
        found = (await client.get("/api/norms")).json()

    assert {name: norms["['params']"] for name, norms in found["norms"].items()} == {"1": 4.0, "2": 8.0}
    assert (found["n_unread"], found["is_spent"]) == (0, False)


async def test_norms_read_no_more_than_their_budget(root: Path) -> None:
    store, path = store_of(root)
    small = LayerNorms(store, budget_bytes=10)
    for n, is_spent in ((0, True), (2, False)):  # the second time for two steps, since they are so large
        there = {name: (f"{path}/{name}", 0.0) for name in ("1", "2")}
        await small.read_one(there)
        found = await small.read_one(there)
        assert (len(found["norms"]), found["is_spent"]) == (n, is_spent)
        small.extend()

    norms = LayerNorms(store, budget_bytes=100)  # a step has 64 bytes of floats
    finished = {name: (f"{path}/{name}", 0.0) for name in ("1", "2")}
    for _ in range(3):
        found = await norms.read_one(finished)
        assert (len(found["norms"]), found["is_spent"], found["read_bytes"]) == (1, True, 64)

    norms.extend()
    found = await norms.read_one(finished)
    assert (len(found["norms"]), found["is_spent"], found["read_bytes"]) == (2, False, 128)


def leaf(*keys: str, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> Any:
    kinds = tuple(KeyKind.MAPPING for _ in keys)
    return LeafFacts("", "", keys, kinds, "", shape, dtype, 16, 16, None, (), None, None)


def test_a_layer_is_what_has_leaves_in_it() -> None:
    blocks = [leaf("params", "blocks", at, "q", part) for at in "012" for part in ("kernel", "bias")]
    leaves = [leaf("opt", "mu"), leaf("step", shape=()), leaf("params", "n", dtype="int32"), *blocks]
    layers = layers_to_measure(leaves)
    assert {name: len(found) for name, found in layers.items()} == {
        f"['params']['blocks']['{at}']['q']": 2 for at in "012"
    }
    assert list(layers_to_measure(leaves, most=2)) == ["['params']['blocks']"]
    assert list(layers_to_measure([leaf("w")])) == ["['w']"]
    assert layers_to_measure([]) == {}


async def test_each_tier_of_a_run_says_what_it_has_and_how_far_behind_it_is(tmp_path: Path) -> None:
    near, root = tmp_path / "near", tmp_path / "run"
    async with CheckpointManager(root, save_when=EverySteps(2), tiers=Disk(near)) as manager:
        for step in (2, 3):
            save = await manager.save(step, {"w": np.zeros(4)})
            assert save is not None
            await save

    reader = RunReader(*store_of(root))
    tiers = reader.look(0)["tiers"]
    behind_s = [tier.pop("behind_s") for tier in tiers]
    assert tiers == [
        {"label": "disk", "path": str(near), "n_steps": 2, "newest": 3, "problem": ""},
        {"label": "root", "path": str(root), "n_steps": 1, "newest": 2, "problem": ""},
    ]
    assert behind_s[0] == 0 < behind_s[1]

    shutil.rmtree(near)
    tiers = RunReader(*store_of(root)).look(0)["tiers"]
    assert [(tier["newest"], tier["problem"]) for tier in tiers] == [(None, "nothing is there"), (2, "")]


async def test_steps_that_are_in_a_tier_alone_are_listed_with_where_they_are(tmp_path: Path) -> None:
    near, root = tmp_path / "near", tmp_path / "run"
    async with CheckpointManager(root, save_when=EverySteps(2), tiers=Disk(near)) as manager:
        for step in (2, 3):
            save = await manager.save(step, {"w": np.full(4, step)})
            assert save is not None
            await save

    store, path = store_of(root)
    reader = RunReader(store, path)
    seen = reader.look(0)
    assert [(step["label"], step["where"]) for step in seen["steps"]] == [
        ("2", ["disk", "root"]),
        ("3", ["disk"]),
    ]
    assert (seen["n_steps"], seen["n_unread"]) == (2, 0)
    assert list(reader.finished()) == ["2"]  # values are read from the root alone

    assert (await tree_data(store, path, "3", 100, 100))["items"][0]["n_leaves"] == 1
    compared = await differences((store, path, "2"), (store, path, "3"), values=True)
    assert compared["n_values"] == 1
    with pytest.raises(NotACheckpointError, match="has no checkpoint '9'"):
        await tree_data(store, path, "9", 100, 100)

    shutil.rmtree(near)
    seen = RunReader(store, path).look(0)
    assert [(step["label"], step["where"]) for step in seen["steps"]] == [("2", ["root"])]


async def test_a_step_that_comes_to_the_root_is_told_again(tmp_path: Path) -> None:
    near, root = tmp_path / "near", tmp_path / "run"
    async with CheckpointManager(root, save_when=EverySteps(2), tiers=Disk(near)) as manager:
        save = await manager.save(3, {"w": np.zeros(4)})
        assert save is not None
        await save

    reader = RunReader(*store_of(root), tiers_s=0.0)
    first = reader.look(0)
    shutil.copytree(near / "3", root / "3")
    (told,) = reader.look(first["version"])["steps"]
    assert told["where"] == ["disk", "root"]


async def test_a_run_without_tiers_has_none(root: Path) -> None:
    assert RunReader(*store_of(root)).look(0)["tiers"] == []
