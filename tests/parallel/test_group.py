"""Processes of a group: strangers run nothing and end it; a missing or silent one is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from anydevice._core.protocols import Launched
from anydevice._libraries import group
from anydevice._libraries.group import free_port
from anydevice.errors import AnyDeviceError, ConfigurationError
from tests.programs import run_python

as_root = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root starts programs of two users"
)
soak = pytest.mark.soak
UNKNOWN = "comes from a program that does not know"


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def all_end() -> Iterator[None]:
    yield
    while _started:
        process = _started.pop()
        process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


def start(program: str, **variables: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    words, pipe = [sys.executable, "-W", "ignore", "-c", program], subprocess.PIPE
    _started.append(subprocess.Popen(words, env=env, text=True, stdout=pipe, stderr=pipe))
    return _started[-1]


def wait_for(word: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert f"{word}\n" in process.stdout, process.communicate()  # Gloo has words of its own


@contextmanager
def stranger(program: str, **variables: str) -> Iterator[None]:
    process = start(STRANGER + program, **variables)
    try:
        wait_for("ready", process)
        yield
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> str:
    told = process.communicate(timeout=120)[1]
    assert process.returncode not in (0, None)
    return told


def ranks(engine: str, size: int, folder: Path, limit: int = 60) -> Callable[..., dict[str, str]]:
    """Return a function that returns the variables of a rank, as torchrun or MLX set them."""
    port = free_port()
    shared = {"ANYDEVICE_ENGINE": engine, "ANYDEVICE_WAIT_LIMIT": str(limit)}
    shared |= {"MASTER_PORT": str(port), "EVIL": str(folder / "ran")}
    if engine == "mlx":
        hosts = [[f"127.0.0.1:{port + 1 + rank}"] for rank in range(size)]
        (folder / "ring").write_text(json.dumps(hosts))
        shared |= {"MLX_HOSTFILE": str(folder / "ring")}
        return lambda rank, **own: shared | {"RANK": str(rank), "MLX_RANK": str(rank), **own}
    shared |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    return lambda rank, **own: shared | {"RANK": str(rank), **own}


def engines(*long: str) -> list[Any]:
    """Return the engines, those named for `make soak` alone."""
    every = ("torch", "jax", "mlx")
    return [pytest.param(each, marks=soak if each in long else ()) for each in every]


def installed(request: pytest.FixtureRequest) -> str:
    """Return an engine that is installed."""
    pytest.importorskip(request.param)
    return str(request.param)


engine = pytest.fixture(installed, params=engines("jax", "mlx"))
quick_engine = pytest.fixture(installed, params=engines("torch", "jax"))
"""One, of which `make test` takes the quickest to import: what is tested is ours."""


JOIN = """
from anydevice import parallel
mesh = parallel.initialize("cpu")
print("joined", flush=True)
print(mesh.group.of_first([1, 2]))
"""

# A program of the user nobody, which may be unable to read Python's files: it loads them before.
STRANGER = """
import encodings.idna, os, pathlib, pickle, time
from anydevice._core.protocols import Launched
from anydevice._libraries import group
os.setgroups([]), os.setgid(65534), os.setuid(65534)
rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
board = group.PortBoard(Launched(rank, 2, 0, 2, "127.0.0.1", port))
print("ready", flush=True)
"""

ATTACK = """
class Evil:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(os.environ["EVIL"]),)
for name in ("challenge/0", "challenge read/0", "answer/0"):
    board.write(name, pickle.dumps(Evil()))
time.sleep(100)
"""

TAKE = """
for name in ("challenge/1", "challenge read/1", "answer read/1"):
    board.write(name, bytes(32))
while not (answer := board.read("answer/0")):
    time.sleep(0.01)
board.write("answer/1", answer)
time.sleep(100)
"""

WRITE = """
while True:
    board.write("beat/1", b"[9, 9]" + bytes(32))
    time.sleep(0.01)
"""

LITTER = """
while True:
    board.ask("set", "beat/1", "no hexadecimal digits")
    time.sleep(0.01)
