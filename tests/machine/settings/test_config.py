"""`configure` and `Config`: values, where they come from, and their effect."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import anydevice
from anydevice import Config
from anydevice._machine.engines import library_settings
from anydevice._machine.settings import config as settings
from anydevice._machine.settings.config import current
from anydevice.errors import ConfigurationError


@pytest.fixture(autouse=True)
def clean(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not XLA_FLAGS: JAX may start in one of these tests, and later tests need its CPU devices.
    for name in ("JAX_ENABLE_X64", "JAX_DISABLE_JIT", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    settings._applied.clear()


@pytest.mark.parametrize(
    ("memory", "fraction", "limit"),
    [
        ("conservative", 0.6, None),
        ("Balanced", 0.75, None),
        ("aggressive", 0.9, None),
        (0.8, 0.8, None),
        (1, 1.0, None),
        ("20GiB", None, 20 * 2**30),
        (8 * 2**30, None, 8 * 2**30),
        (2**30 + 1, None, 2**30 + 1),
        (1500 * 2**30, None, 1500 * 2**30),
    ],
)
def test_memory_as_a_share(memory: object, fraction: float | None, limit: int | None) -> None:
    config = anydevice.configure(memory=memory)
    assert (config.memory_fraction, config.memory_limit) == (fraction, limit)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory", "lots"),
        ("memory", 0),
        ("memory", -0.5),
        ("memory", 300),
        ("memory", "0.5"),
        ("memory", float("inf")),
        ("memory", float("nan")),
        ("memory", True),
        ("memory", None.__class__),
        ("return_memory", 1),
        ("threads", 0),
        ("threads", True),
        ("threads", 10**9),  # with which OpenMP ends the process
        ("x64", 1),
        ("jit", "no"),
        ("mixed_precision", 0),
        ("time_limit", 0),
        ("time_limit", "5"),
        ("time_limit", float("nan")),
        ("order", ["nope"]),
        ("order", 3),
        ("order", [3]),
        ("order", ["cuda:1"]),
        ("env", "A=1"),
        ("env", {"A": 1}),
        ("env", {"": "x"}),
        ("nonsense", 1),
    ],
)
def test_a_wrong_value_is_refused_and_changes_nothing(name: str, value: object) -> None:
    before = anydevice.configure()
    with pytest.raises(ConfigurationError, match=r"configure\(\): "):
        anydevice.configure(**{"time_limit": 3.0, name: value})
    assert anydevice.configure() == before


@pytest.mark.parametrize("value", ["lots", "80%", -1, True, []])
def test_a_memory_that_is_none_is_told_what_there_is(value: object) -> None:
    with pytest.raises(ConfigurationError, match="none of conservative, balanced, aggressive, a f"):
        anydevice.configure(memory=value)


def test_defaults_and_back_to_them() -> None:
    assert anydevice.configure() == Config()
    assert anydevice.configure(order="cuda, cpu").order == ("cuda", "cpu")
    assert anydevice.configure(order=None) == Config()


def test_files_set_and_configure_wins(home: Path) -> None:
    (home / "anydevice.toml").write_text('memory = "conservative"\nx64 = true\n')
    Path("anydevice.toml").write_text("# project\nmemory = 0.5\n")
    config, origins = current()
    assert (config.memory, config.x64) == (0.5, True)
    assert origins["memory"].startswith("project file")
    assert origins["memory"].endswith("line 2")
    assert origins["x64"].startswith("user file")
    anydevice.configure(memory="aggressive")
    config, origins = current()
    assert (config.memory, origins["memory"]) == ("aggressive", "configure()")


def test_x64_reaches_jax_before_and_after_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax
    import jax.numpy as jnp

    anydevice.configure(x64=True)
    assert os.environ["JAX_ENABLE_X64"] == "1"
    assert jnp.zeros(1, "float64").dtype == "float64"
    anydevice.configure(x64=False)
    assert os.environ["JAX_ENABLE_X64"] == "0"
    assert not jax.config.jax_enable_x64
    monkeypatch.delitem(sys.modules, "jax")
    anydevice.configure(x64=True)
    assert os.environ["JAX_ENABLE_X64"] == "1"
    assert not jax.config.jax_enable_x64


def test_jit_reaches_jax_and_torch() -> None:
    import jax
    import torch._dynamo.config as dynamo

    before = dynamo.disable
    try:
        anydevice.configure(jit=False)
        assert os.environ["JAX_DISABLE_JIT"] == "1"
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
        assert jax.config.jax_disable_jit
        assert dynamo.disable is True
    finally:
        anydevice.configure(jit=True)
        assert not jax.config.jax_disable_jit
        dynamo.disable = before


def test_variables_are_set_and_flags_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=1 --xla_cpu_enable_fast_math=true")
    monkeypatch.setenv("SOME_VARIABLE", "old")
    monkeypatch.setattr(library_settings, "_READ_AT_START", ())
    anydevice.configure(
        env={"XLA_FLAGS": "--xla_cpu_enable_fast_math=false", "SOME_VARIABLE": "new"}
    )
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_autotune_level=1 --xla_cpu_enable_fast_math=false"
    assert os.environ["SOME_VARIABLE"] == "new"


def test_variables_no_longer_set_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=1")
    monkeypatch.setenv("SOME_VARIABLE", "old")
    monkeypatch.setattr(library_settings, "_READ_AT_START", ())
    anydevice.configure(
        env={"XLA_FLAGS": "--xla_gpu_autotune_level=2", "SOME_VARIABLE": "new", "OTHER": "1"}
    )
    anydevice.configure(
        env={"XLA_FLAGS": "--xla_cpu_enable_fast_math=false", "SOME_VARIABLE": "newer"}
    )
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_autotune_level=1 --xla_cpu_enable_fast_math=false"
    assert "OTHER" not in os.environ
    anydevice.configure(env=None)
    assert (os.environ["XLA_FLAGS"], os.environ["SOME_VARIABLE"]) == (
        "--xla_gpu_autotune_level=1",
        "old",
    )
    anydevice.configure(env={"SOME_VARIABLE": "new"})
    monkeypatch.setenv("SOME_VARIABLE", "somebody's own")
    anydevice.configure(env=None)
    assert os.environ["SOME_VARIABLE"] == "somebody's own"


def test_switches_no_longer_set_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax
    import torch._dynamo.config as dynamo

    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with dynamo.patch(disable=True):  # pytest's own way would delete it afterwards
        jax.config.update("jax_enable_x64", True)
        anydevice.configure(x64=False, jit=True)
        anydevice.configure(x64=True, jit=False)
        anydevice.configure(x64=False, jit=True)
        assert (os.environ["JAX_ENABLE_X64"], os.environ["TORCHDYNAMO_DISABLE"]) == ("0", "0")
        assert not dynamo.disable
        for _ in range(2):
            anydevice.configure(x64=None, jit=None)
            assert (os.environ["JAX_ENABLE_X64"], os.environ["TORCHDYNAMO_DISABLE"]) == ("1", "1")
            assert "JAX_DISABLE_JIT" not in os.environ
            assert jax.config.jax_enable_x64
            assert not jax.config.jax_disable_jit
            assert dynamo.disable


@pytest.mark.parametrize(("before", "on"), [(None, False), ("0", False), ("True", True)])
def test_a_switch_goes_back(monkeypatch: pytest.MonkeyPatch, before: str | None, on: bool) -> None:
    import jax

    if before is not None:
        monkeypatch.setenv("JAX_ENABLE_X64", before)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "jax")
        anydevice.configure(x64=not on)
    jax.config.update("jax_enable_x64", not on)  # what it does when it is imported
    anydevice.configure(x64=None)
    assert (os.environ.get("JAX_ENABLE_X64"), jax.config.jax_enable_x64) == (before, on)


def test_a_switch_in_a_file_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    Path("anydevice.toml").write_text("x64 = true\n")
    anydevice.configure(x64=False)
    anydevice.configure(x64=None)
    assert os.environ["JAX_ENABLE_X64"] == "1"
    settings.forget_changes()
    assert os.environ["JAX_ENABLE_X64"] == "0"
    anydevice.device("cpu")
    assert os.environ["JAX_ENABLE_X64"] == "1"
    settings.forget_changes()


def test_what_comes_too_late_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    jax.devices()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    with pytest.warns(UserWarning, match="XLA_PYTHON_CLIENT_PREALLOCATE was set too late: JAX"):
        anydevice.configure(env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    anydevice.configure(env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})  # it is so already


@pytest.mark.parametrize(
    ("variable", "module", "library"),
    [
        ("CUPY_GPU_MEMORY_LIMIT", "cupy", "CuPy"),
        ("CUDA_VISIBLE_DEVICES", "cupy", "CuPy"),
        ("PYOPENCL_NO_CACHE", "pyopencl", "PyOpenCL"),
        ("OCL_ICD_VENDORS", "pyopencl", "PyOpenCL"),
        ("MLX_DISABLE_COMPILE", "mlx.core", "MLX"),
    ],
)
def test_what_is_read_once_comes_too_late_after_the_import(
    monkeypatch: pytest.MonkeyPatch, variable: str, module: str, library: str
) -> None:
    monkeypatch.setenv(variable, "")
    for name in ("cupy", "pyopencl", "mlx.core"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(library_settings, "_READ_AT_START", ())
    anydevice.configure(env={variable: "1"})
    monkeypatch.setitem(sys.modules, module, sys)
    with pytest.warns(UserWarning, match=f"{variable} was set too late: {library} is imported"):
        anydevice.configure(env={variable: "2"})
    anydevice.configure(env={variable: "2", "PYOPENCL_CTX": "0"})  # it is read anew each time
    with pytest.warns(UserWarning, match=f"{variable} was put back too late: {library} is imp"):
        anydevice.configure(env=None)
    assert os.environ[variable] == ""
    assert "PYOPENCL_CTX" not in os.environ


def test_a_gpu_of_intel_s_that_has_started_keeps_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    started = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch.xpu", started)
    with pytest.warns(UserWarning, match="ZE_AFFINITY_MASK was set too late: torch has already"):
        anydevice.configure(env={"ZE_AFFINITY_MASK": "0"})
    started.is_initialized = lambda: False
    anydevice.configure(env=None)


def test_asking_whether_a_library_started_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jax._src.xla_bridge", raising=False)
    monkeypatch.delitem(sys.modules, "torch.cuda", raising=False)
    assert not library_settings.jax_started()
    assert not library_settings.torch_started()
    assert "torch.cuda" not in sys.modules


def test_what_a_file_sets_takes_effect_when_a_device_is_chosen() -> None:
    Path("anydevice.toml").write_text('x64 = true\n[env]\nCUPY_TF32 = "1"\n')
    try:
        anydevice.device("cpu")
        assert os.environ["JAX_ENABLE_X64"] == "1"
        assert os.environ.pop("CUPY_TF32") == "1"
        anydevice.device("cpu")
        assert "CUPY_TF32" not in os.environ
    finally:
        Path("anydevice.toml").unlink()
        library_settings.set_x64(False)


@pytest.mark.parametrize(
    ("variable", "value", "count"),
    [
        ("XLA_FLAGS", "--a --xla_force_host_platform_device_count=8", 8),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=x", 1),
        ("JAX_NUM_CPU_DEVICES", "4", 4),
        ("JAX_NUM_CPU_DEVICES", "", 1),
    ],
)
def test_virtual_cpus(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, count: int
) -> None:
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv(variable, value)
    assert library_settings.virtual_cpus() == count


def test_as_plain_data_and_without_limits_unasked() -> None:
    config = Config(order=("cuda",), env={"A": "1"})
    plain = config.to_dict()
    assert (plain["order"], plain["env"]) == (["cuda"], {"A": "1"})
    assert (plain["memory"], plain["memory_fraction"]) == (None, None)
    assert (config.memory, config.memory_fraction, config.memory_limit) == (None, None, None)


def test_the_page_on_security_lists_what_a_project_may_set() -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text("utf-8")
    variables, flags = (block.split("```")[0].split() for block in page.split("```text")[1:])
    assert variables == sorted(library_settings.HARMLESS)
    assert flags == sorted(library_settings.HARMLESS_FLAGS)


def test_a_seed_is_given_or_set_or_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYDEVICE_SEED", "5")
    assert [settings.seed(given, "f") for given in (None, 7, 0)] == [5, 7, 0]
    monkeypatch.setenv("ANYDEVICE_SEED", "-1")
    with pytest.raises(ConfigurationError, match="f: ANYDEVICE_SEED must be an integer of 0 or"):
        settings.seed(None, "f")
    for wrong in (-1, "", "5"):
        with pytest.raises(ConfigurationError, match="f: seed must be an integer of 0 or more"):
            settings.seed(wrong, "f")
    monkeypatch.setenv("ANYDEVICE_SEED", "")
    assert len({settings.seed(None, "f") for _ in range(9)}) > 1


@pytest.mark.needs("jax")
def test_settings_do_not_keep_a_flag_that_xla_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(library_settings, "_READ_AT_START", ())
    good, unknown = "--xla_cpu_enable_fast_math=false", "--xla_cpu_enable_fast_mathz=1"
    message = "has no flag --xla_cpu_enable_fast_mathz; the nearest is --xla_cpu_enable_fast_math"
    for _ in range(2):  # the second time from the file of verdicts
        with pytest.raises(ConfigurationError, match=message):
            anydevice.configure(env={"XLA_FLAGS": f"{good} {unknown}", "OTHER": "1"}, jit=True)
    assert dict(anydevice.configure().env) == {"XLA_FLAGS": good, "OTHER": "1"}
    assert (os.environ["XLA_FLAGS"], os.environ["OTHER"]) == (good, "1")
