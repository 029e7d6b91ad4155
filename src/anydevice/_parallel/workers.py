"""Calling a function in a process for each of several devices, started for this call.

Arguments and results are pickled, and go through pipes that only the two processes have.
"""

from __future__ import annotations

import ast
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import get_context, get_start_method, set_start_method
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any

from anydevice._core.device import Device
from anydevice._libraries.registry import part
from anydevice._parallel.__main__ import run_script_as
from anydevice._parallel.launch import Message, environment, receive_results, run_processes
from anydevice._parallel.processes import initialize, launched
from anydevice.errors import ConfigurationError

Script = tuple[str, str | None]
"""The path of the main script, and its package."""


def call_on_devices(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    devices: Sequence[Device],
    answer: Callable[[Sequence[Connection], Message], None],
) -> list[Any]:
    """Call `function(mesh, pipe, **arguments)` in a process of PyTorch for each device.

    Returns the results. `answer` gets the pipes of all processes, and each message of one. A fake
    device of `testing.fake_machine` is the CPU there.

    Raises `ConfigurationError`, before a process starts, for an argument that cannot be sent, and
    in a process that is one of several. If a process fails or is killed, the others are ended, and
    its error is raised from one that names its rank.
    """
    _check_alone(len(devices))
    data, script = _pack_arguments(arguments, len(devices))
    method = get_start_method(allow_none=True)
    calls = [(_call_here, function, _place_of(device), script, method) for device in devices]
    with (
        environment("torch", len(devices)) as variables,
        run_processes(get_context("spawn"), variables, calls, talks=True) as running,
    ):
        pipes = [pipe for _, pipe, _ in running.values()]
        for pipe in pipes:
            with suppress(OSError):  # the process has ended: its failure is received below
                pipe.send_bytes(data)
        del data
        return receive_results(running, partial(answer, pipes))


def _check_alone(count: int) -> None:
    launcher = launched(os.environ)
    if launcher is not None and launcher.size > 1:
        raise ConfigurationError(
            f"this process is one of {launcher.size} that a launcher started, and a list of "
            f"{count} devices would start {count} more; give devices=parallel.initialize()",
            source="devices=",
        )


def _place_of(device: Device) -> str:
    is_fake = device.status is not None and device.status.facts.details.get("fake")
    return "cpu" if device.kind == "cpu" or is_fake else str(device)


def _call_here(
    pipe: Connection,
    function: Callable[..., Any],
    place: str,
    script: Script | None,
    method: str | None,
) -> Any:
    """Receive the arguments in a new process, join the others, and call the function."""
    set_start_method(method, force=True)  # of the workers of loaders, as in the parent
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # a terminal sends Ctrl-C to the parent alone, which passes it on
    try:
        data = pipe.recv_bytes()
        if script is not None:
            run_script_as(script[0], "__mp_main__", script[1])
        mesh = initialize(place, engine="torch")
        return function(mesh, pipe, **part("torch", "mesh").unpack(data, mesh.devices[0]))
    except BaseException as error:
        with suppress(Exception):  # an error that cannot be pickled is told by its traceback
            pipe.send(Message("error", pickle.dumps(error)))
        raise


def _pack_arguments(arguments: Mapping[str, Any], count: int) -> tuple[bytes, Script | None]:
    """Return the arguments as bytes, and the script to import before they are read, if any."""
    pack = part("torch", "mesh").pack
    by_value: list[str] = []

    class Noting(pickle.Pickler):
        """Pickles classes and functions by name, and notes those that this may not find there."""

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, type | FunctionType) and (
                value.__module__ == "__main__" or "<" in value.__qualname__
            ):
                by_value.append(value.__qualname__)
            return NotImplemented

    def packed_by(pickler: Any, value: Any) -> tuple[bytes, Exception | None]:
        by_value.clear()
        try:
            return pack(value, pickler), None
        except Exception as error:  # of any class: objects have pickling code of their own
            return b"", error

    data, error = packed_by(Noting, arguments)
    if error is None and not by_value:
        return data, None
    cloud = _cloud_pickler()
    if cloud is not None:
        data, error = packed_by(cloud, arguments)
        if error is None:
            return data, None
    elif error is None and (script := _main_script()) is not None:
        return data, script
    for name in arguments:
        _, own_error = packed_by(cloud or Noting, arguments[name])
        if own_error is not None or (error is None and by_value):
            break
    why = own_error or f"{by_value[0]} is defined in the main program, which is no file to import"
    first = "run: pip install cloudpickle, or " if by_value and cloud is None else ""
    raise ConfigurationError(
        f"{name}= cannot be sent to the processes that devices= starts ({why}); {first}start the "
        f"script by `anydevice launch -n {count} train.py`, with devices=parallel.initialize()",
        source=name,
    )


def _cloud_pickler() -> Any:
    """Return the pickler of cloudpickle, which sends functions by value; `None` without it."""
    try:
        from cloudpickle import Pickler
    except ImportError:
        return None
    return Pickler


def _main_script() -> Script | None:
    """Return the script that this program runs, if it is a file.

    Raises `ConfigurationError` if a process that imports it would run this call again.
    """
    main, frame = sys.modules["__main__"], inspect.currentframe()
    path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if path is None or not os.path.isfile(path):
        return None
    while frame is not None and (
        frame.f_globals is not vars(main) or frame.f_code.co_name != "<module>"
    ):
        frame = frame.f_back
    if frame is not None and not _is_guarded(path, frame.f_lineno):
        raise ConfigurationError(
            f"devices= starts processes, and these import {os.path.basename(path)} to know its "
            'classes and functions; put the training under `if __name__ == "__main__":`, or run: '
            "pip install cloudpickle",
            source="devices=",
        )
    return os.path.abspath(path), spec and spec.parent


def _is_guarded(path: str, line: int) -> bool:
    """Whether a line of a script runs only in the main program."""
    with open(path, "rb") as file:
        blocks = [node for node in ast.parse(file.read()).body if isinstance(node, ast.If)]
    inside = [node for node in blocks if node.lineno <= line <= (node.end_lineno or 0)]
    return any("__name__" in ast.unparse(node.test) for node in inside)
