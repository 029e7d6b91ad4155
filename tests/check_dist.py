"""Checks the files that would be published: their metadata, their contents, and the wheel in use.

    python tests/check_dist.py dist/

`make dist` builds the files and calls this. The wheel is installed twice: alone, with only what it
declares, where the commands and the first program of the README run; and in an environment that
also sees the array libraries of this one, where all programs of the README run as they stand.
"""

from __future__ import annotations

import email
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST = 3_000_000
"""Bytes of a file to publish."""
COMMANDS = (
    "",
    "devices",
    "doctor",
    "config --why",
    "plan --help",
    "verify --op matmul --engine numpy",
)


def main(folder: Path) -> None:
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    for name, problems in (
        (wheel.name, [*wrong_contents(wheel), *wrong_metadata(wheel)]),
        (sdist.name, list(wrong_source(sdist))),
    ):
        insist(not problems, f"{name}: {'; '.join(problems)}")
    with tempfile.TemporaryDirectory() as place:
        python = installed(Path(place) / "alone", str(wheel))
        run_alone(python)
        print("the wheel alone: its commands and the README's first program run")
        python = installed(Path(place) / "beside", str(wheel))
        run_beside(python)
    print(f"{wheel.name}, {sdist.name}: ready to publish")


def wrong_contents(wheel: Path) -> Iterator[str]:
    """What the wheel lacks of the sources, and what it has beside them."""
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    tracked = subprocess.check_output(["git", "ls-files", "src"], cwd=ROOT, text=True).split("\n")
    expected = {name.removeprefix("src/") for name in tracked if name}
    yield from (f"{name} is missing" for name in sorted(expected - names))
    yield from (f"{name} should not be there" for name in sorted(names - expected))
    if wheel.stat().st_size > LARGEST:
        yield f"{wheel.stat().st_size} bytes are more than {LARGEST}"


def wrong_metadata(wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as file:
        [name] = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        data = email.message_from_bytes(file.read(name))
    for field in ("Name", "Version", "Summary", "License-Expression", "Requires-Python"):
        if not data[field]:
            yield f"no {field}"
    if wheel.name.split("-")[1] != data["Version"]:
        yield f"its name and its metadata disagree about the version, {data['Version']}"
    if "# anydevice" not in str(data.get_payload()):
        yield "its description is not the README"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    if data["Requires-Python"] != project["requires-python"]:
        yield f"it is for Python {data['Requires-Python']}"
    for missing in set(project["classifiers"]) - set(data.get_all("Classifier", [])):
        yield f"no {missing}"
    told = data.get_all("Requires-Dist", [])
    extras = project["optional-dependencies"].values()
    for each in {*project["dependencies"], *(each for extra in extras for each in extra)}:
        of_itself = each.startswith(f"{project['name']}[")  # written out in the metadata
        if not of_itself and not any(line.startswith(each.partition(";")[0]) for line in told):
            yield f"{each} is not among what it requires"


def wrong_source(sdist: Path) -> Iterator[str]:
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "tests/conftest.py"):
        if name not in names:
            yield f"{name} is missing"
    tracked = set(subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n"))
    yield from (f"{n} should not be there" for n in sorted(names - tracked - {"PKG-INFO", ""}))
    if sdist.stat().st_size > LARGEST:
        yield f"{sdist.stat().st_size} bytes are more than {LARGEST}"


def installed(place: Path, *packages: str) -> str:
    """A new environment with these packages and what they declare; its Python."""
    venv.create(place, with_pip=True)
    python = str(place / ("Scripts" if os.name == "nt" else "bin") / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL)
    return python


def run_alone(python: str) -> None:
    """The commands, and the first program of the README, with nothing else installed."""
    readme = (ROOT / "README.md").read_text("utf-8")
    first = readme.partition("```python\n")[2].partition("```")[0]
    command = str(Path(python).parent / "anydevice")
    for words in COMMANDS:
        run([command, *words.split()], accepted=(0, 1) if words == "doctor" else (0,))
    run([python, "-c", first])
    where = run([python, "-c", "import anydevice; print(anydevice.__file__)"])
    insist("site-packages" in where, f"anydevice was imported from {where}")


def run_beside(python: str) -> None:
    """All that the README shows, with the libraries of this environment behind the wheel."""
    [place] = Path(python).parents[1].glob("lib/python*/site-packages")
    # Read after the environment's own packages: what the wheel has wins.
    (place / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    where = run([python, "-c", "import anydevice; print(anydevice.__file__)"])
    insist(str(place) in where, f"anydevice was imported from {where}")
    tests = ["tests/docs/test_examples.py", "tests/docs/test_readme.py", "-k", "README or readme"]
    subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], cwd=ROOT, check=True
    )


def run(command: list[str], accepted: tuple[int, ...] = (0,)) -> str:
    with tempfile.TemporaryDirectory() as elsewhere:  # not where the sources lie
        done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True)
    said = " ".join(command[:1] + command[1:])[:200]
    insist(done.returncode in accepted, f"{said}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def insist(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(otherwise)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
