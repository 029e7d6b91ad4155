"""What several folders of tests need."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib
import importlib.util
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

BuildLibrary = Callable[[str, str], Path]

# A shell that starts the tests in the background lets them, and their children, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests run side by side: threads of PyTorch and NumPy that wait for work leave the cores to the
# others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

# Several devices to move between where there is only a CPU, and code that is compiled without
# optimization: most of a first run is compiling. JAX reads this once for a process, so that all
# tests have the same number. `make soak-isa` optimizes.
for flag in ("--xla_force_host_platform_device_count=3", "--xla_backend_optimization_level=0"):
    if flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
os.environ.setdefault("POCL_EXTRA_BUILD_FLAGS", "-cl-opt-disable")


def _kind_of_machine() -> str:
    """What compiled code depends on: this processor and these libraries."""
    told = [platform.machine(), sys.version]
    libraries = ("jaxlib", "torch", "triton", "mlx", "pocl-binary-distribution", "pyopencl")
    for name in libraries:
        with suppress(metadata.PackageNotFoundError):
            told.append(f"{name} {metadata.version(name)}")
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        told += sorted({line for line in lines if line.startswith(("model name", "flags"))})
    except OSError:
        told.append(platform.processor())
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _compiled_code() -> Path:
    return Path(__file__).parents[1] / ".cache" / "tests" / _kind_of_machine()[:12]


def _keep_compiled_code() -> None:
    """Later runs, and the processes that tests start, find what was compiled in `.cache/`.

    Most of the time of a first run is compiling. A test about compiling or keeping names folders of
    its own; whoever runs the tests may name others too.
    """
    folder = _compiled_code()
    kept = {
        "JAX_COMPILATION_CACHE_DIR": folder / "jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "POCL_CACHE_DIR": folder / "pocl",
        "TORCHINDUCTOR_CACHE_DIR": folder / "inductor",
        "TRITON_CACHE_DIR": folder / "triton",
    }
    for name, value in kept.items():
        os.environ.setdefault(name, str(value))
        if isinstance(value, Path):
            value.mkdir(parents=True, exist_ok=True)
    for file in (folder / "jax").iterdir():
        with suppress(FileNotFoundError):
            if not file.stat().st_size:  # its writer was killed
                file.unlink()


def _write_at_once(self: Any, key: str, value: bytes) -> None:
    """`LRUCache.put` of JAX, but nobody reads half a file while it is written."""
    half = Path(str(self.path)) / f"{os.getpid()}-{threading.get_ident()}.part"
    half.write_bytes(value)
    half.replace(half.with_name(f"{key}-cache"))


_PRODUCTS = """
import torch
for dtype in (torch.bfloat16, torch.float16):
    for shape in ((65, 129), (10, 8), (1, 5000)):
        x = torch.ones(shape, dtype=dtype)
        torch.nn.functional.linear(x, x)
"""


def _leave_out_what_the_machine_fails_at() -> None:
    """Some virtual machines say that the processor has AMX, and then fail its instructions.

    PyTorch uses them for products of 16-bit numbers, and would end with the process.
    """
    flags = Path("/proc/cpuinfo")
    if (
        "ONEDNN_MAX_CPU_ISA" in os.environ
        or not flags.exists()
        or "amx_tile" not in flags.read_text()
    ):
        return
    known = _compiled_code() / "amx"
    if not known.exists():
        ended = subprocess.run([sys.executable, "-c", _PRODUCTS], capture_output=True, check=False)
        known.write_text("works" if ended.returncode == 0 else "fails")
    if known.read_text() == "fails":
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"


_keep_compiled_code()
_leave_out_what_the_machine_fails_at()


_collecting: dict[str, float] = {"since": 0.0, "slow": False}


def _notice_slow_collections(phase: str, info: dict[str, int]) -> None:
    if phase == "start":
        _collecting["since"] = time.perf_counter()
    elif info["generation"] == 2 and time.perf_counter() - _collecting["since"] > 0.1:
        _collecting["slow"] = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the files, and the tests in each, by the seed in `ANYDEVICE_TEST_ORDER`."""
    seed = os.environ.get("ANYDEVICE_TEST_ORDER")
    if seed is None:
        return
    order = random.Random(seed)
    places: dict[Path, float] = {}
    keys = {item: (places.setdefault(item.path, order.random()), order.random()) for item in items}
    items.sort(key=keys.__getitem__)


def pytest_collection_finish() -> None:
    """Python looks for cycles among what a test made, not among all that the libraries hold.

    A look at everything takes most of a second once they are imported, and many tests ask for one.
    """
    gc.collect()
    gc.freeze()
    gc.callbacks.append(_notice_slow_collections)


