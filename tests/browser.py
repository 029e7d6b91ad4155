"""A headless Chromium, asked through a pipe: pages at a width and in a colour scheme.

Only what the checks of the documentation need, and nothing to install beside the browser.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows, whose processes are not given the ends of pipes by number
    fcntl = None  # type: ignore[assignment]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# Chromium reads commands from 3 and writes answers to 4.
START = """import os, sys
for end, number in zip(sys.argv[1:3], (3, 4)):
    os.dup2(int(end), number)
os.execv(sys.argv[3], sys.argv[3:])"""


def executable() -> str | None:
    """The path of a browser, or `None` where there is none that could be asked."""
    if fcntl is None:
        return None
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, program: str) -> None:
        ours, theirs = os.pipe(), os.pipe()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [
            *(program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"),
            *("--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "about:blank"),
        ]
        given = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (ours[0], theirs[1])]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, given), *command],
            pass_fds=given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (ours[0], theirs[1], *given):
            os.close(end)
        self._out, self._in = os.fdopen(ours[1], "wb"), os.fdopen(theirs[0], "rb")
        self._number, self._rest, self._session = 0, b"", ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")
        self.call("Network.enable")
        self.requests: list[str] = []
        """Addresses that pages have asked for since the last `open`."""
        self.received: dict[str, int] = {}
        """Bytes of each of them, by address."""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command; events that come before it are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, address: str, width: int, scheme: str = "light", height: int = 900) -> None:
        """Load a page and wait until it and its scripts are done."""
        self.requests, self.received = [], {}
        self.resize(width, height)
        self.prefer(scheme)
        self.call("Page.navigate", url=address)
        self._wait_for("Page.loadEventFired")
        self._settle(0.15)

    def resize(self, width: int, height: int = 900) -> None:
        """A window of this size; a narrow one is that of a telephone."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self._settle()

    def prefer(self, scheme: str) -> None:
        """A system that asks for "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self._settle()

    def _settle(self, seconds: float = 0.02) -> None:
        drawn = "requestAnimationFrame(() => requestAnimationFrame(done))"
        self.value(f"new Promise(done => setTimeout(() => {drawn}, {seconds * 1000}))")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"])[:500])
        return answer["result"].get("value")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._out.close()
        self._in.close()
        self._profile.cleanup()

    def _wait_for(self, event: str) -> None:
        while (message := self._read()).get("method") != event:
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
            self._addresses[parameters["requestId"]] = parameters["request"]["url"]
        elif message.get("method") == "Network.dataReceived":
            address = self._addresses.get(parameters["requestId"], "")
            self.received[address] = self.received.get(address, 0) + parameters["dataLength"]

    @functools.cached_property
    def _addresses(self) -> dict[str, str]:
        return {}

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._in.fileno(), 1 << 16)
            if not data:
                raise RuntimeError("the browser has ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser, which ends with the block."""
    program = executable()
    if program is None:
        raise RuntimeError("no Chromium is installed")
    page = Browser(program)
    try:
        yield page
    finally:
        page.close()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address under which a folder is served, as long as the block runs."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
