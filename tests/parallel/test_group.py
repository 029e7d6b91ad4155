"""Processes of a group: strangers run nothing and end it; a missing or silent one is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from anydevice._core.protocols import Launched
from anydevice._libraries import group
from anydevice._parallel.launch import _free_port
from anydevice.errors import AnyDeviceError, ConfigurationError
from tests.programs import run_python

as_root = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root starts programs of two users"
)
UNKNOWN = "comes from a program that does not know"


def start(program: str, **variables: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    words, pipe = [sys.executable, "-W", "ignore", "-c", program], subprocess.PIPE
    return subprocess.Popen(words, env=env, text=True, stdout=pipe, stderr=pipe)


def wait_for(word: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{word}\n"


@contextmanager
def stranger(program: str, **variables: str) -> Iterator[None]:
    pytest.importorskip("torch")
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


def ranks(size: int, **variables: str) -> Callable[[int], dict[str, str]]:
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    shared |= {"ANYDEVICE_ENGINE": "torch", "ANYDEVICE_WAIT_LIMIT": "60", **variables}
    return lambda rank: {**shared, "RANK": str(rank)}


JOIN = """
from anydevice import parallel
mesh = parallel.initialize("cpu")
print("joined", flush=True)
print(mesh.group.of_first([1, 2]))
"""

# A program of the user nobody, which may be unable to read Python's files: it loads them before.
STRANGER = """
import os, pathlib, threading, time, torch.distributed as distributed
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
distributed.broadcast_object_list([1], src=0)
distributed.destroy_process_group()
os.setgroups([]), os.setgid(65534), os.setuid(65534)
is_first, address = os.environ["RANK"] == "0", ("127.0.0.1", int(os.environ["MASTER_PORT"]))
store = distributed.TCPStore(*address, is_master=is_first, wait_for_workers=False)
"""

ATTACK = """
class Evil:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(os.environ["EVIL"]),)
threading.Thread(target=distributed.TCPStore, args=(*address, 2), daemon=True).start()  # is counted
print("ready", flush=True)
store.set("challenge/0", b"0" * 32)
store.set("answer/0", b"0" * 32)
there = distributed.PrefixStore("default_pg", store)
distributed.init_process_group("gloo", store=there, rank=0, world_size=2)
distributed.broadcast_object_list([Evil()], src=0)
"""

TAKE = """
store.set("challenge/1", b"0" * 32)
store.set("answer/1", store.get("answer/0"))
print("ready", flush=True)
"""

WRITE = """
print("ready", flush=True)
while True:
    store.set("beat/1", b"[9, 9]" + bytes(32))
    time.sleep(0.01)
"""
WORK = JOIN + "import time\nwhile True:\n    mesh.group.wait()\n    time.sleep(0.05)\n"


@as_root
def test_a_pickle_of_a_program_that_took_the_port_is_not_read(tmp_path: Path) -> None:
    variables = ranks(2, EVIL=str(tmp_path / "ran"))
    with stranger(ATTACK, **variables(0)):
        assert f"rank 0 {UNKNOWN}" in end(start(JOIN, **variables(1)))
        assert "another program has port" in end(start(JOIN, **variables(0)))
    assert not (tmp_path / "ran").exists()


@as_root
def test_a_user_who_takes_a_rank_ends_the_group_and_is_named() -> None:
    variables = ranks(2)
    first = start(JOIN, **variables(0))
    with stranger(TAKE, **variables(1)):
        assert f"rank 1 {UNKNOWN}" in end(first)


@as_root
def test_a_user_who_writes_to_the_store_ends_the_group() -> None:
    variables = ranks(2)
    processes = [start(WORK, **variables(rank)) for rank in range(2)]
    for process in processes:
        wait_for("joined", process)
    with stranger(WRITE, **variables(1)):
        told = [end(process) for process in processes]
    assert any(f"beat/1 {UNKNOWN}" in text for text in told), told


def test_another_secret_ends_the_group_and_its_rank_is_named() -> None:
    pytest.importorskip("jax")
    variables = ranks(2, ANYDEVICE_ENGINE="jax")
    other = start(JOIN, **variables(1), ANYDEVICE_SECRET="a guess")
    assert f"rank 1 {UNKNOWN}" in end(start(JOIN, **variables(0)))
    assert f"rank 0 {UNKNOWN}" in end(other)


def test_a_store_refuses_values_without_hmac_and_listens_at_loopback() -> None:
    torch_mesh, port = pytest.importorskip("anydevice._libraries.torch.mesh"), _free_port()
    store = torch_mesh._SealedStore(Launched(0, 1, 0, 1, "127.0.0.1", port))
    store.set("rank 1", b"127.0.0.1:5")
    assert store.get("rank 1") == b"127.0.0.1:5"
    other = torch_mesh.distributed.TCPStore("127.0.0.1", port, is_master=False)
    other.set("rank 1", b"10.0.0.1:5" + bytes(32))
    with pytest.raises(AnyDeviceError, match="rank 1 comes from a program"):
        store.get("rank 1")
    if Path("/proc/net/tcp").exists():
        text = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        assert re.findall(rf"(\w+):{port:04X} \w+:0000 0A", text) == ["0100007F"]


def test_several_hosts_need_a_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(group, "_taken", {})
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
assert os.stat(group._taken[group.FOLDER]).st_mode & 0o777 == 0o700
words = [open(f"/proc/{number}/cmdline").read() for number in (os.getpid(), os.getppid())]
assert group._taken[group.SECRET] not in str(words)
"""


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="Linux alone has /proc")
def test_children_of_a_process_do_not_get_the_secret(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHILD)
    done = run_python("-m", "anydevice", "launch", "-n", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


MISSING = {
    "torch": r"rank 1, 2 of 3 is missing since \d\d:\d\d:\d\d",
    "jax": r"timed out task names:\s+[12]\s+[12]\s",  # the words of JAX's coordinator
}


@pytest.mark.parametrize("engine", MISSING)
def test_a_missing_process_is_named(engine: str) -> None:
    pytest.importorskip(engine)
    variables = ranks(3, ANYDEVICE_ENGINE=engine, ANYDEVICE_WAIT_LIMIT="1")
    assert re.search(MISSING[engine], end(start(JOIN, **variables(0))))
    if engine == "torch":
        assert "rank 0 of 3 is missing since" in end(start(JOIN, **variables(2)))


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
COMPILE = "subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() < 5: 1'])"


def train(late: str, engine: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(STEPS.replace("LATE", late).replace("ENGINE", engine))
    words = ("-m", "anydevice", "launch", "-n", "3", "--engine", engine, "train.py")
    env = {"ANYDEVICE_WAIT_LIMIT": "4", "OMP_NUM_THREADS": "1"}
    return run_python(*words, cwd=folder, env=env, limit=120)


@pytest.mark.parametrize(
    "engine", ["torch", *(pytest.param(name, marks=pytest.mark.soak) for name in ("jax", "mlx"))]
)
def test_a_silent_process_is_named_by_all_and_ends_them(engine: str, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    told = train("time.sleep(200)", engine, tmp_path).stderr
    assert len(re.findall(r"rank 1 of 3 is silent since \d\d:\d\d:\d\d", told)) >= 4, told
    assert told.strip().splitlines()[-1].startswith("anydevice.errors.AnyDeviceError: rank 1 of 3")


def test_a_process_that_compiles_is_not_silent(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = train(COMPILE, "torch", tmp_path)
    assert done.returncode == 0, done.stderr