"""
WORK = JOIN + "import time\nwhile True:\n    mesh.group.wait()\n    time.sleep(0.05)\n"


@as_root
def test_a_pickle_of_a_program_that_took_the_port_is_not_read(engine: str, tmp_path: Path) -> None:
    variables = ranks(engine, 2, tmp_path)
    with stranger(ATTACK, **variables(0)):
        assert f"rank 0 {UNKNOWN}" in end(start(JOIN, **variables(1)))
        assert "another program has port" in end(start(JOIN, **variables(0)))
    assert not (tmp_path / "ran").exists()


@as_root
def test_a_user_who_takes_a_rank_ends_the_group_and_is_named(engine: str, tmp_path: Path) -> None:
    variables = ranks(engine, 2, tmp_path)
    first = start(JOIN, **variables(0))
    with stranger(TAKE, **variables(1)):
        assert f"rank 1 {UNKNOWN}" in end(first)


@as_root
@pytest.mark.parametrize("program", [WRITE, LITTER], ids=["bytes", "litter"])
def test_a_user_who_writes_to_the_store_ends_the_group(
    quick_engine: str, program: str, tmp_path: Path
) -> None:
    variables = ranks(quick_engine, 2, tmp_path, limit=10)
    processes = [start(WORK, **variables(rank)) for rank in range(2)]
    for process in processes:
        wait_for("joined", process)
    with stranger(program, **variables(1)):
        for told in map(end, processes):
            assert f"beat/1 {UNKNOWN}" in told


def test_another_secret_ends_the_group_and_its_rank_is_named(
    quick_engine: str, tmp_path: Path
) -> None:
    variables = ranks(quick_engine, 2, tmp_path)
    other = start(JOIN, **variables(1, ANYDEVICE_SECRET="a guess"))
    assert f"rank 1 {UNKNOWN}" in end(start(JOIN, **variables(0)))
    assert f"rank 0 {UNKNOWN}" in end(other)


def test_a_store_refuses_values_without_hmac() -> None:
    torch_mesh = pytest.importorskip("anydevice._libraries.torch.mesh")
    launched = Launched(0, 1, 0, 1, "127.0.0.1", free_port())
    board = group.PortBoard(launched)
    board.key = b"of this group"
    store = torch_mesh._SealedStore(board)
    store.set("rank 1", b"127.0.0.1:5")
    assert store.get("rank 1") == b"127.0.0.1:5"
    assert [store.add("count", 2), store.add("count", 3)] == [2, 5]
    board.write("store rank 1", b"10.0.0.1:5" + bytes(32))
    with pytest.raises(AnyDeviceError, match="rank 1 comes from a program"):
        store.get("rank 1")
    assert store.delete_key("rank 1")
    with pytest.raises(TimeoutError, match="no process has set rank 1"):
        store.wait(["rank 1"], timedelta(0))


LISTEN = """
import os, pathlib
from anydevice import parallel
mesh = parallel.initialize("cpu")
mesh.group.of_first([1])
names = [os.readlink(file) for file in pathlib.Path("/proc/self/fd").iterdir() if file.is_symlink()]
lines = [pathlib.Path(f"/proc/net/tcp{kind}").read_text().splitlines()[1:] for kind in ("", 6)]
ports = [line.split() for line in sum(lines, [])]
print(*[port[1] for port in ports if port[3] == "0A" and f"socket:[{port[9]}]" in names])
mesh.group.wait()
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux alone has /proc")
@pytest.mark.parametrize(
    ("engine", "way"),
    [
        *((engine, "launch") for engine in ("torch", "jax", "mlx")),
        ("mlx", "variables"),
        *(pytest.param(engine, "variables", marks=soak) for engine in ("torch", "jax")),
    ],
)
def test_processes_of_one_host_listen_at_loopback_alone(
    engine: str, way: str, tmp_path: Path
) -> None:
    pytest.importorskip(engine)
    if way == "launch":
        (tmp_path / "train.py").write_text(LISTEN)
        words = ("-m", "anydevice", "launch", "-n", "2", "--engine", engine, "train.py")
        text = run_python(*words, cwd=tmp_path, limit=120).stdout
    else:
        variables = ranks(engine, 2, tmp_path)
        processes = [start(LISTEN, **variables(rank)) for rank in range(2)]
        text = "".join(process.communicate(timeout=120)[0] for process in processes)
    addresses = set(re.findall(r"\b([0-9A-F]{8,32}):[0-9A-F]{4}\b", text))
    assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F"}, text
    assert addresses or (engine, way) == ("mlx", "launch")


def test_several_hosts_need_a_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(group, "_variables", {})
    monkeypatch.setenv("ANYDEVICE_HOME", str(tmp_path / "home"))
    with pytest.raises(ConfigurationError, match="ANYDEVICE_SECRET to the same text in all"):
        group.read_secret(is_local=False)
    assert len(key := group.read_secret(is_local=True)) == 64
    assert group.read_secret(is_local=True) == key
    assert (tmp_path / "home" / "group.key").stat().st_mode & 0o077 == 0
    monkeypatch.setenv("ANYDEVICE_SECRET", "of all hosts")
    assert group.read_secret(is_local=False) == b"of all hosts"
    assert "ANYDEVICE_SECRET" not in os.environ


