"""The page in a real browser: Chromium, without a screen, spoken to over its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="`penstock ui` needs it: pip install 'penstock[ui]'")

import penstock

CHROMIUM = shutil.which("chromium")
SOURCE = Path(__file__).parents[2] / "src"
EVIL = "\x1b]0;owned\x07<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (Debian's package of that name)"),
]


ROWS = "document.querySelectorAll('#steps tbody tr').length"
TITLES = "[...document.querySelectorAll('#strips .title')].map(title => title.textContent)"
COMPARED = "document.getElementById('comparison-says').textContent"


def _value(node: dict[str, Any], name: str) -> str:
    return str(node.get(name, {}).get("value", ""))


def _text_of_value(node: dict[str, Any]) -> str:
    texts = [each["value"]["value"] for each in node["properties"] if each["name"] == "valuetext"]
    return str(texts[0])


class Browser:
    """One page in Chromium, by the DevTools protocol over two pipes: no port, and no library."""

    def __init__(self, profile: Path) -> None:
        there, to_browser = os.pipe()
        from_browser, here = os.pipe()
        os.set_inheritable(there, True)
        os.set_inheritable(here, True)
        assert CHROMIUM is not None
        # The browser reads descriptor 3 and writes descriptor 4.
        command = (
            f'exec "$0" "$@" 3<&{there} 4>&{here}',
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "about:blank",
        )
        self._process = subprocess.Popen(
            ["bash", "-c", *command], pass_fds=(there, here), stderr=subprocess.DEVNULL
        )
        os.close(there)
        os.close(here)
        self._to, self._from = os.fdopen(to_browser, "wb"), os.fdopen(from_browser, "rb")
        self._n = 0
        self._rest = b""
        self.seen: list[str] = []  #: addresses of requests
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session: str | None = None
        attached = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Accessibility"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call the page."""
        return self._ask(method, parameters)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, awaited."""
        found = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Return the value of an expression once it is true, which the page itself watches for."""
        return self.evaluate(
            f"new Promise((done) => {{ const look = () => {{ const found = {condition}; "
            "if (found) done(found); else setTimeout(look, 20); }; look(); })"
        )

    def press(self, key: str) -> None:
        """Press a key, and let it go."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {" ": "Space"}.get(key, key)
        for kind in ("keyDown", "keyUp"):
            self.ask(
                "Input.dispatchKeyEvent", type=kind, key=key, code=code, **(text if kind == "keyDown" else {})
            )

    def roles(self) -> set[tuple[str, str]]:
        """Return the role and the name of each thing that a screen reader sees."""
        nodes = self.ask("Accessibility.getFullAXTree")["nodes"]
        return {(_value(node, "role"), _value(node, "name")) for node in nodes if not node["ignored"]}

    def sliders(self) -> dict[str, str]:
        """Return what a screen reader says of each slider, by its name."""
        nodes = self.ask("Accessibility.getFullAXTree")["nodes"]
        sliders = [node for node in nodes if _value(node, "role") == "slider"]
        return {_value(node, "name"): _text_of_value(node) for node in sliders}

    def box(self, selector: str) -> dict[str, float]:
        """Return where something is on the page."""
        found: dict[str, float] = self.evaluate(
            f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()"
        )
        return found

    def picture(self, width: int) -> bytes:
        """Return a screenshot of the whole page at a width."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def close(self) -> None:
        self._session = None
        self._ask("Browser.close", {})
        self._process.wait()
        self._to.close()
        self._from.close()

    def _ask(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._n += 1
        message: dict[str, Any] = {"id": self._n, "method": method, "params": parameters}
        if getattr(self, "_session", None) is not None:
            message["sessionId"] = self._session

        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._next()
            if answer.get("method") == "Network.requestWillBeSent":
                self.seen.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._n:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            found = os.read(self._from.fileno(), 65536)
            assert found, "the browser has ended"
            self._rest += found

        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "run"
    with penstock.sync.CheckpointManager(path) as manager:
        for step in range(1, 9):
            tree = {
                "encoder": {
                    f"layer_{i}": {"w": np.full((40, 8 * i + 8), step, np.float32)} for i in range(6)
                },
                "decoder": {"embedding": np.zeros((128, 16)), "head": np.full(200, step / 2)},
                EVIL: np.zeros(400),
                "step": step,
            }
            save = manager.save(step, tree, metrics={"loss": 2 / step, "accuracy": 1 - 1 / step, EVIL: step})
            assert save is not None
            save.result()  # a step is linked to one that is durable by then

    return path


@contextmanager
def serving(*paths: Path) -> Generator[str]:
    """Serve a page for the block; yield the address that is printed."""
    server = subprocess.Popen(
        [sys.executable, "-m", "penstock", "ui", *map(str, paths), "--no-browser"],
        cwd=SOURCE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


@contextmanager
def browsing(profile: Path) -> Generator[Browser]:
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()


@pytest.mark.timeout(150)  # a browser starts
def test_the_page_shows_a_run(root: Path, tmp_path: Path) -> None:
    with serving(root) as address, browsing(tmp_path / "profile") as browser:
        browser.ask("Page.navigate", url=address)
        browser.wait(f"{ROWS} === 8")
        assert "token" not in browser.evaluate("location.href + document.cookie + document.referrer")

        # Metrics as curves beside what the saves took, the tree of the latest step as a treemap.
        titles = browser.wait(f"{TITLES}.length === 9 && {TITLES}.join('|')")
        assert titles.split("|")[:4] == [
            "loss",
            "Stall of training",
            "What held each save up, and events",
            "A save, until it was staged and durable",
        ]
        assert browser.wait("document.querySelectorAll('.map rect').length") > 10
        assert browser.evaluate("document.getElementById('tree-title').textContent") == "The tree of 8"
        marks = "document.querySelectorAll('[data-key=save] .mark.{}:not(.swatch .mark)').length"
        assert browser.evaluate(marks.format("staged")) == browser.evaluate(marks.format("durable")) == 8
        # Each axis has ticks from the lowest number at the bottom up, with units.
        ticks = browser.evaluate(
            "[...document.querySelectorAll('[data-key=size] .tick')].map(t => t.textContent)"
        )
        assert ticks[0] == "0 kB"
        assert float(ticks[1].removesuffix(" kB")) > 0

        # Nothing that came out of the checkpoint is markup, and nothing is wider than a narrow window. The
        # pictures are to be looked at; pytest keeps them for a while.
        assert browser.evaluate("document.title") == "penstock"
        assert browser.evaluate("document.querySelectorAll('main script, main img').length") == 0
        assert "<script>" in browser.evaluate("document.getElementById('tree').textContent")
        for scheme, width in (
            ("dark", 1280),
            ("light", 390),
        ):
            scheme_asked = {"name": "prefers-color-scheme", "value": scheme}
            browser.ask("Emulation.setEmulatedMedia", features=[scheme_asked])
            (tmp_path / f"page-{width}-{scheme}.png").write_bytes(browser.picture(width))
            assert browser.evaluate("document.documentElement.scrollWidth") <= width

        # Where the time of the chosen save went.
        assert browser.wait("document.querySelectorAll('#stages tbody tr').length") == 8
        assert browser.evaluate("document.querySelectorAll('#timeline .bar').length") > 7
        assert "bottleneck" in browser.evaluate("document.getElementById('explanation').textContent")
        assert "opened" in browser.evaluate("document.getElementById('events').textContent")
        assert browser.wait("document.querySelectorAll('#norms tbody tr').length") == 8  # layers and the head

        # It is live.
        with penstock.sync.CheckpointManager(root) as manager:
            manager.save(9, {"a": 1})
        browser.wait(f"{ROWS} === 9")
        browser.wait("document.getElementById('events').textContent.includes('closed')")

        server = address.partition("?")[0]
        assert {seen.startswith(server) for seen in browser.seen if not seen.startswith("about:")} == {True}


@pytest.mark.timeout(150)
def test_the_keyboard_and_a_screen_reader_reach_all_of_it(root: Path, tmp_path: Path) -> None:
    with serving(root) as address, browsing(tmp_path / "profile") as browser:
        browser.ask("Page.navigate", url=address)
        browser.wait("document.querySelectorAll('#norms tbody tr').length")

        # A chart is walked through by the arrow keys; all charts show the same step.
        browser.evaluate("document.querySelector('[data-key=stall] .strip').focus()")
        browser.press("Home")
        browser.press("ArrowRight")
        said = browser.sliders()
        assert said["Stall of training, by step"].startswith("step 2: ")
        assert said["loss, by step"] == "step 2: 1"
        assert "durable" in said["A save, until it was staged and durable, by step"]
        browser.press("Enter")
        browser.wait("document.getElementById('report-title').textContent === 'The save of 2'")

        # Two are ticked by the space key, and what differs is said where it is: next to the table.
        for key in ("tick 0/8", "tick 0/3"):
            browser.evaluate(f"document.querySelector('[data-key=\"{key}\"]').focus()")
            browser.press(" ")
            assert browser.evaluate("document.activeElement.dataset.key") == key
        says = browser.wait("/differ/.test(SAYS) && SAYS".replace("SAYS", COMPARED))
        assert "leaves differ" in says
        for width, beside in ((1280, True), (390, False)):
            browser.picture(width)
            table, found = (browser.box(f"#{name}") for name in ("checkpoints", "comparison"))
            gap = found["left"] - table["right"] if beside else found["top"] - table["bottom"]
            assert 0 <= gap < 40, width

        roles = browser.roles()
        for role, name in (
            ("heading", "Checkpoints"),
            ("checkbox", "compare 8"),
            ("region", "Checkpoints"),
            ("status", ""),
            ("rowheader", "['encoder']['layer_0']"),
            ("list", "Events, the latest first"),
        ):
            assert (role, name) in roles
        unnamed = {role for role, name in roles if not name} & {
            "button",
            "checkbox",
            "slider",
            "region",
            "image",
            "textbox",
        }
        assert not unnamed


@pytest.mark.timeout(150)
def test_a_run_that_has_not_begun_is_waited_for_also_by_a_second_browser(tmp_path: Path) -> None:
    later, other = tmp_path / "later", tmp_path / "other"
    with serving(later, other) as address:
        for name in ("first", "second"):  # of the same person, by the same address
            with browsing(tmp_path / name) as browser:
                browser.ask("Page.navigate", url=address)
                if name == "first":
                    waits = browser.wait("document.getElementById('waiting-for')?.textContent")
                    assert waits == f"{later}, {other}"
                    for run in (later, other):
                        with penstock.sync.CheckpointManager(run) as manager:
                            manager.save(1, {"a": np.ones(3)}, metrics={"loss": 1.0})

                browser.wait(f"{ROWS} === 2")
                assert browser.evaluate("[...document.querySelectorAll('#runs .path')].length") == 2
                browser.wait("document.querySelectorAll('[data-key=\"metric loss\"] .dot').length === 2")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ten_thousand_steps_are_thinned_and_shown_a_page_at_a_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with penstock.sync.CheckpointManager(run) as manager:
        manager.save(0, {"a": 1}, metrics={"loss": 1.0})
    for step in range(1, 10_000):
        os.symlink(run / "0", run / str(step))  # a step each, which is read as one

    with serving(run) as address, browsing(tmp_path / "profile") as browser:
        browser.ask("Page.navigate", url=address)
        browser.wait(f"{ROWS} === 100")
        assert "to go" in browser.wait("document.getElementById('live').textContent")
        browser.wait("document.getElementById('live').textContent === 'live'")
        assert "of 10,000 checkpoints" in browser.evaluate("document.getElementById('pages').textContent")
        browser.evaluate("document.getElementById('find').value = '1234'")
        browser.evaluate("document.getElementById('find').focus()")
        browser.press("Enter")
        assert browser.evaluate("document.activeElement.textContent") == "1234"
        assert browser.evaluate("document.querySelectorAll('svg *').length") < 6000

        # Fewer can be looked at more closely.
        choose = "const one = document.getElementById('window'); one.value = '100'"
        browser.evaluate(f"{choose}; one.dispatchEvent(new Event('change', {{ bubbles: true }}))")
        assert browser.evaluate("document.querySelectorAll('[data-key=size] .bar.shared').length") == 100
