"""A real command on a pseudo-terminal, as the user's session leader would have it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from typing import IO

PATIENCE = 300.0

# In the child and not by `preexec_fn`, which forks this process with all of its threads.
TAKE_THE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class TerminalStream(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Terminal:
    """A pseudo-terminal with `anydevice` on it, called with these words.

    `changes` are variables of its environment; with `output`, standard output goes to that file.
    """

    def __init__(
        self,
        *words: str,
        columns: int = 80,
        rows: int = 24,
        output: IO[bytes] | None = None,
        **changes: str,
    ) -> None:
        self.primary, self.secondary = pty.openpty()
        self.resize(columns, rows)
        self.settings = termios.tcgetattr(self.secondary)
        self.shown = ""
        environment = {**os.environ, "PYTHONUTF8": "1", "TERM": "xterm", **changes}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_THE_TERMINAL, "-m", "anydevice", *words],
            stdin=self.secondary,
            stdout=output or self.secondary,
            stderr=self.secondary,
            env=environment,
            start_new_session=True,
        )

    def resize(self, columns: int, rows: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self.primary, termios.TIOCSWINSZ, size)

    def until(self, pattern: str, again: bytes = b"") -> str:
        """What is shown up to the pattern; the rest is kept for the next question.

        `again` is typed now and then: Ctrl-C just before Python begins to wait for a key is seen
        with the next one alone.
        """
        deadline = time.monotonic() + PATIENCE
        patient = time.monotonic() + 3
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            if again and time.monotonic() > patient:
                self.type(again)
                patient += 3
            ready, _, _ = select.select([self.primary], [], [], 0.1)
            if ready:
                self.shown += os.read(self.primary, 65536).decode("utf-8", "replace")
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.shown!r}"
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def type(self, keys: bytes) -> None:
        os.write(self.primary, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for descriptor in (self.primary, self.secondary):
            try:
                os.close(descriptor)
            except OSError:  # the test has closed it
                pass
