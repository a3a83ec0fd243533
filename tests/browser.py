"""A real browser for tests: Chromium without a window, spoken to by its own protocol, so that no
driver is needed.

The one package it takes (websockets) is there with Airflow's server. Chromium is looked for on PATH
under its usual names; where there is none, tests that need it are skipped by name.

Next room: tests/web/test_browser.py and tests/integration/test_airflow_page.py drive it.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
)
START_SECONDS = 300.0
ANSWER_SECONDS = 180.0


def found() -> str | None:
    """A browser of this machine, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser, with cookies of its own."""

    def __init__(self, folder: Path) -> None:
        program = found()
        assert program, "no browser"
        words = [
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "--hide-scrollbars",
        ]
        words += [
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-extensions",
        ]
        words += [
            "--disable-quic",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        ]
        words += ["--no-sandbox"] if os.geteuid() == 0 else []
        self.process = subprocess.Popen([program, *words, "about:blank"], stderr=subprocess.DEVNULL)
        self.messages: list[str] = []
        """What the page said on its console, and what its policy refused."""
        self._number = 0
        self._open = ExitStack()
        try:
            self.socket: ClientConnection = self._open.enter_context(self._connect(folder))
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def _connect(self, folder: Path) -> Any:
        until, port = time.monotonic() + START_SECONDS, folder / "DevToolsActivePort"
        while not (port.exists() and port.read_text().strip()):
            assert time.monotonic() < until, "the browser does not start"
            assert self.process.poll() is None, "the browser ended"
            time.sleep(0.1)
        address = f"http://127.0.0.1:{port.read_text().split()[0]}/json/list"
        while True:
            with urllib.request.urlopen(address, timeout=120) as answer:
                pages = [one for one in json.load(answer) if one["type"] == "page"]
            if pages:
                return connect(pages[0]["webSocketDebuggerUrl"], max_size=None, ping_interval=None)
            assert time.monotonic() < until, "the browser has no page"
            time.sleep(0.1)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command, and its answer."""
        self._number += 1
        self.socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        until = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < until:
            message = json.loads(self.socket.recv(timeout=ANSWER_SECONDS))
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])
            self._heard(message)
        raise AssertionError(f"no answer to {method}")

    def _heard(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.consoleAPICalled":
            self.messages.append(" ".join(str(one.get("value", "")) for one in params["args"]))
        if message.get("method") == "Runtime.exceptionThrown":
            self.messages.append(str(params["exceptionDetails"].get("text", "")))
        if message.get("method") == "Log.entryAdded":
            self.messages.append(str(params["entry"]["text"]))

    def open(self, address: str) -> None:
        """Go there, and wait until it is loaded."""
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def tell(self, script: str) -> Any:
        """The value of an expression on the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = ANSWER_SECONDS) -> Any:
        """Until an expression is true."""
        until, seen = time.monotonic() + seconds, None
        while time.monotonic() < until:
            try:
                seen = self.tell(script)
            except AssertionError as error:  # between two pages
                seen = str(error)
            else:
                if seen:
                    return seen
            time.sleep(0.1)
        raise AssertionError(
            f"in vain for {seconds} s: {script}: {seen}; at {self.tell('location.href')}"
        )

    def type(self, selector: str, words: str) -> None:
        """Into a field, as a person would."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"!!{found}")
        self.tell(f"{found}.focus()")
        self.call("Input.insertText", text=words)

    def click(self, selector: str) -> None:
        """On what can be clicked, when it can."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"!!{found} && !{found}.disabled")
        self.tell(f"{found}.click()")

    def text(self) -> str:
        """All that the page says."""
        return str(self.tell("document.body.innerText"))

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        """The window's size."""
        mobile = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=mobile,
        )

    def colours(self, scheme: str) -> None:
        """The system's wish: light or dark."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """What is seen, as a PNG; `whole`: down to the page's end."""
        made = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(made["data"]))

    def close(self) -> None:
        """End it."""
        self._open.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