CHILD = """
import os, subprocess, sys
from anydevice._libraries import group
command = [sys.executable, "-c", "import os; print(*os.environ)"]
names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
assert not {group.SECRET, group.FOLDER} & {*names}, names
assert os.stat(group._variables[group.FOLDER]).st_mode & 0o777 == 0o700
words = [open(f"/proc/{number}/cmdline").read() for number in (os.getpid(), os.getppid())]
assert group._variables[group.SECRET] not in str(words)
"""


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="Linux alone has /proc")
def test_children_of_a_process_do_not_get_the_secret(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHILD)
    done = run_python("-m", "anydevice", "launch", "-n", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_without_a_secret_several_hosts_do_not_listen(quick_engine: str, tmp_path: Path) -> None:
    variables = ranks(quick_engine, 2, tmp_path)(0, MASTER_ADDR="127.0.0.2")
    if quick_engine == "mlx":
        (tmp_path / "ring").write_text('[["127.0.0.2:5000"], ["127.0.0.3:5000"]]')
    told = end(start(LISTENER + JOIN, **variables))
    assert "set ANYDEVICE_SECRET to the same text in all" in told
    assert "listened" not in told


LISTENER = """
import sys
names = ("socket.bind", "socket.listen")
sys.addaudithook(lambda event, words: event in names and print("listened", file=sys.stderr))
"""


def test_a_missing_process_is_named_by_every_other(quick_engine: str, tmp_path: Path) -> None:
    variables = ranks(quick_engine, 3, tmp_path, limit=3)
    some = [start(JOIN, **variables(rank)) for rank in (0, 2)]
    for told in map(end, some):
        assert re.search(r"AnyDeviceError: rank 1 of 3 is missing since \d\d:\d\d:\d\d", told)
    assert "rank 0 of 3 is missing since" in end(start(JOIN, **variables(1)))


SILENT = (
    JOIN
    + """
import time
time.sleep(200 * (mesh.rank == 1))
mesh.group.wait()
"""
)


def test_a_process_that_sleeps_is_named_by_all(quick_engine: str, tmp_path: Path) -> None:
    """Also where another launcher has started them; `train` below is the same with `launch`."""
    variables, began = ranks(quick_engine, 3, tmp_path, limit=4), datetime.now()
    processes = [start(SILENT, **variables(rank)) for rank in range(3)]
    for told in map(end, processes):
        since = re.findall(r"rank 1 of 3 is silent since (\d\d:\d\d:\d\d)", told)
        assert len(since) >= 2  # a note, then the error, which may be another process's
        seconds = (datetime.now() - began).seconds
        for text in since:
            after = datetime.strptime(text, "%H:%M:%S") - began.replace(1900, 1, 1, microsecond=0)
            assert after.seconds <= seconds - 3, (text, began)  # of a day: midnight may be between


STEPS = """
import os, pathlib, subprocess, sys, time
import numpy as np, ENGINE
from anydevice import nn, parallel
pathlib.Path("rank" + os.environ["RANK"]).touch()
while len(list(pathlib.Path().glob("rank?"))) < 3:  # one may have imported much later
    time.sleep(0.01)
# A pickle that is read in this process, from now on, ends it.
sys.addaudithook(lambda event, words: event == "pickle.find_class" and os._exit(9))
mesh = parallel.initialize("cpu")
X = np.ones((12, 4), np.float32)
model = nn.build(nn.Dense(4, 4), seed=1, device=mesh.devices[0])
class Late(nn.Callback):
    def step(self, moment):
        if moment.steps == 3 and mesh.rank == 1:
            LATE
nn.train(model, nn.Batches(X, X, size=3), nn.SGD(0.1), "mean_squared_error", epochs=2, devices=mesh,
         callbacks=Late(), progress=False, optimize="none" if "torch" in sys.modules else "default")
"""
COMPILE = (
    "subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() < 3.6: 1'])"
)


def train(late: str, engine: str, folder: Path, limit: str = "4") -> Any:
    (folder / "train.py").write_text(STEPS.replace("LATE", late).replace("ENGINE", engine))
    words = ("-m", "anydevice", "launch", "-n", "3", "--engine", engine, "train.py")
    env = {"ANYDEVICE_WAIT_LIMIT": limit, "OMP_NUM_THREADS": "1"}
    return run_python(*words, cwd=folder, env=env, limit=120)


def test_a_silent_process_is_named_by_all_and_ends_them(quick_engine: str, tmp_path: Path) -> None:
    told = train("time.sleep(200)", quick_engine, tmp_path).stderr
    assert len(re.findall(r"rank 1 of 3 is silent since \d\d:\d\d:\d\d", told)) >= 4, told
    assert told.strip().splitlines()[-1].startswith("anydevice.errors.AnyDeviceError: rank 1 of 3")


def test_a_process_that_compiles_is_not_silent(tmp_path: Path) -> None:
    pytest.importorskip("torch")  # MLX computes while it waits
    done = train(COMPILE, "torch", tmp_path, "3")
    assert done.returncode == 0, done.stderr
