from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest

import anydevice
from anydevice._core.backends import BACKENDS
from anydevice._core.device import Device
from anydevice._core.engine import Absent
from anydevice._core.finding import DeviceStatus, Facts, Reason
from anydevice._machine.engines import registry
from anydevice.errors import ConfigurationError, DeviceNotFoundError, UnsupportedError
from tests.programs import output_of

ADDED = """
from anydevice._machine.engines.registry import EngineRow

ROW = EngineRow(
    name="tiny", label="Tiny", module="tiny", target="tiny_engine:ENGINE",
    libraries=("tiny",), backends=("cpu", "gaudi"),
)
TAKEN = EngineRow("torch", "Other", "other", "other:ENGINE", ("other",), ("cpu",))
NOT_A_ROW = "tiny"
"""


def test_the_table_of_backends_and_the_rows_agree() -> None:
    for backend in BACKENDS.values():
        for name in backend.engines:
            assert backend.name in registry.BUILT_IN[name].backends
    for row in registry.BUILT_IN.values():
        for name in row.backends:
            assert row.name in BACKENDS[name].engines


def test_every_row_has_its_files() -> None:
    for row in registry.BUILT_IN.values():
        module, _, name = row.target.partition(":")
        assert (module, name) == (f"anydevice._engines.{row.name}.arrays", "ENGINE")
        folder = Path(anydevice.__file__).parent / "_engines" / row.name
        optional = [part for part in ("autodiff", "compiler") if part not in row.lacks]
        for part in ("arrays", "primitives", "fused", "memory", *optional):
            assert (folder / f"{part}.py").is_file()


def test_what_an_engine_lacks_is_a_sentence_with_a_way_out() -> None:
    lacks = [absent for row in registry.BUILT_IN.values() for absent in row.lacks.values()]
    assert lacks
    assert all(isinstance(absent, Absent) and absent.what and absent.instead for absent in lacks)


def test_engines_come_in_the_backends_order() -> None:
    assert registry.engines_for("cuda") == ("torch", "jax", "cupy")
    assert registry.engines_for("gaudi") == ()


def test_nothing_is_imported_by_looking() -> None:
    program = (
        "import sys\n"
        "from anydevice._machine.engines import registry\n"
        "for name in registry.engine_names(): registry.installed(name), registry.loaded(name)\n"
        "print(sorted({'numpy', 'torch', 'jax', 'jaxlib', 'mlx', 'cupy', 'pyopencl'}"
        " & set(sys.modules)), registry.loaded_engines())\n"
    )
    assert output_of("-c", program) == "[] ()\n"


def test_an_engine_of_an_imported_library() -> None:
    assert registry.loaded("numpy")
    assert "numpy" in registry.loaded_engines()
    assert registry.version_of("numpy") == numpy.__version__
    engine = registry.load("numpy")
    assert engine.name == "numpy"
    assert registry.load("numpy") is engine


def test_a_library_that_would_start_when_asked_is_not_among_the_started() -> None:
    code = (
        "from anydevice._machine.engines import library_settings, registry\n"
        "import numpy, jax\n"
        "first = [engine.name for engine in registry.started_engines()]\n"
        "assert not library_settings.jax_started()\n"
        "jax.devices()\n"
        "print(first, [engine.name for engine in registry.started_engines()])"
    )
    assert output_of("-c", code) == "['numpy'] ['numpy', 'jax']\n"


def test_loading_what_is_not_installed_says_what_to_install(site) -> None:
    registry.load.cache_clear()
    with pytest.raises(UnsupportedError, match=r"CuPy is not installed; run: pip install cupy-cud"):
        registry.load("cupy")


def test_loading_what_is_damaged_says_so_and_keeps_the_cause(site) -> None:
    registry.load.cache_clear()
    site.package("cupy")
    site.distribution("cupy-cuda12x", "14.2.0")
    with pytest.raises(UnsupportedError) as caught:
        registry.load("cupy")
    assert str(caught.value) == (
        "cupy-cuda12x 14.2.0 is installed, but importing it failed with ImportError: imported, but "
        "only looked at; run: pip install --force-reinstall cupy-cuda12x"
    )
    assert isinstance(caught.value.__cause__, ImportError)


