"""A headless Chromium that tests look at pages with, by the DevTools protocol over two pipes (fds 3 and 4)."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


# Gives the pipes' ends the numbers that Chromium reads and writes, and becomes Chromium. After three copies neither is 3 or 4.
RENUMBER = """
import os, sys
there, back = (os.dup(os.dup(os.dup(int(fd)))) for fd in sys.argv[1:3])
os.dup2(there, 3)
os.dup2(back, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One window. `open` shows a page as a reader of that width and theme would see it; `complaints` is what it logged.

    Example:
        >>> with Browser() as browser:
        ...     browser.open(path, width=390, dark=True)
        ...     browser.evaluate("document.title")
    """

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout, self.complaints = timeout, []  # type: tuple[float, list[str]]
        self._number, self._rest, self._events = 0, b"", []  # type: tuple[int, bytes, list[dict[str, Any]]]

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        there, self._out = os.pipe()
        self._in, back = os.pipe()

        command = [sys.executable, "-c", RENUMBER, str(there), str(back), str(CHROMIUM), *FLAGS]
        command += [f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(there, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(there)
        os.close(back)
        pages = self._call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session: str | None = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._out)
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._in)
        self._profile.cleanup()

    _session: str | None = None

    def open(self, page: Path | str, *, width: int, dark: bool = False, script: bool = True, height: int = 900) -> None:
        """Load the page, a file or an address, and wait until it is loaded."""
        self.complaints.clear()
        self._events.clear()
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[theme])
        self._call("Emulation.setScriptExecutionDisabled", value=not script)
        self._call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        end = time.monotonic() + self.timeout
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._read(end)
        self.evaluate("0")  # what the page logged while it loaded has arrived by then

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        done = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        """A PNG of the window, or of the whole page."""
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self.timeout
        while True:
            answer = self._read(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self, end: float) -> dict[str, Any]:
        """The next message; an event is kept, and a complaint of the page noted."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0))
            assert ready, f"the browser said nothing for {self.timeout} s"
            piece = os.read(self._in, 1 << 20)
            assert piece, f"the browser ended with {self._process.poll()}"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
            self._note(message)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        given = event["params"]
        if event["method"] == "Runtime.consoleAPICalled":
            self.complaints.append(str(given["args"]))
        elif event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(given["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded":
            self.complaints.append(given["entry"]["text"])
        elif event["method"] == "Network.requestWillBeSent":
            url = given["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.complaints.append(f"it asked for {url}")
