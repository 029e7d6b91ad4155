"""A machine that gives this process no further thread and no child, as a small `pids.max` does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.programs import run_python

pytestmark = pytest.mark.skipif(os.name != "posix", reason="limits as POSIX has them")

# Everything runs once before: the interpreter may lie where only root can read, and root has no
# limit.
ALONE = """
import os, resource, sys, threading
import numpy as np
import anydevice
from anydevice.cli.main import main

def everything():
    printed = [main(words) for words in ([], ["devices"], ["config"])]
    found = anydevice.discover(refresh=True)
    device = anydevice.device("cpu", engine="numpy")
    drawn = anydevice.rng(7, device).normal(3_000_000)
    batches = [batch.sum() for batch in anydevice.prefetch([np.ones(2), np.ones(3)], device)]
    def failing():
        yield np.ones(1)
        raise ZeroDivisionError
    seen = []
    try:
        for batch in anydevice.prefetch(failing(), device):
            seen.append(len(batch))
    except ZeroDivisionError:
        seen.append("raised")
    with iter(anydevice.prefetch([np.ones(2)] * 5, device)) as early:
        next(early)
    return printed, found["cpu"].usable, str(device), float(drawn.sum()), batches, seen

sys.stdout = open(os.devnull, "w")
before = everything()
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(54321), os.setuid(54321)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    threading.Thread(target=print).start()
except RuntimeError:
    pass
else:
    sys.exit(3)
after = everything()
print(before == after, before, after, file=sys.stderr)
"""


def test_everything_works_without_threads(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    environment = {"ANYDEVICE_HOME": str(tmp_path / "home")}
    done = run_python("-W", "ignore", "-c", ALONE, cwd=tmp_path, env=environment)
    if done.returncode == 3:
        pytest.skip("this system does not enforce the limit")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("True "), done.stderr