_resident_limit = 1.4 * 2**30
"""The bytes of a worker above which the programs that libraries compiled are freed."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Keep workers small, and searches for cycles quick."""
    global _resident_limit
    if _resident_bytes() > _resident_limit:
        _free_compiled_programs()
        _resident_limit = max(_resident_limit, 1.15 * _resident_bytes())
    if _collecting["slow"]:  # what earlier tests left is no longer searched
        gc.collect()
        gc.freeze()
        _collecting["slow"] = False


def _resident_bytes() -> int:
    """Return the memory of this process; 0 if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


def _free_compiled_programs() -> None:
    """Free what JAX, PyTorch, MLX and PoCL keep for later calls, and return freed memory."""
    for name, method in (
        ("jax", "clear_caches"),
        ("torch._dynamo", "reset"),
        ("mlx.core", "clear_cache"),
    ):
        if name in sys.modules:
            getattr(sys.modules[name], method)()
    for name in ("elementwise", "programs", "rows"):  # a kernel takes PoCL a megabyte
        module = sys.modules.get(f"anydevice._engines.opencl.kernels.{name}")
        for function in () if module is None else vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    with suppress(AttributeError, OSError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def pytest_unconfigure() -> None:
    """What the libraries made, they may take apart when Python ends."""
    gc.unfreeze()


_OPTIONAL = {"torch", "jax", "mlx", "cupy", "pyopencl", "transformers", "tokenizers", "gguf"}
_OPTIONAL |= {"jinja2", "flax", "equinox", "optax", "accelerate", "lightning_fabric", "triton"}
_OPTIONAL |= {"scipy", "pandas", "polars", "attrs", "attr", "array_api_compat", "safetensors"}

_ASKED = set(os.environ.get("ANYDEVICE_TEST_ENGINES", "").split(","))
_SEED = os.environ.get("ANYDEVICE_TEST_SEED", "1")
_ABSENT = {name for name in _OPTIONAL if importlib.util.find_spec(name) is None}
"""RawDevice before a test hides what is installed."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draw the same numbers whatever ran before; skip a test whose `needs` are not installed."""
    if "torch" in sys.modules:  # its `manual_seed` notes the call for each kind of GPU, too
        sys.modules["torch"].default_generator.manual_seed(0)
    if "mlx.core" in sys.modules:
        sys.modules["mlx.core"].random.seed(0)
    for name in [name for mark in item.iter_markers("needs") for name in mark.args]:
        if name in _ABSENT:
            say = pytest.fail if name in _ASKED else pytest.skip
            say(f"{name} is not installed")


def _missing_library(error: BaseException, cases: Sequence[str]) -> str | None:
    """The library that is not installed here and that the error is about.

    A test imports it itself, or it is one of its `cases`, and anydevice looked for it.
    """
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        name = error.name.partition(".")[0]
        ours = Path(__file__).parent in _last_place(error).parents
        return name if (ours or name in cases) and name in _ABSENT - _ASKED else None
    if any(reason.code == "library_missing" for reason in getattr(error, "reasons", ())):
        return next((name for name in cases if name in _ABSENT - _ASKED), None)
    return None


def _last_place(error: BaseException) -> Path:
    """The file whose line raised the error, but for the machinery of imports."""
    files, entry = [], error.__traceback__
    while entry is not None:
        files.append(entry.tb_frame.f_code.co_filename)
        entry = entry.tb_next
    named = [name for name in files if "importlib" not in name and "_pytest" not in name]
    return Path(named[-1]) if named else Path()


def _skipped(report: Any, call: Any, path: Path, cases: Sequence[str] = ()) -> Any:
    """The report, as that of a skipped test where it failed because a library is missing."""
    error = call.excinfo.value if call is not None and call.excinfo is not None else None
    while error is not None:
        name = _missing_library(error, cases)
        if name and report.failed:
            report.outcome = "skipped"
            report.longrepr = (str(path), 0, f"Skipped: {name} is not installed")
        error = error.__cause__
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A test that fails because a library is not installed is skipped, and names it."""
    return _skipped((yield), call, item.path, _cases(item))


def _cases(item: pytest.Item) -> list[str]:
    """What a test is parametrized with, as far as it is text."""
    given = getattr(item, "callspec", None)
    return [value for value in given.params.values() if isinstance(value, str)] if given else []


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """So is a file of tests that does, and one that needs the helpers in it."""
    report = yield
    report = _skipped(report, getattr(report, "call", None), collector.path)
    if report.skipped:  # half of it stays imported otherwise
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) == str(collector.path):
                del sys.modules[name]
    return report


@pytest.fixture
def build_library(tmp_path: Path) -> BuildLibrary:
    """Build a shared library from a few lines of C: `build_library("libcuda.so.1", source)`.

    Returns the folder that holds it, to be put into `LD_LIBRARY_PATH`.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: a faulty driver cannot be built here")

    def build(name: str, source: str) -> Path:
        folder = tmp_path / "drivers"
        folder.mkdir(exist_ok=True)
        text = folder / f"{name}.c"
        text.write_text(source)
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(folder / name), str(text)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return folder

    return build


