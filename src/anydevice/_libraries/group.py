"""Processes of a group: the proof that they belong together, and the name of a missing one."""

from __future__ import annotations

import atexit
import hmac
import json
import os
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from anydevice._core import checks
from anydevice._core.files import read_small, writing
from anydevice._core.locks import ForkSafeLock
from anydevice._core.protocols import Launched
from anydevice._machine.settings.files import described, verdicts_file
from anydevice.errors import AnyDeviceError, ConfigurationError

SECRET, FOLDER, FAILURE = "ANYDEVICE_SECRET", "ANYDEVICE_GROUP", "ANYDEVICE_FAILED"
"""Variables of a process: the group's secret and folder, and the file for the note of a failure."""

_LIMIT = "ANYDEVICE_WAIT_LIMIT"
_HMAC_LENGTH = 32
_ACTIVE_SHARE = 0.02  # of a core: a process that uses less of the CPU is idle
_variables: dict[str, str] = {}
_watches: list[tuple[threading.Event, threading.Thread]] = []
_joins = count()
_servers: dict[int, socketserver.ThreadingTCPServer] = {}
_LONGEST = 1 << 16
"""The most bytes of a request to a board, and of its answer."""


def take_variables() -> None:
    """Move the group's secret and folder out of the environment, which children inherit."""
    for name in {SECRET, FOLDER} & os.environ.keys():
        _variables[name] = os.environ.pop(name)


def read_secret(is_local: bool) -> bytes:
    """Return the group's secret; on one host, by default a key that only this user can read."""
    take_variables()
    if SECRET in _variables:
        return _variables[SECRET].encode()
    path, why = verdicts_file().with_name("group.key"), "they run on several hosts"
    try:
        if is_local:
            with writing(path, private=True, rights=0o600) as write:
                if not path.exists():
                    write(secrets.token_hex(_HMAC_LENGTH))
            return read_small(path, trusted=True)
    except OSError as error:
        why = f"none can be kept in {described(path)} ({error.strerror})"
    raise ConfigurationError(
        f"the processes need a secret, since {why}; set {SECRET} to the same text in all, such as "
        "the output of `openssl rand -hex 32`",
        source=SECRET,
    )


def read_limit() -> int:
    """Return the seconds for which processes wait for a missing or silent one."""
    text = os.environ.get(_LIMIT, "30")
    return checks.integer(_LIMIT, int(text) if text.isdecimal() else text, 1)


def seal(key: bytes, name: str, value: bytes) -> bytes:
    """Return the value, followed by an HMAC of its name and itself."""
    return value + hmac.digest(key, name.encode() + b"\0" + value, "sha256")


def unseal(key: bytes, name: str, text: bytes) -> bytes:
    """Return a sealed value; raise if it was sealed with another key."""
    value = text[:-_HMAC_LENGTH]
    if not hmac.compare_digest(text, seal(key, name, value)):
        raise AnyDeviceError(
            f"{name} comes from a program that does not know the secret of these processes, and "
            "was not used; take another port, or a network that no other user reaches"
        )
    return value


def prove(gather: Callable[[str, bytes], list[bytes]], launched: Launched) -> bytes:
    """Let every rank prove that it knows the secret (RFC 2195); return the key for its messages."""
    secret = read_secret(launched.is_local)
    challenge = b"".join(gather("challenge", secrets.token_bytes(_HMAC_LENGTH)))
    key = hmac.digest(secret, challenge, "sha256")
    for rank, answer in enumerate(gather("answer", seal(key, f"rank {launched.rank}", b""))):
        unseal(key, f"rank {rank}", answer)
    return key


