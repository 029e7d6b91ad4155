"""Runs the tests on every Python that is supported, with the oldest and the newest libraries.

    python tests/run_versions.py [options] [what pytest is given]

`make versions` calls this. The environments lie in `.cache/versions/`. The oldest libraries are the
lower bounds in `pyproject.toml`; the newest are what the package index has. PyTorch is left out
where the index has no build of it for CPUs: one for NVIDIA cards takes gigabytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PLACE = ROOT / ".cache" / "versions"
LIBRARIES = ("numpy", "jax", "mlx", "torch")
"""Those whose versions the table shows."""
EXTRAS = ("jax", "mlx", "opencl", "llm")
"""Those whose lower bounds, too, are installed. PyTorch is the release that the tests pin."""
NEED_TORCH = {"torch", "accelerate", "lightning-fabric", "lightning_fabric"}
BOUND = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w,-]+\])?>=(?P<oldest>[\w.]+)(?P<marker>;.*)?")


@dataclass(frozen=True)
class Environment:
    python: str
    libraries: str

    @property
    def name(self) -> str:
        return f"python{self.python}-{self.libraries}"


ENVIRONMENTS = (
    Environment("3.13", "newest"),
    Environment("3.12", "newest"),
    Environment("3.11", "newest"),
    Environment("3.11", "oldest"),
)


@dataclass(frozen=True)
class Result:
    environment: Environment
    problem: str = ""
    versions: tuple[str, ...] = ("",) * len(LIBRARIES)
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    minutes: float = 0.0

    @property
    def green(self) -> bool:
        return not self.problem and not self.failed


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Run the tests in several environments.")
    parser.add_argument("--pythons", default="", help="interpreters, separated by spaces")
    parser.add_argument("--only", default="", help="a part of the names of the environments to run")
    parser.add_argument("--missing", choices=("fail", "skip"), default="fail")
    options, tests = parser.parse_known_args(arguments)
    chosen = [each for each in ENVIRONMENTS if options.only in each.name]
    if not chosen:
        names = ", ".join(each.name for each in ENVIRONMENTS)
        parser.error(f"no environment has {options.only!r} in its name: {names}")
    found = interpreters(options.pythons.split())
    results = []
    for each in chosen:
        python = found.get(each.python)
        if python is not None:
            results.append(run(each, python, tests or ["tests"]))
        elif options.missing == "fail":
            results.append(Result(each, f"Python {each.python} is missing: name one in PYTHONS"))
        else:
            print(f"--- {each.name}: skipped, Python {each.python} is missing")
    print(*table(results), sep="\n")
    return 0 if results and all(each.green for each in results) else 1


def interpreters(named: Sequence[str]) -> dict[str, str]:
    """An interpreter for each version: one that is named, else on the path, else one of pyenv."""
    found: dict[str, str] = {}
    for candidate in [*named, *_usual_places()]:
        version = _version(candidate)
        if version:
            found.setdefault(version, candidate)
        elif candidate in named:
            sys.exit(f"{candidate} in PYTHONS does not run as a Python with the module venv")
    return found


def _usual_places() -> Iterator[str]:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in sorted({each.python for each in ENVIRONMENTS}):
        yield f"python{version}"
        yield from map(str, pyenv.glob(f"{version}.*/bin/python{version}"))


def _version(python: str) -> str:
    program = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    try:
        told = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""


def run(environment: Environment, python: str, tests: Sequence[str]) -> Result:
    began = time.monotonic()
    folder = PLACE / environment.name
    result = Result(environment)
    print(f"--- {environment.name} with {python}, in {folder.relative_to(ROOT)}", flush=True)
    try:
        set_up(environment, folder, python)
        versions = installed(folder)
        result = replace(result, versions=versions)
        result = run_tests(result, folder, tests)
    except subprocess.CalledProcessError as error:
        step = " ".join(map(str, error.cmd[1:4]))
        result = replace(result, problem=f"{step} … ended with exit code {error.returncode}")
    return replace(result, minutes=(time.monotonic() - began) / 60)


def set_up(environment: Environment, folder: Path, python: str) -> None:
    """Make the environment, anew where `pyproject.toml` changed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    stamp, wanted = folder / "made-for.json", json.dumps([python, project])
    if not stamp.exists() or stamp.read_text("utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        pip_install(folder, "--upgrade", "pip")
    oldest = environment.libraries == "oldest"
    files = {
        "requirements": requirements(project, with_torch=has_torch_for_cpus(folder, project)),
        "constraints": lower_bounds(project) if oldest else [],
    }
    options: list[str | Path] = []
    for name, lines in files.items():
        (folder / f"{name}.txt").write_text("\n".join(lines), "utf-8")
        options += [f"--{name.removesuffix('s')}", folder / f"{name}.txt"]
    pip_install(folder, "--upgrade", "--upgrade-strategy=eager", "--editable", ROOT, *options)
    subprocess.run([python_of(folder), ROOT / "tests" / "fix_pocl.py"], check=True)
    stamp.write_text(wanted, "utf-8")


def requirements(project: dict[str, Any], *, with_torch: bool) -> list[str]:
    """What the tests need."""
    listed = project["optional-dependencies"]["test"]
    return [each for each in listed if with_torch or name_of(each) not in NEED_TORCH]


def lower_bounds(project: dict[str, Any]) -> list[str]:
    """The oldest allowed release of each library."""
    extras = project["optional-dependencies"]
    allowed = [*project["dependencies"], *(each for name in EXTRAS for each in extras[name])]
    bounds = [match for match in map(BOUND.fullmatch, allowed) if match is not None]
    return [f"{each['name']}=={each['oldest']}{each['marker'] or ''}" for each in bounds]


def name_of(requirement: str) -> str:
    [name] = re.findall(r"^[\w.-]+", requirement)
    return str(name).lower()


def has_torch_for_cpus(folder: Path, project: dict[str, Any]) -> bool:
    """Whether the PyTorch of the tests comes without CUDA's libraries."""
    [torch] = [each for each in requirements(project, with_torch=True) if name_of(each) == "torch"]
    options = ("--dry-run", "--ignore-installed", "--report=-", torch)
    told = subprocess.run(
        [python_of(folder), *PIP, *options], capture_output=True, text=True, check=False
    )
    if told.returncode:
        return False
    names = [each["metadata"]["name"] for each in json.loads(told.stdout)["install"]]
    return not any(name.startswith(("nvidia-", "cuda-")) for name in names)


PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet")


def pip_install(folder: Path, *arguments: str | Path) -> None:
    subprocess.run([python_of(folder), *PIP, *arguments], check=True)


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def installed(folder: Path) -> tuple[str, ...]:
    """The versions of the libraries that the table shows; "" for one that is not there."""
    program = (
        "import json, sys; from importlib import metadata\n"
        "there = {each.name.lower(): each.version for each in metadata.distributions()}\n"
        "print(json.dumps([there.get(name, '') for name in sys.argv[1:]]))"
    )
    told = subprocess.run(
        [python_of(folder), "-c", program, *LIBRARIES], check=True, stdout=subprocess.PIPE
    )
    return tuple(json.loads(told.stdout))


def run_tests(result: Result, folder: Path, tests: Sequence[str]) -> Result:
    """The result, with what pytest counted."""
    there = [name for name, version in zip(LIBRARIES, result.versions, strict=True) if version]
    engines = [*there, *([] if sys.platform == "darwin" else ["opencl"])]
    counted = folder / "results.xml"
    counted.unlink(missing_ok=True)
    command = ("-m", "pytest", "-p", "no:cacheprovider", "--quiet", f"--junitxml={counted}")
    ended = subprocess.run(
        [python_of(folder), *command, "--numprocesses=logical", "--dist=worksteal", *tests],
        cwd=ROOT,
        env={
            **os.environ,
            "ANYDEVICE_TEST_ENGINES": ",".join(engines),
            "PYTHONDONTWRITEBYTECODE": "",
        },
        check=False,
    )
    result = with_counts(result, counted)
    if ended.returncode and result.green:
        return replace(result, problem=f"pytest ended with exit code {ended.returncode}")
    return result


def with_counts(result: Result, file: Path) -> Result:
    if not file.exists():
        return replace(result, problem="pytest did not finish")
    suites = ElementTree.parse(file).getroot().iter("testsuite")
    told = [{name: int(suite.get(name, 0)) for name in COUNTED} for suite in suites]
    tests, skipped, failed, errors = (sum(each[name] for each in told) for name in COUNTED)
    passed = tests - skipped - failed - errors
    return replace(result, passed=passed, skipped=skipped, failed=failed + errors)


COUNTED = ("tests", "skipped", "failures", "errors")


def table(results: Sequence[Result]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [
        ("environment", *LIBRARIES, "passed", "skipped", "failed", "minutes", "")
    ]
    for each in results:
        counts = (str(each.passed), str(each.skipped), str(each.failed), f"{each.minutes:.1f}")
        versions = (version or "–" for version in each.versions)
        rows.append((each.environment.name, *versions, *counts, each.problem))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