def add(site, module: str, *entries: str) -> None:
    (site.folder / f"{module}.py").write_text(ADDED)
    lines = "\n".join(entries)
    site.distribution(module, "1.0", f"[anydevice.engines]\n{lines}\n")


def test_another_package_adds_an_engine(site) -> None:
    add(site, "tiny_row_a", "tiny = tiny_row_a:ROW")
    assert registry.engine_names()[-1] == "tiny"
    assert registry.engines_for("cpu") == ("numpy", "torch", "jax", "mlx", "tiny")
    assert registry.engines_for("gaudi") == ("tiny",)
    assert registry.notes() == ()
    assert not registry.installed("tiny").installed
    assert not registry.loaded("tiny")
    site.package("tiny", "3.1")
    assert registry.row_of("tiny").label == "Tiny"
    build = registry.installed("tiny")
    assert (build.name, build.runtimes) == ("tiny 3.1", {"cpu": "", "gaudi": ""})


def test_broken_entries_are_notes_and_nothing_else(site) -> None:
    add(
        site,
        "tiny_row_c",
        "gone = no_such_module:ROW",
        "nameless = tiny_row_c:MISSING",
        "text = tiny_row_c:NOT_A_ROW",
        "taken = tiny_row_c:TAKEN",
        "good = tiny_row_c:ROW",
    )
    assert registry.engine_names() == (*registry.BUILT_IN, "tiny")
    gone, nameless, text, taken = registry.notes()
    assert "the engine 'gone' of tiny-row-c (no_such_module:ROW) failed with ModuleNotFound" in gone
    assert "AttributeError" in nameless
    assert text.endswith("is not an EngineRow but a str")
    assert taken.endswith("is left out: there is an engine 'torch' already")


def test_native_is_the_engines_own_object() -> None:
    assert registry.native(Device("cpu"), "numpy") == "cpu"


def test_native_of_a_device_that_nothing_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    status = DeviceStatus(
        kind="gpu",
        facts=Facts("NVIDIA card"),
        stage="library",
        reasons=(
            Reason("not_installed", "torch is not installed"),
            Reason("not_installed", "jax is not installed"),
        ),
        fix="pip install torch",
    )
    monkeypatch.setattr(Device, "engine", None)
    with pytest.raises(DeviceNotFoundError) as caught:
        _ = Device.seen("cuda", 0, status).native
    assert str(caught.value) == (
        "no installed library drives cuda:0: torch is not installed; jax is not installed; "
        "to fix it: pip install torch"
    )


def test_what_is_absent_says_so_when_it_is_used() -> None:
    absent: Any = registry.load("numpy").autodiff
    with pytest.raises(UnsupportedError, match="NumPy has no autodiff; train on torch") as caught:
        absent.value_and_grad(len)
    assert caught.value.absent is absent
    assert not hasattr(absent, "value_and_grad")
    assert not hasattr(absent, "__array__")
    for again in (copy.copy(absent), copy.deepcopy(absent), pickle.loads(pickle.dumps(absent))):
        assert again == absent


def test_what_is_absent_and_not_made_yet_ends_in_no_circle() -> None:
    with pytest.raises(AttributeError, match="what"):
        str(Absent.__new__(Absent))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("pytorch", "torch"),
        ("PyTorch", "torch"),
        ("Torch", "torch"),
        ("flax", "jax"),
        ("OpenCL", "opencl"),
    ],
)
def test_a_library_by_another_name(name: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=f"did you mean '{meant}'"):
        registry.row_of(name)
    with pytest.raises(ConfigurationError, match=f"engine=: .*did you mean '{meant}'"):
        anydevice.device("cpu", engine=name)


def test_a_library_without_an_engine_and_a_backend_are_told_apart() -> None:
    with pytest.raises(ConfigurationError, match="no engine 'keras'; the engines are numpy, torch"):
        registry.row_of("keras")
    with pytest.raises(
        ConfigurationError, match=r"no engine 'tensorflow'; the engines are numpy, "
    ):
        anydevice.device(engine="tensorflow")
    with pytest.raises(ConfigurationError, match=r"'cuda' is a backend.*device\(\"cuda\"\)"):
        anydevice.device(engine="cuda")