class Board:
    """Values that all processes of a group write and read, in the private folder of `launch`."""

    def __init__(self, launched: Launched, folder: Path | None = None) -> None:
        self.launched, self.folder, self.key = launched, folder, b""
        self.limit, self._fault = read_limit(), ""
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._behind: tuple[list[int], float] = [], 0.0
        self._clock = 0.0  # of beats: it stops with this process

    def write(self, name: str, value: bytes) -> None:
        path = Path(self.folder or "", name.replace("/", "-"))
        path.with_suffix(".new").write_bytes(value)
        path.with_suffix(".new").replace(path)

    def read(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return Path(self.folder or "", name.replace("/", "-")).read_bytes()
        return None

    def gather(self, name: str, value: bytes) -> list[bytes]:
        """Return the values of all ranks; raise if one is missing."""
        self.write(f"{name}/{self.launched.rank}", value)
        values = self._read_all(name)
        self.write(f"{name} read/{self.launched.rank}", b".")
        if self.launched.rank == 0:  # it answers the others, unless a library keeps it from that
            self._read_all(f"{name} read")
        return values

    def _read_all(self, name: str) -> list[bytes]:
        began, values = time.monotonic(), dict.fromkeys(range(self.launched.size), b"")
        while missing := [rank for rank, text in values.items() if not text]:
            self.wait_for(missing, "missing", began)
            values |= {rank: self.read(f"{name}/{rank}") or b"" for rank in missing}
        return list(values.values())

    def from_first(self, name: str, value: str) -> str:
        """Return the text that the first process gives; all processes must call this."""
        first = self.gather(name, seal(self.key, name, value.encode()))[0]
        return unseal(self.key, name, first).decode()

    def wait_for(self, ranks: Sequence[int], fault: str, began: float) -> None:
        """Name the ranks on the error stream at half of the limit, and raise at its end."""
        seconds = time.monotonic() - began
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        text = f"rank {', '.join(map(str, ranks))} of {self.launched.size} is {fault} since {since}"
        text += f"; all end after {self.limit} s ({_LIMIT}): look at its output"
        if seconds >= self.limit:
            raise AnyDeviceError(text)
        if seconds >= self.limit / 2 and not self._fault:
            print(f"anydevice: {text}", file=sys.stderr, flush=True)
        self._fault = text if seconds >= self.limit / 2 else ""
        time.sleep(0.01)

    def meet(self, positions: Callable[[], dict[str, int]]) -> None:
        """Let all prove that they know the secret; then end this process if one becomes silent.

        A silent process has entered fewer collectives of a group than another, by its `positions`,
        and until the limit it has neither entered one nor used the CPU, as a compiler would.
        """
        try:
            self.key = prove(self.gather, self.launched)
        except OSError as error:
            text = self._fault or f"the first process of the group has ended ({error})"
            raise AnyDeviceError(text) from error
        stop_watching()  # a group before this one
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(positions, ended), daemon=True)
        thread.start()
        _watches.append((ended, thread))
        atexit.register(stop_watching)

    def _watch(self, positions: Callable[[], dict[str, int]], ended: threading.Event) -> None:
        try:
            while not ended.wait(self.limit / 10):
                self._beat({"": 1, **positions()})
            self._beat({})  # the others need not wait for this process
        except AnyDeviceError as error:
            self._fault = str(error)
            with suppress(OSError):
                self.write("fault", seal(self.key, "fault", self._fault.encode()))
        except OSError:  # the first process has ended; the library reports that
            pass
        else:
            return
        if self._fault:
            note_failure(f"anydevice.errors.AnyDeviceError: {self._fault}\n")
            print(f"anydevice: {self._fault}", file=sys.stderr, flush=True)
            time.sleep(self.limit / 5)  # until the others have read it
            os._exit(1)  # a collective cannot be interrupted

    def _beat(self, own: dict[str, int]) -> None:
        """Write the positions and the CPU time of this process, and compare all of them."""
        if fault := self.read("fault"):
            raise AnyDeviceError(unseal(self.key, "fault", fault).decode())
        active = int(cpu_time(os.getpid()) / (_ACTIVE_SHARE * self.limit))
        name = f"beat/{self.launched.rank}"
        self.write(name, seal(self.key, name, json.dumps([own, active]).encode()))
        every: list[dict[str, int]] = []
        for rank in range(self.launched.size):
            text = self.read(name := f"beat/{rank}") or seal(self.key, name, b'[{"": 0}]')
            every.append(json.loads(unseal(self.key, name, text))[0])
            if text != self._beats.get(rank, (b"", 0.0))[0]:
                self._beats[rank] = text, self._clock
        behind = [rank for rank, own in enumerate(every) if _is_last(own, every)]
        if behind != self._behind[0]:  # they may have been idle before, in a collective
            self._behind = behind, self._clock
        if behind:
            since = max(self._behind[1], *(self._beats[rank][1] for rank in behind))
            self.wait_for(behind, "silent", time.monotonic() - self._clock + since)
        self._clock += self.limit / 10


