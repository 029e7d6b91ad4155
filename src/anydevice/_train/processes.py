"""A training in processes that it starts itself, one for each of several devices of PyTorch."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

from anydevice._arrays.move import to_device
from anydevice._core.device import Device
from anydevice._core.record import replace
from anydevice._libraries.layers import layer_of
from anydevice._libraries.precision import default_precision, policy_of
from anydevice._libraries.registry import part
from anydevice._machine.settings import config as settings
from anydevice._nn.model import Model
from anydevice._parallel.launch import Message
from anydevice._parallel.mesh import Mesh
from anydevice._parallel.workers import call_on_devices
from anydevice._train import randomness
from anydevice._train.callbacks import Callback, TrainingEvent, callbacks_of, step_callbacks
from anydevice._train.interrupts import Interrupts
from anydevice.errors import ConfigurationError


def train_in_processes(options: Mapping[str, Any], devices: Sequence[Device]) -> Any:
    """Return the result of `nn.train(**options)` in a process for each device.

    The model, the optimizer, the schedule and the random generators of this process get the state
    that they have after a training in it. Callbacks are called in this process.
    """
    model, data = options["model"], options["data"]
    home = devices[0] if devices[0].kind != "cpu" else Device("cpu", engine="torch")
    precision = options["precision"] or default_precision()
    callbacks = callbacks_of(options["callbacks"])
    layer: Any = None if isinstance(model, Model) else layer_of(model)

    def load(packed: bytes) -> Any:
        """Return the model with the parameters of the first process."""
        parameters = to_device(part("torch", "mesh").unpack(packed, home), home, convert=True)
        if layer is None:
            return model.with_parameters(parameters)
        layer.placed(home, policy_of(precision, home).parameters)
        return layer.finished(parameters)

    def answer(pipes: Sequence[Connection], message: Message) -> None:
        if message.kind == "event":
            _call_back(callbacks, pipes, load, *message.value)
            return
        interrupts = block.enter_context(Interrupts())

        def interrupt_first() -> None:
            with suppress(OSError):  # it has ended
                os.kill(message.value, signal.SIGINT)

        if hasattr(os, "setpgrp"):  # elsewhere, Ctrl-C reaches all processes by itself
            interrupts.acknowledge = interrupt_first

    relay = _StepRelay if step_callbacks(callbacks) else _Relay if callbacks else None
    own = {"device": None, "devices": None, "precision": precision, "callbacks": relay}
    around = {"random": randomness.random_state(home), "configured": settings.changes()}
    with ExitStack() as block:
        first, *_ = call_on_devices(_train_part, {**options, **own, **around}, devices, answer)
    trained, states, (host, accelerators) = part("torch", "mesh").unpack(first, home)
    report = replace(trained.report, device=home)
    trained = replace(trained, model=load(trained.model), report=report)
    for name, state in states.items():
        options[name].load_state_dict(state)
    randomness.set_host_state(host, data)
    randomness.set_device_state(home, *accelerators)
    if layer is not None and not model.training:
        model.train()
    return trained


def _call_back(
    callbacks: Sequence[Callback],
    pipes: Sequence[Connection],
    load: Callable[[bytes], Any],
    name: str,
    state: Mapping[str, Any],
) -> None:
    """Call the callbacks with an event of the first process; all processes do what they ask for."""
    is_over = False

    def send(wish: str) -> None:
        if is_over:
            raise ConfigurationError(
                "model(), loss() and stop() of an event are for the call of the callback alone, "
                "since the training goes on in other processes",
                source="callbacks",
            )
        for pipe in pipes:
            pipe.send(wish)

    def ask(wish: str) -> Any:
        send(wish)
        return pipes[0].recv()

    event = TrainingEvent(
        model=lambda: load(ask("model")),
        loss=lambda: ask("loss"),
        stop=lambda: send("stop"),
        **state,
    )
    for callback in callbacks:
        (callback.step if name == "step" else callback.epoch)(event)
    send("continue")
    is_over = True


# In each process


class _Relay(Callback):
    """Tells the parent of events, and does what its callbacks ask for.

    The parent sends that to every process: waiting for the first one in a collective would look as
    if it were silent, while a callback takes long.
    """

    def __init__(self, mesh: Mesh, pipe: Connection) -> None:
        self._leads, self._pipe = mesh.rank == 0, pipe

    def epoch(self, event: TrainingEvent) -> None:
        self._relay("epoch", event)

    def _relay(self, name: str, event: TrainingEvent) -> None:
        if self._leads:
            fields = ("epoch", "steps", "rate", "history", "ended")
            state = {field: getattr(event, field) for field in fields}
            self._pipe.send(Message("event", (name, state)))
        while (wish := self._pipe.recv()) != "continue":
            if wish == "stop":
                event.stop()
                continue
            answer = event.loss() if wish == "loss" else _pack_model(event.model())
            if self._leads:
                self._pipe.send(answer)


class _StepRelay(_Relay):
    """Tells the parent of steps, too."""

    def step(self, event: TrainingEvent) -> None:
        self._relay("step", event)


def _train_part(
    mesh: Mesh, pipe: Connection, random: Any, configured: Any, callbacks: Any, **options: Any
) -> bytes | None:
    """Train in one of the processes; return what the first one has to give back."""
    from anydevice._train.train import train  # it calls this module

    settings.change(configured, insist=False)
    randomness.set_random_state(random, *mesh.devices)
    if mesh.rank:
        warnings.simplefilter("ignore")  # the first process gives the same ones
    else:
        pipe.send(Message("begins", os.getpid()))
    # A scheduler of PyTorch has wrapped the optimizer that was sent, not the one that came.
    warnings.filterwarnings("ignore", r"Seems like `optimizer\.step\(\)` has been overridden")
    relay = () if callbacks is None else callbacks(mesh, pipe)
    trained = train(**{**options, "devices": mesh, "callbacks": relay})
    if mesh.rank:
        return None
    library = part("torch", "mesh")
    states = {}
    for name in ("optimizer", "schedule"):
        groups = getattr(options["optimizer"], "param_groups", ())
        is_sharded = any(library.is_cut(x) for group in groups for x in group["params"])
        if hasattr(options[name], "load_state_dict") and not is_sharded:
            states[name] = options[name].state_dict()
    generators = randomness.host_state(options["data"]), randomness.random_state(*mesh.devices)[1]
    return library.pack((replace(trained, model=_pack_model(trained.model)), states, generators))


def _pack_model(model: Any) -> bytes:
    own = model.parameters if isinstance(model, Model) else layer_of(model).parameters
    return part("torch", "mesh").pack(own)
