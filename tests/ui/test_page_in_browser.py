"""The page in a real browser: Chromium, without a screen, spoken to over its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="`penstock ui` needs it: pip install 'penstock[ui]'")

import penstock

CHROMIUM = shutil.which("chromium")
SOURCE = Path(__file__).parents[2] / "src"
KEEPING = penstock.Config.load(environ={}, arguments={"telemetry": {"keep_reports": 5}})
EVIL = "\x1b]0;owned\x07<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (Debian's package of that name)"),
]


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
        for domain in ("Page", "Network", "Runtime"):
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
    with penstock.sync.CheckpointManager(path, config=KEEPING) as manager:
        for step in range(1, 9):
            tree = {
                "encoder": {
                    f"layer_{i}": {"w": np.full((40, 8 * i + 8), step, np.float32)} for i in range(6)
                },
                "decoder": {"embedding": np.zeros((128, 16)), "head": np.full(200, step / 2)},
                EVIL: np.zeros(400),
                "step": step,
            }
            manager.save(step, tree, metrics={"loss": 2 / step, "accuracy": 1 - 1 / step, EVIL: step})

    return path


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "penstock", "ui", str(root), "--no-browser"],
        cwd=SOURCE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.terminate()
    server.wait()
    server.stdout.close()


@pytest.mark.timeout(110)  # a browser starts
def test_the_page_shows_a_run(root: Path, served: str, tmp_path: Path) -> None:
    browser = Browser(tmp_path / "profile")
    try:
        browser.ask("Page.navigate", url=served)
        browser.wait("document.querySelectorAll('#steps tbody tr').length === 8")
        assert "token" not in browser.evaluate("location.href + document.cookie + document.referrer")

        # Metrics as curves, sizes as bars, the tree of the latest step as a treemap.
        assert browser.evaluate("document.querySelectorAll('.curve').length") == 3
        assert browser.wait("document.querySelectorAll('.map rect').length") > 10
        assert browser.evaluate("document.getElementById('tree-title').textContent") == "The tree of 8"
        for scheme, width in (
            ("dark", 1280),
            ("light", 390),
        ):  # to be looked at; pytest keeps them for a while
            scheme_asked = {"name": "prefers-color-scheme", "value": scheme}
            browser.ask("Emulation.setEmulatedMedia", features=[scheme_asked])
            (tmp_path / f"page-{width}-{scheme}.png").write_bytes(browser.picture(width))

        # Nothing that came out of the checkpoint is markup, and nothing is wider than a narrow window.
        assert browser.evaluate("document.title") == "penstock"
        assert browser.evaluate("document.querySelectorAll('main script, main img').length") == 0
        assert "<script>" in browser.evaluate("document.getElementById('tree').textContent")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390

        # Where the time of a save went, the latest one's or another's.
        assert browser.evaluate("document.querySelectorAll('#stages tbody tr').length") == 7
        assert browser.evaluate("document.querySelectorAll('#timeline .bar').length") > 7
        assert "is the bottleneck" in browser.evaluate("document.getElementById('explanation').textContent")
        assert browser.evaluate("document.querySelectorAll('#report-chosen option').length") == 6

        # Two are compared.
        browser.evaluate("document.querySelectorAll('#steps input')[0].click()")
        browser.evaluate("document.querySelectorAll('#steps input')[7].click()")
        browser.wait("document.getElementById('alike')")
        browser.evaluate("document.getElementById('diff-values').click()")
        assert "['encoder']" in browser.wait("document.querySelector('#diff td.key')?.textContent")

        # It is live.
        with penstock.sync.CheckpointManager(root, config=KEEPING) as manager:
            manager.save(9, {"a": 1})
        browser.wait("document.querySelectorAll('#steps tbody tr').length === 9")
        browser.wait("document.getElementById('explanation').textContent.startsWith('1 leaf, ')")

        address = served.partition("?")[0]
        assert {seen.startswith(address) for seen in browser.seen if not seen.startswith("about:")} == {True}
    finally:
        browser.close()
