"""Starting processes: what each returns, which one failed, and when a fork is safe."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from anydevice import parallel
from anydevice._machine.engines import registry
from anydevice._machine.engines.installed import Build
from anydevice._parallel.processes import launched
from anydevice.cli import main as command_line
from anydevice.errors import AnyDeviceError, ConfigurationError, UnsupportedError
from tests.programs import run_python

linux = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux alone has /proc")


LAUNCH = ("-m", "anydevice", "launch")


def run(
    program: str,
    folder: Path,
    *words: str,
    by: Sequence[str] = (),
    script: str = "train.py",
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program with Python, or `by` a module of it, and the words after its name."""
    (folder / script).write_text(program)
    return run_python(*by, script, *words, cwd=folder, env=env, limit=120)


def launch(program: str, folder: Path, count: int, *words: str) -> Any:
    return run(program, folder, *words, by=(*LAUNCH, "-n", str(count)))


FORKED = """
import os, sys, time
import torch, torch.distributed
import anydevice
from anydevice import parallel
from anydevice._libraries import group

def joined(number):
    mesh = parallel.initialize("cpu")
    again = parallel.initialize("cpu")  # the group that is there is used
    assert again == mesh
    total = torch.tensor([float(mesh.rank)])
    torch.distributed.all_reduce(total)
    tree = {"weight": torch.arange(24.0).reshape(8, 3), "bias": torch.ones(3)}
    there = parallel.shard(tree, parallel.Mesh(mesh.devices, shard=mesh.size, group=mesh.group))
    held = there["weight"].to_local().numel()
    back = parallel.gather(there)
    for name in tree:
        assert back[name].tolist() == tree[name].tolist()  # cut and joined, nothing computed
    rows = parallel.split_batch(torch.arange(5), mesh)
    assert len(rows) == 1
    return number, mesh.rank, mesh.size, float(total), held, rows[0].tolist()

anydevice.device("cpu", engine="torch")
found = parallel.launch(joined, 7, processes=2)
assert found == [(7, 0, 2, 1.0, 12, [0, 1, 2]), (7, 1, 2, 1.0, 12, [3, 4])], found

def by_others(ports):
    del group._variables[group.FOLDER]  # as without `launch`: they meet at a port
    rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    launchers = (
        {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": size, "SLURM_LOCALID": rank,
         "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "7"},
        {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size,
         "OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_LOCAL_SIZE": size},
        {"JOB_COMPLETION_INDEX": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"},
        None,  # a group of the user's own
    )
    sums = []
    for launcher, port in zip(launchers, ports, strict=True):
        if launcher is None:
            torch.distributed.init_process_group("gloo", init_method=f"tcp://localhost:{port}",
                                                 rank=1 - int(rank), world_size=int(size))
            there = torch.distributed.group.WORLD
        else:
            launcher["MASTER_PORT"] = str(port)
            os.environ.update(launcher)
        mesh = parallel.initialize("cpu")
        own = 1 - mesh.rank if launcher is None else mesh.rank
        assert (own, mesh.size) == (int(rank), int(size)), mesh
        assert launcher is not None or torch.distributed.group.WORLD is there
        total = torch.tensor([mesh.rank + 1.0])
        torch.distributed.all_reduce(total)
        sums.append(float(total))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        for name in launcher or ():
            del os.environ[name]
    return sums

from anydevice._libraries.group import free_port
found = parallel.launch(by_others, [free_port() for _ in range(4)], processes=2)
assert found == [[3.0] * 4] * 2, found

def slow_to_leave():
    mesh = parallel.initialize("cpu")
    os.dup2(os.open("leaving.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    if mesh.rank:  # looks for the others, and for the first process, long after they have come
        time.sleep = lambda seconds, sleep=time.sleep: sleep(0.3)

parallel.launch(slow_to_leave, processes=3)
assert open("leaving.txt").read() == ""

import socket
other = socket.create_server(("", 0))  # another program, such as a second job with the same port

def too_late():
    del group._variables[group.FOLDER]
    os.environ["MASTER_PORT"] = str(other.getsockname()[1])
    if os.environ["RANK"] == "0":
        parallel.initialize("cpu")

try:
    parallel.launch(too_late, processes=2)
    raise SystemExit("nothing was raised")
except anydevice.AnyDeviceError as error:
    assert "errors.ConfigurationError: another program has port" in str(error), error
other.close()

def fails():
    mesh = parallel.initialize("cpu")
    if mesh.rank == 1:
        raise ValueError("the reason")
    torch.distributed.barrier()

def dies():
    mesh = parallel.initialize("cpu")
    if mesh.rank == 1:
        os.kill(os.getpid(), 9)
    torch.distributed.barrier()

for function, end in ((fails, "ValueError: the reason"), (dies, "error message (SIGKILL)")):
    try:
        parallel.launch(function, processes=3)
        raise SystemExit("nothing was raised")
    except anydevice.AnyDeviceError as error:
        assert str(error).startswith("process 1 of 3 failed"), error
        assert str(error).strip().endswith(end), error

from anydevice._parallel.launch import unsafe_to_fork
assert unsafe_to_fork() is None
import _thread
_thread.start_new_thread(time.sleep, (0.1,))  # a thread that is about to end
assert unsafe_to_fork() is None
torch.ones(3000, 3000).exp().sum()
assert "computed with" in unsafe_to_fork()
print("held")
"""