@pytest.fixture(autouse=True)
def nobody_else(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """No settings, variables or choices of the person who runs the tests, nor of another test.

    Only the long form of the tests draws inputs anew in each run; `ANYDEVICE_TEST_SEED` draws
    others in the short one.
    """
    from anydevice._machine.choose import scope
    from anydevice._machine.settings import config as settings

    for name in [name for name in os.environ if name.startswith(("ANYDEVICE_", "LOCAL_RANK"))]:
        if name != "ANYDEVICE_TEST_ENGINES":
            monkeypatch.delenv(name)
    monkeypatch.setenv("ANYDEVICE_HOME", str(tmp_path_factory.getbasetemp() / "no-home"))
    if request.node.get_closest_marker("soak") is None:
        monkeypatch.setenv("ANYDEVICE_SEED", _SEED)
    for name in ("JAX_ENABLE_X64", "JAX_DISABLE_JIT", "TORCHDYNAMO_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    settings.forget_changes()
    scope.forget()
    jax = sys.modules.get("jax")
    if jax is not None:  # examples may turn these, as a user would, and not turn them back
        jax.config.update("jax_enable_x64", False)
        jax.config.update("jax_disable_jit", False)
        sys.modules["jax._src.lru_cache"].LRUCache.put = _write_at_once


@pytest.fixture(scope="session")
def sessions() -> Iterator[Any]:
    """Where the blocks of a page and the examples run."""
    from tests.docs.sessions import Sessions

    sessions = Sessions()
    yield sessions
    sessions.close()


@pytest.fixture
def children_count_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lines are counted, the processes that a test starts count theirs."""
    coverage = sys.modules.get("coverage")
    if coverage is not None and coverage.Coverage.current() is not None:
        tests = Path(__file__).parent
        monkeypatch.setenv("COVERAGE_PROCESS_START", str(tests / "children.coveragerc"))
        monkeypatch.setenv("COVERAGE_FILE", str(tests.parent / ".coverage"))


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home of its own, and a working directory without a project file."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("ANYDEVICE_HOME", str(folder))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return folder


@pytest.fixture
def no_kernels_trusted(home: Path) -> Iterator[None]:
    """No verdict about a kernel of ours is in memory or in a file, before and after the test."""
    from anydevice._ops import trusted_kernels

    trusted_kernels.forget()
    yield
    trusted_kernels.forget()


_FAKED = ("torch", "jax", "jaxlib", "mlx", "mlx.core", "cupy", "pyopencl")


class Site:
    """A small site-packages folder, the only one on the search path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def distribution(self, name: str, version: str, entry_points: str | None = None) -> Path:
        """Metadata as an installer leaves it."""
        folder = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}")
        if entry_points is not None:
            (folder / "entry_points.txt").write_text(entry_points)
        return folder

    def package(self, name: str, version: str | None = None) -> Path:
        """A package that fails when it is imported, with metadata where a version is given."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "__init__.py").write_text("raise ImportError('imported, but only looked at')\n")
        if version:
            self.distribution(name, version)
        return folder

    def torch(
        self,
        version: str,
        cuda: str | None = None,
        hip: str | None = None,
        library: bytes | None = None,
        xpu: str | None = None,
    ) -> Path:
        """PyTorch: its version file, and its library with the architectures somewhere inside."""
        folder = self.package("torch", version.partition("+")[0])
        (folder / "version.py").write_text(
            "from typing import Optional\n\n"
            "__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']\n"
            f"__version__ = {version!r}\ndebug = False\n"
            f"cuda: Optional[str] = {cuda!r}\ngit_version = '0'\nhip: Optional[str] = {hip!r}\n"
            f"xpu: Optional[str] = {xpu!r}\n"
        )
        (folder / "lib").mkdir()
        if library is not None:
            padding = b"\x7fELF\0 compute_sizes\0sm_\0asm_80\0" * 100
            (folder / "lib" / "libtorch_python.so").write_bytes(padding + library + padding)
        return folder

    def mlx(self, version: str, *backends: str) -> Path:
        """MLX, which is a namespace folder with a compiled module and a library in it."""
        folder = self.folder / "mlx"
        (folder / "lib").mkdir(parents=True)
        (folder / "core.cpython-311-x86_64-linux-gnu.so").touch()
        self.distribution("mlx", version)
        for backend in backends:
            self.distribution(f"mlx-{backend}", version)
            (folder / "lib" / "libmlx.so").touch()
        return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """An empty site-packages folder in the place of the real ones."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    standard = [entry for entry in sys.path if entry and "site-packages" not in entry]
    standard = [entry for entry in standard if not (Path(entry) / "anydevice").is_dir()]
    monkeypatch.setattr(sys, "path", [str(folder), *standard])
    for name in _FAKED:
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return Site(folder)
