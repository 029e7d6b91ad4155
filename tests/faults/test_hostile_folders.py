"""Folders that others have prepared: a cloned project, a shared home, no home at all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import anydevice
from anydevice.settings.files import user_file

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and rights as POSIX has them")

NOBODY = 65534

EVIL = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) {{
    FILE *marker = fopen("{marker}", "a");
    if (marker) {{ fputs("it ran\\n", marker); fclose(marker); }}
}}
"""

CALLS = {
    "anydevice": ["-m", "anydevice"],
    "devices": ["-m", "anydevice", "devices"],
    "device()": ["-c", "import anydevice; anydevice.device(); anydevice.device('cpu').check()"],
}


def python(
    arguments: list[str], folder: Path, environment: Mapping[str, str | None] = {}
) -> subprocess.CompletedProcess[str]:
    """A new interpreter in a folder; a variable that is `None` is not set."""
    merged = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={name: value for name, value in merged.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("call", CALLS)
def test_a_library_that_a_project_names_does_not_run(
    home: Path, tmp_path: Path, build_library: object, call: str
) -> None:
    marker = tmp_path / "marker"
    folder = build_library("evil.so", EVIL.format(marker=marker))  # type: ignore[operator]
    evil = folder / "evil.so"
    ran = subprocess.run([sys.executable, "-c", ""], env={**os.environ, "LD_PRELOAD": str(evil)})
    assert ran.returncode == 0
    marker.unlink()  # it was there: the library does run where it is loaded
    Path("anydevice.toml").write_text(
        f'[env]\nLD_PRELOAD = "{evil}"\nLD_LIBRARY_PATH = "{folder}"\nOMP_NUM_THREADS = "3"\n'
    )
    done = python(CALLS[call], Path.cwd())
    assert done.returncode == 0, done.stderr
    assert not marker.exists()
    assert "LD_PRELOAD" in done.stderr
    assert str(user_file()) in done.stderr  # where it may be set


SHOW = (
    "import os, anydevice; from anydevice.hardware.driver_process.parent import ask\n"
    "anydevice.device('cpu')\n"
    "there = ask(os.environ['QUESTION'], {}).answer\n"
    "for name in ('OMP_NUM_THREADS', 'XLA_FLAGS', 'MINE'):\n"
    "    print(name, os.environ.get(name), there.get(name))\n"
)


def test_children_get_what_the_user_set_and_nothing_of_the_project(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "question.py").write_text(
        "import os\ndef ask(tell, arguments):\n    return dict(os.environ)\n"
    )
    environment = {
        "QUESTION": str(tmp_path / "asked" / "question"),
        "XLA_FLAGS": "--xla_gpu_autotune_level=1",
        "OMP_NUM_THREADS": None,
    }
    text = '[env]\nOMP_NUM_THREADS = "3"\nXLA_FLAGS = "--xla_gpu_autotune_level=2"\n'
    Path("anydevice.toml").write_text(text)
    done = python(["-c", SHOW], Path.cwd(), environment)
    assert done.stdout.splitlines() == [
        "OMP_NUM_THREADS 3 None",
        "XLA_FLAGS --xla_gpu_autotune_level=2 --xla_gpu_autotune_level=1",
        "MINE None None",
    ]
    Path("anydevice.toml").unlink()
    user_file().write_text(text + 'MINE = "yes"\n')
    done = python(["-c", SHOW], Path.cwd(), environment)
    assert done.stdout.splitlines() == [
        "OMP_NUM_THREADS 3 3",
        "XLA_FLAGS --xla_gpu_autotune_level=2 --xla_gpu_autotune_level=2",
        "MINE yes yes",
    ]


REFUSED = {
    "LD_PRELOAD": "x.so",
    "DYLD_INSERT_LIBRARIES": "x.dylib",
    "LD_LIBRARY_PATH": ".",
    "PATH": "bin",
    "PYTHONPATH": ".",
    "PYTHONSTARTUP": "x.py",
    "ANYDEVICE_HOME": "here",
    "OCL_ICD_VENDORS": "x",
    "CUDA_HOME": "x",
    "TRITON_PTXAS_PATH": "x",
    "TORCHINDUCTOR_CACHE_DIR": "x",
    "JAX_COMPILATION_CACHE_DIR": "x",
    "CC": "x",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "/etc/passwd",
    "XLA_FLAGS": "flags.txt",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_project_may_not_set_is_named_and_left_alone(home: Path, name: str) -> None:
    before = os.environ.get(name)
    Path("anydevice.toml").write_text(f'x64 = true\n[env]\n{name} = "{REFUSED[name]}"\n')
    with pytest.warns(UserWarning, match=rf"line 2: a project's file may not set {name}"):
        assert anydevice.configure().x64
    anydevice.device("cpu")
    assert os.environ.get(name) == before


def test_of_xla_s_flags_a_project_may_set_the_harmless_ones(home: Path) -> None:
    Path("anydevice.toml").write_text(
        '[env]\nXLA_FLAGS = "--xla_dump_to=x --xla_gpu_autotune_level=2 --xla_gpu_cuda_data_dir=."'
    )
    with pytest.warns(UserWarning, match="XLA_FLAGS --xla_dump_to and XLA_FLAGS --xla_gpu_cuda"):
        assert dict(anydevice.configure().env) == {"XLA_FLAGS": "--xla_gpu_autotune_level=2"}
