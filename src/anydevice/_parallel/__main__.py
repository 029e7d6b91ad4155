"""`python -m anydevice._parallel train.py …`: a script as one of several processes.

What `anydevice launch` starts. When a script fails, be it by `sys.exit(3)`, this notes the time:
the libraries that join processes take a while to let go of them, and meanwhile others fail too.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
import time
from contextlib import suppress
from types import ModuleType


def main() -> None:
    end_with_launcher()
    sys.argv = sys.argv[1:]
    path = sys.argv[0]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except SystemExit as error:
        if error.code:
            _failed(error)
        raise
    except Exception as error:
        _failed(error)
        trace = error.__traceback__
        trace = None if trace is None else trace.tb_next  # without the lines of this file
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None


def end_with_launcher() -> None:
    """On Linux, let this process be ended when the one that launched it is gone, be it killed."""
    launcher = os.environ.get("ANYDEVICE_LAUNCHER")
    if launcher is None or sys.platform != "linux":
        return
    import ctypes

    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM)
    if str(os.getppid()) != launcher:  # it was gone already
        os.kill(os.getpid(), signal.SIGTERM)


def _failed(error: BaseException) -> None:
    """Say when, and why to what runs as the program ends."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    note = os.environ.get("ANYDEVICE_FAILED")
    if note is not None:
        with suppress(OSError), open(note, "w") as file:  # whoever waits for it may be gone
            file.write(str(time.time()))


if __name__ == "__main__":
    main()