@linux
def test_forked_processes_join_and_fail_as_one(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run(FORKED, tmp_path, OMP_NUM_THREADS="2", MKL_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "held"
    assert "starting" not in done.stderr


SPAWNED = """
import threading, time
from anydevice import parallel

def rank(power):
    import os
    return int(os.environ["RANK"]) ** power

if __name__ == "__main__":
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    print(parallel.launch(rank, 2, processes=3))
"""


def test_beside_a_thread_processes_are_started_anew_and_it_says_why(tmp_path: Path) -> None:
    done = run(SPAWNED, tmp_path)
    assert done.stdout.strip() == "[0, 1, 4]", done.stderr
    assert "not by a fork: another thread of Python is running" in done.stderr


def test_a_function_that_cannot_be_sent_to_new_processes_is_said_so() -> None:
    end = threading.Event()
    other = threading.Thread(target=end.wait)  # beside which no process is forked
    other.start()
    try:
        with pytest.raises(ConfigurationError, match=r"cannot be sent to new ones.*lambda"):
            parallel.launch(lambda: 1, processes=2)
    finally:
        end.set()
        other.join()


ABORTING = """
import os, pathlib, time
from anydevice import parallel

def work():
    failing = pathlib.Path("failing")
    if os.environ["RANK"] == "0":
        failing.touch()
        raise ValueError("the reason")
    while not failing.exists():
        time.sleep(0.005)
    time.sleep(0.1)
    os.abort()  # as JAX does where the first process is gone

if __name__ == "__main__":
    if "RANK" in os.environ:
        work()
    parallel.launch(work, processes=3)
"""


def test_processes_that_abort_are_not_taken_for_the_one_that_failed(tmp_path: Path) -> None:
    for start, words in ((run, "failed:"), (launch, "failed first (exit code 1)")):
        done = start(ABORTING, tmp_path, *([3] if start is launch else []))
        assert done.returncode == 1
        assert f"process 0 of 3 {words}" in done.stderr
        assert done.stderr.strip().endswith("ValueError: the reason")
        (tmp_path / "failing").unlink()


def test_a_result_that_cannot_be_pickled_is_said_so() -> None:
    with pytest.raises(AnyDeviceError, match="returned, a function, cannot be pickled"):
        parallel.launch(_unpicklable, processes=2)


def _unpicklable() -> Any:
    return lambda: 1


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (print, {"processes": 0}, "processes must be an integer of 1 or more"),
        (print, {"engine": "numpy"}, "engine is one of torch, jax, mlx"),
        (None, {}, "launch calls a function in each process"),
    ],
)
def test_wrong_arguments_are_refused(function: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        parallel.launch(function, **options)


def test_a_process_alone_is_a_mesh_of_one_and_imports_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; from anydevice import parallel; mesh = parallel.initialize('cpu')\n"
        "print(mesh.size, mesh.rank, 'torch.distributed' in sys.modules, 'torch' in sys.modules)"
    )
    done = run(program, tmp_path, RANK="0", WORLD_SIZE="1")
    assert done.stdout.split() == ["1", "0", "False", "False"], done.stderr


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "12345",
}  # fmt: skip
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
JOB = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "pod-0"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({**TORCHRUN, "MASTER_PORT": "5", "LOCAL_WORLD_SIZE": "2"}, (3, 8, 1, 2, "a", 5)),
        (SLURM, (5, 8, 1, None, "gpu03", 29500 + 12345)),
        ({**SLURM, "SLURM_PROCID": "0"}, (0, 8, 1, None, "gpu03", 29500 + 12345)),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 2, 0, 2, "127.0.0.1", 29500)),
        (JOB, (2, 4, 0, None, "pod-0", 29500)),
        # The script of sbatch itself is one process.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, None),
    ],
)
def test_launchers_are_known(variables: dict[str, str], expected: tuple[Any, ...] | None) -> None:
    found = launched(variables)
    assert (found and tuple(vars(found).values())) == expected


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        ({**TORCHRUN, "RANK": "x"}, "RANK must be an integer, not 'x'"),
        (MPI, "MASTER_ADDR, the host of the first one"),
    ],
)
def test_contradicting_variables_are_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        launched(variables)


