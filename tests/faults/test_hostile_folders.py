"""Folders that others have prepared: a cloned project, a shared home, no home at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import anydevice
from anydevice._core.finding import BackendScan, Facts, RawDevice, Reason, Verdict
from anydevice._machine.choose import measurements
from anydevice._machine.discovery import discover as _discover
from anydevice._machine.discovery.check import keep_verdict, read_verdicts
from anydevice._machine.settings import files
from anydevice._machine.settings.config import forget_files
from anydevice._machine.settings.files import user_file
from anydevice._ops import trusted_kernels
from anydevice._ops.trusted_kernels import kernels_file
from tests.conftest import BuildLibrary
from tests.faults.damage import huge, zeros
from tests.programs import output_of, run_python

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


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.usefixtures("home")
def test_a_library_does_not_run(tmp_path: Path, build_library: BuildLibrary, call: str) -> None:
    marker = tmp_path / "marker"
    folder = build_library("evil.so", EVIL.format(marker=marker))
    evil = folder / "evil.so"
    ran = subprocess.run([sys.executable, "-c", ""], env={**os.environ, "LD_PRELOAD": str(evil)})
    assert ran.returncode == 0
    marker.unlink()  # it was there: the library does run where it is loaded
    Path("anydevice.toml").write_text(
        f'[env]\nLD_PRELOAD = "{evil}"\nLD_LIBRARY_PATH = "{folder}"\nOMP_NUM_THREADS = "3"\n'
    )
    done = run_python(*CALLS[call])
    assert done.returncode == 0, done.stderr
    assert not marker.exists()
    assert "LD_PRELOAD" in done.stderr
    assert str(user_file()) in done.stderr  # where it may be set


SHOW = (
    "import os, anydevice; from anydevice._core.child.parent import ask\n"
    "anydevice.device('cpu')\n"
    "there = ask(os.environ['QUESTION'], {}).answer\n"
    "for name in ('OMP_NUM_THREADS', 'XLA_FLAGS', 'MINE'):\n"
    "    print(name, os.environ.get(name), there.get(name))\n"
)


def test_children_get_the_users_variables_not_the_projects(home: Path, tmp_path: Path) -> None:
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
    done = run_python("-c", SHOW, env=environment)
    assert done.stdout.splitlines() == [
        "OMP_NUM_THREADS 3 None",
        "XLA_FLAGS --xla_gpu_autotune_level=2 --xla_gpu_autotune_level=1",
        "MINE None None",
    ]
    Path("anydevice.toml").unlink()
    user_file().write_text(text + 'MINE = "yes"\n')
    done = run_python("-c", SHOW, env=environment)
    assert done.stdout.splitlines() == [
        "OMP_NUM_THREADS 3 3",
        "XLA_FLAGS --xla_gpu_autotune_level=2 --xla_gpu_autotune_level=2",
        "MINE yes yes",
    ]


REFUSED = {"LD_PRELOAD": "x.so", "DYLD_INSERT_LIBRARIES": "x.dylib", "LD_LIBRARY_PATH": "."}
REFUSED |= {"PATH": "bin", "PYTHONPATH": ".", "PYTHONSTARTUP": "x.py", "ANYDEVICE_HOME": "here"}
REFUSED |= dict.fromkeys(("OCL_ICD_VENDORS", "CUDA_HOME", "TRITON_PTXAS_PATH", "CC"), "x")
REFUSED |= dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR"), "x")
REFUSED |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "/etc/passwd", "XLA_FLAGS": "flags.txt"}


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


ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\r\u202e"


def raw(text: str) -> str:
    """The characters in a text that a terminal would obey."""
    return "".join({each for each in text if not each.isprintable() and each != "\n"})


@pytest.mark.parametrize("words", [["config"], ["devices"], ["plan", f"model{ESCAPES}.json"]])
@pytest.mark.parametrize("colour", [False, True])
def test_commands_print_no_escapes(tmp_path: Path, words: list[str], colour: bool) -> None:
    folder = tmp_path / f"project{ESCAPES}\nfake line"
    folder.mkdir()
    (folder / "anydevice.toml").write_text('"no\\u001bsetting" = 1\n[env]\n"A\\u001bB" = "1"\n')
    environment = {
        "ANYDEVICE_HOME": str(folder / "home"),
        "ANYDEVICE_DEVICE": f"cpu{ESCAPES}" if words == ["devices"] else "cpu",
        "FORCE_COLOR": "1" if colour else None,
        "PYTHONIOENCODING": "utf-8",
    }
    done = run_python("-m", "anydevice", *words, cwd=folder, env=environment)
    printed = done.stdout + done.stderr
    assert "\\x1b[2J" in printed
    if colour:
        printed = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    assert raw(printed) == ""
    assert "\nfake line" not in printed


def test_errors_and_warnings_in_a_program_print_no_escapes(home: Path) -> None:
    name = f"model{ESCAPES}.safetensors"
    with pytest.raises(anydevice.TransferError) as caught:
        anydevice.load_weights(name, "cpu")
    assert raw(str(caught.value)) == ""
    Path("anydevice.toml").write_text('"a\\u001b[2J" = 1\n')
    with pytest.warns(UserWarning, match="there is no setting") as said:
        anydevice.configure()
    assert raw(str(said[0].message)) == ""


def test_what_drivers_say_is_printed_without_escapes(home: Path) -> None:
    facts = Facts(f"card{ESCAPES}\nfake line", details={"note": f"x{ESCAPES}"})
    why = Reason("no_driver", f"broken{ESCAPES}")
    seen = (RawDevice(0, "gpu", facts), RawDevice(1, "gpu", facts, why))
    scans = [
        BackendScan("cpu", True, (RawDevice(0, "cpu", Facts(f"chip{ESCAPES}")),)),
        BackendScan("cuda", True, seen, notes=(f"note{ESCAPES}",)),
        BackendScan("rocm", True, stage="driver", reason=why),
    ]
    with _discover.machine_from(lambda limit: scans):
        report = anydevice.discover()
        shown = [str(report), report._repr_html_(), str(report["rocm"].reason)]
        status = report["cuda"].devices[0].status
    shown.append(status.facts.name)
    assert raw("".join(shown)) == ""
    assert "fake line" in shown[-1]
    assert "\n" not in shown[-1]


def belongs_to_another(path: Path) -> None:
    os.chown(path, NOBODY, -1)


def may_be_written_by_everyone(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


def leads_to_another_s(path: Path) -> None:
    target = path.with_name("target")
    path.rename(target)
    os.chown(target, NOBODY, -1)
    path.symlink_to(target)


def is_another_s_link(path: Path) -> None:
    leads_to_another_s(path)
    os.chown(path.with_name("target"), os.geteuid(), -1)
    os.chown(path, NOBODY, -1, follow_symlinks=False)


WAYS = (belongs_to_another, may_be_written_by_everyone, leads_to_another_s, is_another_s_link)


def plant(how: Callable[[Path], None], path: Path) -> None:
    if how is not may_be_written_by_everyone and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    how(path)


@pytest.mark.parametrize("how", WAYS)
def test_a_project_file_of_others_is_not_obeyed(home: Path, how: Callable[[Path], None]) -> None:
    path = Path("anydevice.toml")
    path.write_text('device = "no-such-backend"\n')
    plant(how, path)
    with pytest.warns(UserWarning, match=r"anydevice\.toml is not obeyed: (it|the link) "):
        assert anydevice.device("cpu").backend == "cpu"
    with pytest.warns(UserWarning, match="is not obeyed"):
        assert files.project_file() is None


def prepare_a_home() -> None:
    """What a neighbour would put into a home that he may write."""
    user_file().write_text('[env]\nLD_PRELOAD = "x.so"\n')
    wrong = {"code": "wrong_answer", "text": "off by 1", "fix": None}
    bad = {"device": "cpu", "engine": "numpy", "right": False, "reason": wrong, "seconds": 1.0}
    files.verdicts_file().write_text(json.dumps({"k": bad}))
    files.measurements_file().write_text(json.dumps({"k": {"add": 1.0}}))
    kernels_file().write_text(json.dumps({"k": [["softmax", "float32"]]}))


def believed() -> list[str]:
    """Which of the files in the home are believed."""
    forget_files()
    measurements._cache = (None, {})
    believed = ["anydevice.toml"] if anydevice.configure().env else []
    believed += ["verdicts.json"] if read_verdicts() else []
    believed += ["measurements.json"] if measurements.read_measurements() else []
    return believed + (["kernels.json"] if trusted_kernels._read() else [])


ALL = ["anydevice.toml", "verdicts.json", "measurements.json", "kernels.json"]


@pytest.mark.parametrize("how", WAYS[:2])
def test_nothing_in_a_shared_home_is_believed(home: Path, how: Callable[[Path], None]) -> None:
    prepare_a_home()
    assert believed() == ALL
    plant(how, home)
    with pytest.warns(UserWarning, match=r"its folder (belongs to another|may be written)") as said:
        assert believed() == []
    text = " ".join(str(each.message) for each in said)
    assert all(name in text for name in ALL)
    with pytest.warns(UserWarning, match="compiled code is not kept in"):
        assert files.compiled_folder("torch") is None
    with pytest.raises(anydevice.ConfigurationError, match="its folder"):
        anydevice.prefer("cpu")


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", ALL)
def test_a_file_of_others_is_not_used(home: Path, how: Callable[[Path], None], name: str) -> None:
    prepare_a_home()
    plant(how, home / name)
    with pytest.warns(UserWarning, match=rf"{name} (is not used|cannot be read) \((it|the link) "):
        assert believed() == [each for each in ALL if each != name]


ANOTHER_USER = """
import os
from anydevice._machine.settings import files
from tests.faults.test_hostile_folders import prepare_a_home
os.setgroups([]), os.setgid(54321), os.setuid(54321)
prepare_a_home()
(files.compiled_folder("jax") / "x-cache").write_bytes(b"code")
"""


def test_kernels_code_and_verdicts_that_another_user_made_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can run a process of another user")
    monkeypatch.chdir(tmp_path)
    with tempfile.TemporaryDirectory() as home:  # where the other user may enter
        os.chown(home, 54321, 54321)
        monkeypatch.setenv("ANYDEVICE_HOME", home)
        output_of("-c", ANOTHER_USER, cwd=Path(__file__).parents[2])
        for folder in (None, home, f"{home}/compiled"):  # ours from now on
            if folder is not None:
                os.chown(folder, 0, 0)
            with pytest.warns(UserWarning, match="belongs to another user"):
                assert believed() == []
            with pytest.warns(UserWarning, match="compiled code is not kept in .* to another user"):
                assert files.compiled_folder("jax") is None


def test_compiled_code_is_kept_in_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        monkeypatch.setenv("ANYDEVICE_HOME", str(tmp_path / "a" / "home"))
        for engine in ("torch", "jax"):
            folder = files.compiled_folder(engine)
            assert folder == tmp_path / "a" / "home" / "compiled" / engine
            for made in (folder, *folder.parents[:3]):
                assert made.stat().st_mode & 0o777 == 0o700
        anydevice.prefer("cpu")
        assert user_file().stat().st_mode & 0o777 == 0o644
        assert anydevice.device().chosen_by == "user file"
    finally:
        os.umask(before)
    monkeypatch.setenv("ANYDEVICE_HOME", str(tmp_path / "b" / "home"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b").chmod(0o777)
    with pytest.warns(UserWarning, match="compiled code is not kept in .*b may be written by ever"):
        assert files.compiled_folder("torch") is None
    (tmp_path / "b").chmod(0o1777)  # no other user can replace our folder
    assert files.compiled_folder("torch") is not None


def text(json: str, toml: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(json if path.suffix == ".json" else toml)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "zeros": lambda path: zeros(path, path.parent.parent),
    "huge": huge,
    "deep": text("[" * 100_000, "a = " + "[" * 50_000),
    "digits": text(f'{{"a": {{"b": {"9" * 5000}}}}}', "x64 = " + "9" * 5000),
    "null": text('{"a\\u0000": {"b": "\0"}}', 'env = {A = "\\u0000"}'),
    "infinite": text('{"version": Infinity}', "memory = inf"),
}


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("name", ALL)
def test_a_hostile_small_file_is_named_at_once(home: Path, how: str, name: str) -> None:
    HOSTILE[how](home / name)
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            assert believed() == []
            anydevice.device("cpu")
            keep_verdict("k", Verdict("cpu", "numpy", True))
        except anydevice.ConfigurationError as error:
            said_of_it = str(error)
        else:
            said_of_it = " ".join(str(each.message) for each in said)
    assert str(home / name) in said_of_it
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("keys", [300, 6000])
def test_unknown_keys_are_named_in_one_sentence(home: Path, keys: int) -> None:
    user_file().write_text("x64 = true\n" + "".join(f"k{n} = 1\n" for n in range(keys)))
    began = time.monotonic()
    with pytest.warns(UserWarning, match="line 2: there is no setting 'k0', 'k1'") as said:
        assert anydevice.configure().x64
    assert len(said) == 1
    assert f"nor the {keys - 5} more" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        anydevice.prefer("cpu")
    assert time.monotonic() - began < 60


WITHOUT_A_HOME = """
import os, sys, warnings
import anydevice
from anydevice.cli.main import main
from anydevice._machine.settings.files import compiled_folder
def everything():
    for words in ([], ["devices"], ["config"], ["plan", "nobody/none"], ["prefer", "cpu"]):
        print(words, main(words), file=sys.stderr)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        device = anydevice.device("cpu")
        device.check()
        print(device, compiled_folder("jax"), len(said), file=sys.stderr)
sys.stdout = sys.stderr
everything()  # imports all, since the interpreter may lie where only root can read
del os.environ["ANYDEVICE_HOME"]
anydevice.discover(refresh=True)
print("without", file=sys.stderr)
os.setgroups([]), os.setgid(54321), os.setuid(54321)
everything()
"""


def test_without_a_home_everything_works_and_nothing_is_saved(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become a user who is in no list")
    alone = dict.fromkeys(os.environ) | {"PATH": os.environ["PATH"]}
    environment = {**alone, "ANYDEVICE_HOME": str(tmp_path / "home")}
    done = run_python("-c", WITHOUT_A_HOME, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    said = done.stderr.partition("without\n")[2]
    assert said.count("this user has no home folder") == 1, said
    assert os.devnull not in said
    assert "anydevice.toml (without a home folder: set ANYDEVICE_HOME to one)" in said
    codes = [line for line in said.splitlines() if line.startswith("[")]
    assert codes == [
        "[] 0",
        "['devices'] 0",
        "['config'] 0",
        "['plan', 'nobody/none'] 2",  # it is not downloaded, which is said
        "['prefer', 'cpu'] 2",
    ]
    assert said.splitlines()[-1] == "cpu None 0"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["home"]
