"""Sessions of a user, each in a process of its own that need not load its libraries first.

One process loads them, once, and hides them again: what was loaded is not imported, and `import`
only takes it out of hiding. It computes nothing, and forks a child for each session. So a session
begins as a new Python does, and spares the seconds that importing takes.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.abc
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Sequence
from copy import copy
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

LIBRARIES = ("numpy", "torch", "jax", "jax.numpy", "mlx.core", "flax.nnx")
HANGS_AFTER = 400


class Sessions:
    """Runs blocks of Python as sessions: `run(["import anydevice", …], cwd=…, env=…)`."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        blocks: Sequence[tuple[str, int, str]],
        *,
        cwd: Path,
        env: dict[str, str],
        filters: Sequence[str] = ("error",),
    ) -> tuple[int, list[str], str]:
        """Run blocks of (file, line, source) one after the other, under filters of warnings.

        Returns the exit code, what each block printed, and what went to standard error.
        """
        if self._server is None:
            command = [sys.executable, "-W", "error", __file__]
            self._server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            printed, errors = Path(folder) / "printed", Path(folder) / "errors"
            asked = [blocks, str(cwd), env, list(filters), str(printed), str(errors)]
            try:
                self._server.stdin.write(json.dumps(asked) + "\n")
                self._server.stdin.flush()
                ended = json.loads(self._server.stdout.readline())
            except BaseException:  # interrupted: its answer would be taken for that of the next
                self._server.kill()
                self._server.wait()
                self._server = None
                raise
            said = json.loads(printed.read_text("utf-8")) if ended == 0 else []
            return ended, said, errors.read_text("utf-8")

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()


class _Hidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that were loaded and wait to be imported."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._together: dict[str, dict[str, ModuleType]] = {}
        """Of each library, what came with it."""

    def load(self, library: str) -> None:
        before = set(sys.modules)
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
        new = {name: sys.modules[name] for name in sys.modules if name not in before}
        self._modules |= new
        package = library.partition(".")[0]  # it has the module as an attribute, and is not asked
        for name in {library, package}:
            self._together.setdefault(name, {}).update(new)

    def hide(self) -> None:
        for name in self._modules:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def use_threads(self, number: int) -> None:
        if "torch" in self._modules:
            self._modules["torch"].set_num_threads(number)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """What any finder says of the module, whoever asks, but that it is loaded from hiding."""
        if name not in self._modules:
            return None
        spec = copy(self._modules[name].__spec__) or ModuleSpec(name, self)
        spec.loader = self
        return spec

    def create_module(self, spec: Any) -> ModuleType:
        self._own = self._modules[spec.name].__spec__
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own
        for name, other in self._together.get(module.__name__, {}).items():
            sys.modules.setdefault(name, other)


def _run_blocks(blocks: Sequence[tuple[str, int, str]]) -> list[str]:
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for file, line, source in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * line + source, file, "exec"), names)
        printed.append(out.getvalue())
    return printed


def _become_a_session(
    hidden: _Hidden,
    blocks: Any,
    cwd: str,
    env: dict[str, str],
    filters: list[str],
    printed: str,
    errors: str,
) -> NoReturn:
    for number, path in ((0, os.devnull), (1, os.devnull), (2, errors)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    if threads := env.get("OMP_NUM_THREADS"):  # which PyTorch reads while it is loaded
        hidden.use_threads(int(threads))
    os.chdir(cwd)
    sys.argv, sys.path[0] = ["-c"], ""
    sys.warnoptions[:] = filters
    warnings.resetwarnings()
    warnings._processoptions(filters)  # type: ignore[attr-defined]
    signal.alarm(HANGS_AFTER)
    code = 1
    try:
        said = _run_blocks(blocks)
        Path(printed).write_text(json.dumps(said), "utf-8")
        code = 0
    except BaseException:
        traceback.print_exc()
    # As a process ends, but for taking apart every module, of which there are thousands.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


def _serve() -> None:
    hidden = _Hidden()
    for library in LIBRARIES:
        hidden.load(library)
    hidden.hide()
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become_a_session(hidden, *json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