def test_the_command_runs_a_script_in_each_process(tmp_path: Path) -> None:
    program = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)"
    done = launch(program, tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "0 2", "1 2"]
    assert launch(program, tmp_path, 0).returncode == 2
    for name, what in (("nothing.py", "is no file"), (".", "is a folder")):
        done = run(program, tmp_path, by=(*LAUNCH, name))
        assert done.returncode == 2
        assert f"argument script: {name} {what}; give a Python file" in done.stderr


SCRIPT = """
import os, pathlib, pickle, sys
class Own: pass
assert pickle.loads(pickle.dumps(Own())).__class__ is Own
assert sys.modules["__main__"].Own is Own and __name__ == "__main__"
here = pathlib.Path(__file__).resolve().parent
assert sys.path[0] == str(here) and sys.argv[1:] == ["--rate", "1"], (sys.path, sys.argv)
import beside
if len(sys.argv) > 2:
    beside.fails()
"""


def test_a_script_runs_as_python_runs_it(tmp_path: Path) -> None:
    """Its own modules, arguments and classes; its traceback has no lines of the launcher."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text("def fails():\n    raise OSError('here')\n")
    done = run(SCRIPT, tmp_path, "--rate", "1", by=LAUNCH, script="scripts/train.py")
    assert done.returncode == 1
    shown = done.stderr.split("failed first (exit code 1):\n")[1].splitlines()
    assert shown[0] == "Traceback (most recent call last):"
    assert shown[1] == '  File "scripts/train.py", line 10, in <module>'
    assert shown[-1] == "OSError: here"
    done = launch("x = = 1\n", tmp_path, 1)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("SyntaxError: invalid syntax")
    assert "anydevice/_parallel" not in done.stderr


def test_an_error_is_shown_where_nobody_waits_for_it_any_more(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone" / "0")
    by = ("-m", "anydevice._parallel")
    done = run("raise OSError('here')\n", tmp_path, by=by, ANYDEVICE_FAILED=gone)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "OSError: here"


PARENT = """
import os, pathlib, subprocess, sys, time
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(f"child{os.environ['RANK']}").write_text(str(process.pid))
while len(list(pathlib.Path().glob("child?"))) < 2:
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    os._exit(5)
time.sleep(60)
"""


@linux
def test_what_processes_started_ends_with_them(tmp_path: Path) -> None:
    done = launch(PARENT, tmp_path, 2)
    assert done.returncode == 5, done.stderr
    assert done.stderr.endswith("(exit code 5); it ended without an error message\n")
    for rank in range(2):  # the parent of one is gone
        assert not _runs(int((tmp_path / f"child{rank}").read_text()))


ASLEEP = """
import os, pathlib, time