def _is_last(own: dict[str, int], every: list[dict[str, int]]) -> bool:
    """Whether a process is behind another one in a group, and ahead of none."""
    leads = {own[name] - other.get(name, own[name]) for name in own for other in every}
    return min(leads, default=0) < 0 == max(leads)


def stop_watching() -> None:
    """End the threads of `Board.meet`; the others do not wait for this process then."""
    while _watches:
        ended, thread = _watches.pop()
        ended.set()
        thread.join(1.0)


class PortBoard(Board):
    """A board in the first process, at a port that other programs may reach, too."""

    def __init__(self, launched: Launched) -> None:
        super().__init__(launched)
        host, port = "127.0.0.1" if launched.is_local else launched.address, launched.port
        began, self._lock, self._group = time.monotonic(), ForkSafeLock(), next(_joins)
        if launched.rank == 0 and port not in _servers:
            _servers[port] = _serve(host if launched.is_local else "", port)
        while True:
            with suppress(OSError):
                connection = socket.create_connection((host, port), timeout=1.0)
                break
            self.wait_for([0], "missing", began)
        connection.settimeout(self.limit)
        self._stream = connection.makefile("rwb")
        connection.close()  # once the stream is

    def ask(self, call: str, name: str, value: Any = None) -> Any:
        """Call `set`, `get`, `add` or `delete` of the first process."""
        request = json.dumps([call, f"{self._group}/{name}", value])
        with self._lock.native:
            self._stream.write(request.encode() + b"\n")
            self._stream.flush()
            try:
                return json.loads(self._stream.readline(_LONGEST))
            except ValueError as error:
                raise ConnectionError(f"no answer to {call} {name}") from error

    def write(self, name: str, value: bytes) -> None:
        self.ask("set", name, value.hex())

    def read(self, name: str) -> bytes | None:
        text = self.ask("get", name)
        with suppress(ValueError):  # text of a stranger is no value with an HMAC
            return None if text is None else bytes.fromhex(str(text))
        return b"?"


def _serve(host: str, port: int) -> socketserver.ThreadingTCPServer:
    """Serve values at a port, to everyone who reaches it, until this process ends."""
    values, lock = dict[str, Any](), ForkSafeLock()

    class Answers(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError, TypeError, ValueError):  # a stranger, or an ended process
                while line := self.rfile.readline(_LONGEST):
                    call, name, value = json.loads(line)
                    with lock.native:
                        if call == "delete":
                            values.pop(name, None)
                        elif call != "get":
                            values[name] = value + (values.get(name, 0) if call == "add" else "")
                        answer = values.get(name)
                    self.wfile.write(json.dumps(answer).encode() + b"\n")

    server = socketserver.ThreadingTCPServer((host, port), Answers, bind_and_activate=False)
    server.daemon_threads = True
    server.socket.close()
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        server.socket = socket.create_server(
            (host, port), family=family, backlog=128, dualstack_ipv6=both
        )
    except OSError as error:
        raise ConfigurationError(
            f"another program has port {port} of this machine, at which the first process is to be "
            "found; set MASTER_PORT to another one in all processes",
            source="MASTER_PORT",
        ) from error
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def meet(launched: Launched, positions: Callable[[], dict[str, int]]) -> Board:
    """Let all processes of a group prove that they know the secret; return their board."""
    read_secret(launched.is_local)  # before anything listens
    if FOLDER in _variables:
        folder = Path(_variables[FOLDER], str(next(_joins)))
        folder.mkdir(exist_ok=True)
        board = Board(launched, folder)
    else:
        board = PortBoard(launched)
    board.meet(positions)
    return board


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_time(process: int | str) -> float:
    """Return the seconds of CPU time of a process and of those that it started."""
    folder = Path("/proc", str(process))
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        children = " ".join(file.read_text() for file in folder.glob("task/*/children")).split()
    except OSError:
        return 0.0 if folder.parent.is_dir() else sum(os.times()[:4])
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_time, children))


def note_failure(text: str) -> None:
    """Note the time and the reason of a failure for the launcher, which may be gone."""
    with suppress(KeyError, OSError):
        Path(os.environ[FAILURE]).write_text(f"{time.time()}\n{text}", "utf-8", "backslashreplace")
