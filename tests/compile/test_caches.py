"""Compiled code is kept across processes, where the user has not said otherwise."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn
from anydevice._machine.engines import registry
from anydevice._machine.settings.files import compiled_folder
from tests.programs import output_of

X = np.ones((2, 4), np.float32)


@pytest.fixture
def jax() -> Iterator[Any]:
    library = pytest.importorskip("jax")
    from jax.experimental.compilation_cache import compilation_cache

    before = {name: value for name, value in library.config.values.items() if "cache" in name}
    library.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield library
    for name, value in before.items():
        if name.startswith(("jax_compilation_cache_dir", "jax_persistent_cache_min")):
            library.config.update(name, value)
    compilation_cache.reset_cache()


def compiled_by(engine: str, **options: Any) -> Any:
    model = nn.build(nn.Dense(4, 3), "gelu", nn.Dense(3, 7), device="cpu")
    return anydevice.compile(model, anydevice.device("cpu", engine=engine), **options)


@pytest.fixture
def compiler(jax: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our module for JAX's compiler, which looks at all entries, also at those of this moment."""
    from anydevice._engines.jax import compiler

    monkeypatch.setattr(compiler, "_LOOKING", 60.0)
    monkeypatch.setattr(compiler, "_WRITING", -60.0)
    return compiler


def test_jax_keeps_code_in_our_folder(jax: Any, home: Path) -> None:
    compiled = compiled_by("jax")
    compiled.warm_up(X)
    folder = Path(compiled.report.kept_in or "")
    assert folder == compiled_folder("jax") == home / "compiled" / "jax"
    assert any(folder.iterdir())


