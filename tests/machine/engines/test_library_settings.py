"""The number of threads, as the libraries themselves show it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import anydevice
from anydevice import llm
from anydevice._machine.engines.library_settings import _THREAD_VARIABLES
from tests.programs import run_python

PROGRAM = """
import json, os, pathlib, sys
import anydevice
from anydevice._machine.engines import library_settings

def state():
    tasks = pathlib.Path("/proc/self/task").glob("*/comm")
    counts = [torch.get_num_threads(), get()]
    counts.append(sum(task.read_text().startswith("tf_XLAEigen") for task in tasks))
    counts += [device.max_compute_units for p in cl.get_platforms() for device in p.get_devices()]
    return counts

if "early" in sys.argv:
    anydevice.configure(threads=1)
import numpy, torch, jax, pyopencl as cl
get, _ = library_settings._openblas(pathlib.Path(numpy.__file__).parent)
jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((8, 8))))
states = [state()]
if "late" in sys.argv:
    anydevice.configure(threads=1)
    states.append(state())
    anydevice.configure(threads=None)
    states.append(state())
variables = [os.environ.get(name) for name in library_settings._THREAD_VARIABLES]
print(json.dumps([*states, variables]))
"""
NONE: dict[str, str | None] = dict.fromkeys([*_THREAD_VARIABLES, "XLA_FLAGS"])

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux does")


@pytest.fixture(autouse=True)
def libraries() -> None:
    for name in ("torch", "jax", "pyopencl"):
        pytest.importorskip(name)


def test_threads_that_are_set_first_reach_every_library() -> None:
    done = run_python("-c", PROGRAM, "early", env=NONE)
    counts, variables = json.loads(done.stdout)
    assert set(counts) == {1}
    assert len(counts) > 3, "PoCL shows a device"
    assert variables == ["1"] * len(_THREAD_VARIABLES)
    assert done.stderr == ""


def test_late_threads_change_what_can_change_and_name_the_others() -> None:
    env = {**NONE, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    done = run_python("-c", PROGRAM, "late", env=env)
    before, now, after, variables = json.loads(done.stdout)
    assert now[:2] == [1, 1]
    assert now[2:] == before[2:]
    assert after == before
    assert variables == [env[name] for name in _THREAD_VARIABLES]
    for library in ("JAX", "PyOpenCL"):
        assert f"threads comes too late for {library}, which has started" in done.stderr
    assert "NumPy" not in done.stderr


@pytest.mark.filterwarnings("ignore:threads comes too late")
def test_a_language_model_in_onnxruntime_takes_the_number_when_it_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from tests.llm.quantized_files import write_folders
    from tests.llm.test_quantized import SIZES, random_state
    from tests.llm.tokenizer_files import BYTES

    state = {name: x + n / 64 for n, (name, x) in enumerate(random_state().items())}
    folder, _ = write_folders(tmp_path, SIZES, state, "int4")
    (folder / "tokenizer.json").write_text(json.dumps(BYTES))
    for threads in (1, 3):
        anydevice.configure(threads=threads)
        executor = llm.load(folder, "cpu")._executor
        sessions = [executor._head, *(session for _, session in executor.sections)]
        options = [session._session.get_session_options() for session in sessions]
        assert {each.intra_op_num_threads for each in options} == {threads}
