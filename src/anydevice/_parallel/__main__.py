"""`python -m anydevice._parallel train.py …`: run a script as one of several processes.

`anydevice launch` starts this. A script that fails, also by `sys.exit(3)`, notes the time and its
traceback: its process ends later, because of libraries that leave the group, and others fail
meanwhile.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
import traceback
from io import TextIOWrapper
from types import ModuleType

from anydevice._libraries.group import note_failure, take_variables


def main() -> None:
    end_with_launcher()
    if isinstance(sys.stdout, TextIOWrapper):  # shared by all processes: a line is written whole
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
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
        sys.stdout.flush()
    except SystemExit as error:
        if error.code:
            _note(error, "" if isinstance(error.code, int) else f"{error.code}\n")
        raise
    except BrokenPipeError:  # the reader has gone, as after `| head`
        os._exit(128 + 13)
    except Exception as error:
        trace = error.__traceback__
        trace = None if trace is None else trace.tb_next  # without the lines of this file
        error = error.with_traceback(trace)
        _note(error, "".join(traceback.format_exception(error)))
        sys.excepthook(type(error), error, trace)
        raise SystemExit(1) from None


def end_with_launcher() -> None:
    """End this process when its launcher ends, even by a kill; only on Linux."""
    take_variables()
    launcher = os.environ.get("ANYDEVICE_LAUNCHER")
    if launcher is None or sys.platform != "linux":
        return
    import ctypes

    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM)
    if str(os.getppid()) != launcher:  # it was gone already
        os.kill(os.getpid(), signal.SIGTERM)


def _note(error: BaseException, text: str) -> None:
    """Note the time and the reason of the failure, also for functions of `atexit`."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    note_failure(text)


if __name__ == "__main__":
    main()