def test_jax_keeps_code_where_the_user_says(jax: Any, tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    compiled = compiled_by("jax")
    assert compiled.report.kept_in == str(tmp_path / "mine")


def test_jax_keeps_nothing_where_the_user_says_so(jax: Any) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        compiled = compiled_by("jax")
        assert compiled.report.kept_in is None
        assert "nothing is kept across processes" in str(compiled.report)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


def test_the_users_limits_stay(jax: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "5")
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    compiler: Any = registry.load("jax").compiler
    compiler.keep(str(home / "here"))
    assert jax.config.jax_persistent_cache_min_compile_time_secs == before
    assert jax.config.jax_persistent_cache_min_entry_size_bytes == -1


def test_what_a_killed_process_left_of_an_entry_goes(
    jax: Any, compiler: Any, home: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """JAX would warn of it in each process, and never write it again."""
    from jax.experimental.compilation_cache import compilation_cache

    folder = home / "compiled"

    def compute() -> Path:
        jax.config.update("jax_compilation_cache_dir", None)
        compiler.COMPILER.keep(str(folder))
        compilation_cache.reset_cache()
        jax.jit(lambda x: x * 3 + 1)(X)
        [entry] = (each for each in folder.glob("*-cache") if "lambda" in each.name)
        return entry

    for share in (0.5, 0):
        entry = compute()
        data = entry.read_bytes()
        entry.write_bytes(data[: int(len(data) * share)])
        assert compute() == entry
        assert entry.stat().st_size > 0.9 * len(data)  # the time that it took is in it, too
    assert not [each for each in recwarn if "compilation cache" in str(each.message)]


def test_whole_entries_and_those_of_another_format_stay(compiler: Any, tmp_path: Path) -> None:
    zstd = b"\x28\xb5\x2f\xfd"
    blocks = b"\x20\x00\x00abcd" + b"\x23\x00\x00x"  # as it is, and one that is repeated
    whole = {
        "small": zstd + b"\x20\x08" + blocks,
        "checksum": zstd + b"\x24\x08" + blocks + b"sum.",
        "window": zstd + b"\x40\x00\x00\x00" + blocks,
        "zlib": zlib.compress(X.tobytes()),
        "other": b"of a later JAX",
    }
    for name, data in whole.items():
        (tmp_path / f"{name}-cache").write_bytes(data)
        if name != "other":
            (tmp_path / f"{name}-cut-cache").write_bytes(data[:-1])
            for size in (1, 2, 6):
                (tmp_path / f"{name}-{size}-cache").write_bytes(data[:size])
    compiler._tidy(str(tmp_path))
    left = {each.name for each in tmp_path.glob("*-cache")}
    assert left == {f"{name}-cache" for name in whole}
    (tmp_path / "new-cache").write_bytes(whole["zlib"][:-1])
    os.utime(tmp_path / "zlib-cache", (1e9, 1e9))
    (tmp_path / "zlib-cache").write_bytes(b"")
    os.utime(tmp_path / "zlib-cache", (1e9, 1e9))
    compiler._tidy(str(tmp_path))
    assert not (tmp_path / "new-cache").exists()
    assert (tmp_path / "zlib-cache").exists()  # it was looked at before


def test_entries_take_turns(jax: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._engines.jax import compiler

    monkeypatch.setattr(compiler, "_LOOKING", 0.0)  # one entry each
    whole = zlib.compress(X.tobytes())
    for number in range(4):
        entry = tmp_path / f"{number}-cache"
        entry.write_bytes(whole[:-1] if number == 2 else whole)
        os.utime(entry, (1e9 + number, 1e9 + number))
    written_now = tmp_path / "now-cache"
    written_now.write_bytes(whole[:-1])
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe-cache")
    for _ in range(8):
        compiler._tidy(str(tmp_path))
    assert not (tmp_path / "2-cache").exists()
    assert (tmp_path / "3-cache").exists()
    assert written_now.exists()  # its process may be writing it
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "looked").unlink()
    (tmp_path / "looked").symlink_to(tmp_path / "mine")
    compiler._tidy(str(tmp_path))
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_the_oldest_entries_go(jax: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._engines.jax import compiler

    (tmp_path / "ours").mkdir()
    for number in range(6):
        file = tmp_path / "ours" / f"jit_{number}-cache"
        file.write_bytes(b"x" * 1000)
        used = 1e9 + (100 if number == 0 else number)  # the first was made first, and used last
        os.utime(file, (used, 1e9 + number))
    monkeypatch.setattr(compiler, "KEPT", 2500)
    assert compiler.COMPILER.keep(str(tmp_path / "ours")) == str(tmp_path / "ours")
    left = sorted(file.name for file in (tmp_path / "ours").glob("*-cache"))
    assert left == ["jit_0-cache", "jit_5-cache"]


def test_pytorch_keeps_code_in_our_folder_or_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    compiler: Any = registry.load("torch").compiler
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert compiler.keep("/ours") == "/ours"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/ours"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert compiler.keep("/ours") == "/mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    cache_dir_utils = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    cache_dir_utils.cache_dir()  # as PyTorch does: it names its own folder, and nobody else has
    assert compiler.keep("/ours") == "/ours"
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
    assert compiler.keep("/ours") is None


@pytest.mark.needs("torch")
def test_what_runs_as_written_keeps_nothing(home: Path) -> None:
    for engine in ("numpy", "torch"):
        assert compiled_by(engine, optimize="none").report.kept_in is None
    assert not (home / "compiled").exists()


def test_mlx_keeps_nothing() -> None:
    pytest.importorskip("mlx.core")
    compiled = compiled_by("mlx")
    assert compiled.report.kept_in is None
    assert "mx.compile" in compiled.report.how


@pytest.mark.parametrize(
    ("engine", "most", "said"),
    [
        ("torch", True, "torch.compile, mode max-autotune-no-cudagraphs"),
        ("torch", False, "torch.compile"),
        ("jax", True, "jax.jit, XLA told to spend most effort on fast code"),
        ("jax", False, "jax.jit"),
        ("mlx", True, "mx.compile, which has one way of compiling"),
        ("mlx", False, "mx.compile"),
    ],
)
def test_every_effort_has_words(engine: str, most: bool, said: str) -> None:
    pytest.importorskip({"mlx": "mlx.core"}.get(engine, engine))
    compiler: Any = registry.load(engine).compiler
    assert compiler.efforts(most) == said


_PROCESS = """
import jax, numpy, anydevice
from anydevice import nn

hits = []
jax.monitoring.register_event_listener(lambda name, **more: hits.append(name))
model = nn.build(nn.Dense(4, 3), "gelu", nn.Dense(3, 7), device="cpu")
compiled = anydevice.compile(model, anydevice.device("cpu", engine="jax"))
compiled(numpy.ones((2, 4), numpy.float32))
print(sum(name.endswith("compilation_cache/cache_hits") for name in hits))
"""


def test_a_second_process_finds_the_code(home: Path) -> None:
    pytest.importorskip("jax")
    env = {"ANYDEVICE_HOME": str(home), "JAX_COMPILATION_CACHE_DIR": None}
    first, second = (int(output_of("-c", _PROCESS, env=env)) for _ in range(2))
    assert first == 0 < second


_LOADED = """
import warnings

import torch
from anydevice._machine.engines import registry

warnings.simplefilter("error", DeprecationWarning)
before = list(warnings.filters)
assert registry.load("torch").compiler.efforts(False) == "torch.compile"
assert warnings.filters == before
import torch.utils.mkldnn
"""


def test_what_pytorch_loads_to_compile_is_loaded_without_its_warnings() -> None:
    pytest.importorskip("torch")
    output_of("-c", _LOADED)
