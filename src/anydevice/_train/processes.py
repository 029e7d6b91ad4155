"""Training in a process for each device of a list; this process starts them, and calls back."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.spawn import import_main_path
from typing import Any

from anydevice._arrays.move import to_device
from anydevice._core.device import Device
from anydevice._core.protocols import Function
from anydevice._core.record import replace
from anydevice._libraries.layers import layer_of
from anydevice._libraries.precision import default_precision, policy_of
from anydevice._libraries.registry import part
from anydevice._machine.engines.registry import place_of
from anydevice._machine.settings import config as settings
from anydevice._nn.model import Model
from anydevice._parallel.host import environment_of
from anydevice._parallel.launch import Message, results_of, run_processes
from anydevice._parallel.mesh import Mesh
from anydevice._parallel.processes import initialize, launched
from anydevice._train import randomness
from anydevice._train.callbacks import Callback, TrainingEvent, callbacks_of, step_callbacks
from anydevice.errors import AnyDeviceError, ConfigurationError

_OF_MAIN = b"\x8c\x08__main__"
"""The name of the main module in a pickle."""


def train_in_processes(
    train: Function, options: Mapping[str, Any], devices: Sequence[Device], ctrl_c: Any
) -> Any:
    """Return the result of `train(**options)` in a process for each device.

    The model, the optimizer, the schedule and the random generators of this process get the state
    that they have after a training in it. Callbacks are called in this process.
    """
    model, data = options["model"], options["data"]
    home = devices[0] if devices[0].kind != "cpu" else Device("cpu", engine="torch")
    precision = options["precision"] or default_precision()
    callbacks = callbacks_of(options["callbacks"])
    layer: Any = None if isinstance(model, Model) else layer_of(model)

    def load(packed: bytes) -> Any:
        parameters = to_device(part("torch", "mesh").unpack(packed, home), home, convert=True)
        if layer is None:
            return model.with_parameters(parameters)
        layer.placed(home, policy_of(precision, home).parameters)
        return layer.finished(parameters)

    own = {"device": None, "devices": None, "precision": precision}
    own["callbacks"] = "steps" if step_callbacks(callbacks) else "epochs" if callbacks else None
    around = {"random": randomness.random_state(home), "configured": settings.changes()}
    answer = partial(_call_back, callbacks, load)
    sent = {"train": train, **options, **own, **around}
    first, *_ = _call_on_devices(_train_part, sent, devices, answer, ctrl_c)
    trained, states, (host, accelerators) = part("torch", "mesh").unpack(first, home)
    report = replace(trained.report, device=home)
    averaged = None if trained.averaged is None else deepcopy(load(trained.averaged))
    trained = replace(trained, averaged=averaged, model=load(trained.model), report=report)
    for name, state in states.items():
        options[name].load_state_dict(state)
    randomness.set_host_state(host, data)
    randomness.set_device_state(home, *accelerators)
    if layer is not None and not model.training:
        model.train()
    return trained


def _call_on_devices(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    devices: Sequence[Device],
    answer: Callable[[Sequence[Connection], Message], None],
    ctrl_c: Any,
) -> list[Any]:
    """Return the results of `function(mesh, pipe, **arguments)` in a process for each device.

    Call `answer(pipes, message)` for each message of a process. `ctrl_c` handles Ctrl-C in a block,
    and its `acknowledge` passes it on. If a process fails, all end, and its error is raised here.
    """
    launcher, count = launched(os.environ), len(devices)
    if launcher is not None and launcher.size > 1:
        raise ConfigurationError(
            "this is one of several processes, and starts none: give devices=parallel.initialize()."
            " If a list of devices started it, to import this script, put the training under "
            '`if __name__ == "__main__":`, or run: pip install cloudpickle',
            source="devices=",
        )
    data, script = _pack_arguments(arguments, count)
    method = multiprocessing.get_start_method(allow_none=True)
    spawn = multiprocessing.get_context("spawn")
    calls = [(_call_here, function, place_of(device), script, method) for device in devices]
    with (
        environment_of("torch", count) as variables,
        run_processes(spawn, variables, calls, duplex=True) as running,
        ctrl_c,
    ):
        first, pipes = running[0][0], [pipe for _, pipe, _ in running.values()]
        if hasattr(os, "setpgrp"):  # on other systems, Ctrl-C reaches all processes by itself
            ctrl_c.acknowledge = lambda: os.kill(first.pid, signal.SIGINT)
        for pipe in pipes:
            with suppress(OSError):  # the process has ended, and its failure is received below
                pipe.send_bytes(data)
        try:
            return results_of(running, partial(answer, pipes))
        except AnyDeviceError as error:
            if ctrl_c.requested:  # by a process that has not begun to train
                raise KeyboardInterrupt from error
            raise


def _pack_arguments(arguments: Mapping[str, Any], count: int) -> tuple[bytes, str | None]:
    """Return the arguments as bytes, and the script to import before they are read, if any."""
    import __main__

    picklers: list[Any] = [pickle.Pickler]
    with suppress(ImportError):
        from cloudpickle import Pickler

        picklers.append(Pickler)

    def pack(value: Any, pickler: Any) -> tuple[bytes, object]:
        try:
            data = part("torch", "mesh").pack(value, pickler)
        except Exception as error:  # of any class: objects have pickling code of their own
            return b"", error
        is_by_name = pickler is pickle.Pickler and _OF_MAIN in data
        return data, "it is defined in the main program, which is no file" if is_by_name else None

    for pickler in picklers:
        data, problem = pack(arguments, pickler)
        if problem is None:
            return data, None
    path = getattr(__main__, "__file__", None)
    if data and path is not None and os.path.isfile(path):
        return data, os.path.abspath(path)
    packed = {name: pack(value, picklers[-1]) for name, value in arguments.items()}
    name = next(name for name, (own, why) in packed.items() if why and (data or not own))
    is_by_value = len(picklers) > 1 or isinstance(arguments[name], Iterator)
    raise ConfigurationError(
        f"{name}= cannot be sent to the processes that devices= starts ({packed[name][1]}); "
        f"{'' if is_by_value else 'run: pip install cloudpickle, or '}start the script by "
        f"`anydevice launch -n {count} train.py`, with devices=parallel.initialize()",
        source=name,
    )


def _call_here(pipe: Any, function: Any, place: Device, script: str | None, method: Any) -> Any:
    """Receive the arguments in a new process, join the others, and call the function."""
    multiprocessing.set_start_method(method, force=True)  # for loaders, as in the parent
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # a terminal sends Ctrl-C to the parent alone, which passes it on
    try:
        data = pipe.recv_bytes()
        if script is not None:
            import_main_path(script)
        mesh = initialize("cpu" if place.kind == "cpu" else str(place), engine="torch")
        return function(mesh, pipe, **part("torch", "mesh").unpack(data, mesh.devices[0]))
    except BaseException as error:
        with suppress(Exception):  # an error that cannot be pickled is sent as its traceback
            pipe.send(Message("error", pickle.dumps(error)))
        raise


def _call_back(callbacks: list[Callback], load: Function, pipes: Any, message: Message) -> None:
    """Call the callbacks with an event of rank 0, and forward their requests to every rank."""

    def ask(wish: str) -> Any:
        if not pipes:
            text = "this event is over; call its model(), loss() and stop() inside the callback"
            raise ConfigurationError(text, source="callbacks")
        for pipe in pipes:
            pipe.send(wish)
        return pipes[0].recv()

    asks: dict[str, Any] = {name: partial(ask, name) for name in ("loss", "stop")}
    event = TrainingEvent(**message.value, **asks, model=lambda: load(ask("model")))
    for callback in callbacks:
        getattr(callback, message.kind)(event)
    ask("continue")
    pipes = ()


class _Relay(Callback):
    """Forwards events to the parent and answers its requests.

    Every rank waits for the parent: in a collective, a slow callback would look like a silent rank.
    """

    def __init__(self, mesh: Mesh, pipe: Connection) -> None:
        self._leads, self._pipe = mesh.rank == 0, pipe

    def step(self, event: TrainingEvent) -> None:
        self._relay("step", event)

    def epoch(self, event: TrainingEvent) -> None:
        self._relay("epoch", event)

    def _relay(self, kind: str, event: TrainingEvent) -> None:
        answers: dict[str, Any] = {"loss": event.loss, "stop": event.stop, "continue": str}
        answers["model"] = lambda: _pack_model(event.model())
        if self._leads:
            values = {name: getattr(event, name) for name in event._fields if name not in answers}
            self._pipe.send(Message(kind, values))
        wish = ""
        while wish != "continue":
            wish = self._pipe.recv()
            answer = answers[wish]()
            if self._leads:
                self._pipe.send(answer)


def _train_part(
    mesh: Mesh,
    pipe: Connection,
    train: Function,
    random: Any,
    configured: Any,
    callbacks: Any,
    **options: Any,
) -> bytes | None:
    """Train in one of the processes; return what the first one has to give back."""
    settings.change(configured, insist=False)
    randomness.set_random_state(random, *mesh.devices)
    if mesh.rank:
        warnings.simplefilter("ignore")  # the first process gives the same ones
    # The scheduler wrapped the original optimizer, not this copy.
    warnings.filterwarnings("ignore", r"Seems like `optimizer\.step\(\)` has been overridden")
    relay = _Relay(mesh, pipe)
    options["callbacks"] = {None: (), "epochs": relay.epoch, "steps": relay}[callbacks]
    trained = train(**options | {"devices": mesh})
    if mesh.rank:
        return None
    library = part("torch", "mesh")
    groups = getattr(options["optimizer"], "param_groups", ())
    is_sharded = any(library.is_cut(x) for group in groups for x in group["params"])
    own = {} if is_sharded else {name: options[name] for name in ("optimizer", "schedule")}
    states = {name: x.state_dict() for name, x in own.items() if hasattr(x, "load_state_dict")}
    generators = randomness.host_state(options["data"]), randomness.random_state(*mesh.devices)[1]
    models = {"model": trained.model, "averaged": trained.averaged}
    packed = {name: _pack_model(x) for name, x in models.items() if x is not None}
    return library.pack((replace(trained, **packed), states, generators))


def _pack_model(model: Any) -> bytes:
    own = model.parameters if isinstance(model, Model) else layer_of(model).parameters
    return part("torch", "mesh").pack(own)
