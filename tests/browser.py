"""A headless Chromium for tests, driven over its DevTools protocol: no driver program, no package but websockets.

Browser.open      load an address
Browser.wait_for  until a JavaScript expression is true
Browser.click     with the mouse, on what a person would find by its text or label
Browser.type      into what has the focus
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from websockets.sync.client import connect

PATIENCE_SECONDS = 180.0


def program() -> str | None:
    """Return where Chromium is, or None."""
    return next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium.

    Args:
        width, height: of the window, in pixels.
    """

    def __init__(self, executable: str, width: int = 1400, height: int = 1000):
        self._home = tempfile.TemporaryDirectory(prefix="tithe-browser-", ignore_cleanup_errors=True)
        flags = [
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={self._home.name}",
            f"--window-size={width},{height}",
            "--no-sandbox",  # it shows pages of this machine only, and root has no other way
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-extensions",
            "--disable-background-networking",
            "--no-first-run",
            "--hide-scrollbars",
        ]
        self._process = subprocess.Popen(
            [executable, *flags, "about:blank"],
            env={**os.environ, "HOME": self._home.name},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._count = 0
        try:
            self._socket = connect(self._address(), max_size=None, open_timeout=60)
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = ""
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            self.call("Page.enable")
            self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        except BaseException:
            self.close()
            raise

    def _address(self) -> str:
        """Wait until the browser says where it listens."""
        file = Path(self._home.name) / "DevToolsActivePort"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with suppress(FileNotFoundError, ValueError):
                port, path = file.read_text().splitlines()
                return f"ws://127.0.0.1:{port}{path}"
            assert self._process.poll() is None, "Chromium ended while it started"
            assert time.monotonic() < deadline, "Chromium did not start"
            time.sleep(0.1)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with suppress(AttributeError, OSError):
            self._socket.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        self._home.cleanup()

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": arguments}
        if getattr(self, "_session", ""):
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=PATIENCE_SECONDS))
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def wait_for(self, expression: str, timeout_seconds: float = PATIENCE_SECONDS) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            value = self.evaluate(f"(() => {{ try {{ return {expression} }} catch (error) {{ return null }} }})()")
            if value:
                return value
            assert time.monotonic() < deadline, f"never true: {expression}\n{self.text()[:3000]}"
            time.sleep(0.2)

    def text(self) -> str:
        """Return all that the page says."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def wait_for_text(self, text: str, timeout_seconds: float = PATIENCE_SECONDS) -> None:
        self.wait_for(f"document.body.innerText.includes({json.dumps(text)})", timeout_seconds)

    def click(self, find: str, nth: int = 0) -> None:
        """Click what a JavaScript expression finds (an element, or the nth of a list), once it is there and stands still."""
        place = f"""(() => {{
            let found = {find}; if (found && found.length !== undefined && !(found instanceof Element)) found = found[{nth}];
            if (!found || found.disabled) return null;
            found.scrollIntoView({{block: 'center'}});
            const box = found.getBoundingClientRect();
            return box.width && [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
        before = None
        while (now := self.wait_for(place)) != before:
            before = now
            time.sleep(0.2)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=now[0], y=now[1], button="left", clickCount=1)

    def click_text(self, text: str, tags: str = "button,a,[role=tab],[role=option],[role=menuitem],label") -> None:
        """Click the first element of these tags whose text is this."""
        self.click(f"[...document.querySelectorAll({json.dumps(tags)})].find(e => e.innerText.trim() === {json.dumps(text)})")

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A browser, where Chromium is installed; .ci/run installs it."""
    executable = program()
    if executable is None:
        if os.environ.get("CI"):
            pytest.fail("Chromium is not installed; .ci/run should have done that")
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    with Browser(executable) as opened:
        yield opened