def wait():
    pathlib.Path(f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(200)

if __name__ == "__main__":
    if "RANK" in os.environ:
        wait()
    else:
        from anydevice import parallel
        parallel.launch(wait, processes=2)
"""


@linux
@pytest.mark.parametrize("start", [(*LAUNCH, "-n", "2"), ()], ids=["script", "function"])
def test_processes_end_with_their_launcher(tmp_path: Path, start: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(ASLEEP)
    launcher = subprocess.Popen([sys.executable, *start, "train.py"], cwd=tmp_path)
    try:
        wait_for(lambda: len([file for file in tmp_path.glob("rank?") if file.read_text()]) == 2)
    finally:
        launcher.kill()
        launcher.wait()
    numbers = [int(file.read_text()) for file in tmp_path.glob("rank?")]
    wait_for(lambda: not any(map(_runs, numbers)))


PRINTING = "while True:\n    print('a line of the log')\n"


@linux
def test_it_ends_where_nobody_reads_what_is_printed(tmp_path: Path) -> None:
    """As with `| head`: processes that wait for a reader would wait for ever."""
    (tmp_path / "train.py").write_text(PRINTING)
    command, pipe = [sys.executable, *LAUNCH, "train.py"], subprocess.PIPE
    started = subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "a line of the log\n"
    started.stdout.close()
    try:
        assert started.wait(timeout=60) == 141
    finally:
        started.terminate()
    assert started.stderr is not None
    assert started.stderr.read() == ""
    started.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_it_ends_where_the_disk_is_full(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRINTING)
    command, pipe = [sys.executable, *LAUNCH, "train.py"], subprocess.PIPE
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=pipe, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith(b"OSError: [Errno 28] No space left on device\n")


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def _runs(number: int) -> bool:
    try:
        status = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


LEAVING = """
import sys
from anydevice import parallel

mesh = parallel.initialize("cpu")
mesh.group.wait()
if mesh.rank == 1:
    HOW
mesh.group.wait()
"""


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        ("torch", "sys.exit(3)"),
        ("jax", "raise SystemExit(3)"),
        pytest.param("torch", "raise SystemExit(3)", marks=pytest.mark.soak),
        pytest.param("jax", "sys.exit(3)", marks=pytest.mark.soak),
    ],
)
def test_a_process_that_leaves_ends_all(engine: str, how: str, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    program = LEAVING.replace("HOW", how)
    done = run(program, tmp_path, by=(*LAUNCH, "-n", "2", "--engine", engine))
    assert done.returncode == 3, done.stderr[-2000:]
    assert "process 1 of 2 failed first (exit code 3)" in done.stderr


LATE = """
import time
from anydevice import parallel

mesh = parallel.initialize("cpu")
mesh.group.wait()
if mesh.rank == 0:
    time.sleep(15)  # as one does that computes or writes something alone at last
    print("done")
"""


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_process_may_end_much_later_than_the_others(engine: str, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    done = run(LATE, tmp_path, by=(*LAUNCH, "-n", "2", "--engine", engine))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("done")


WAITING = """
import os, pathlib, sys, time
try:
    pathlib.Path(f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path(f"stopped{os.environ['RANK']}").touch()
    sys.exit(3)
"""


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_the_command_stops_all_processes(tmp_path: Path, number: int) -> None:
    """Ctrl-C goes on to them, and nothing is started again; a request to end ends them first."""
    (tmp_path / "train.py").write_text(WAITING)
    command = [sys.executable, *LAUNCH, "-n", "2", "--restarts", "2"]
    process = subprocess.Popen([*command, "train.py"], cwd=tmp_path, stderr=subprocess.PIPE)
    names = [tmp_path / f"pid{rank}" for rank in range(2)]
    wait_for(lambda: all(name.exists() and name.read_text() for name in names))
    process.send_signal(number)
    told = process.communicate(timeout=30)[1].decode()
    assert process.returncode == (3 if number == signal.SIGINT else 128 + number), told
    assert "starting again" not in told
    assert (tmp_path / "stopped1").exists() == (number == signal.SIGINT)
    assert not any(Path("/proc", name.read_text()).exists() for name in names)


def test_several_hosts_are_started_by_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["launch", "--hosts", "a,b", __file__]) == 2
    said = capsys.readouterr().err
    assert all(
        name in said for name in ("torch.distributed.run", "jax.distributed", "Slurm", "Ray")
    )


def test_an_engine_that_is_not_installed_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('started')")

    monkeypatch.setattr(registry, "read_build", lambda engine, module, *rest: Build(engine, module))
    with pytest.raises(UnsupportedError, match="JAX is not installed; run: pip install jax"):
        parallel.launch(print, engine="jax")
    assert command_line.main(["launch", "-n", "2", "--engine", "jax", str(script)]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "anydevice: JAX is not installed; run: pip install jax\n")
