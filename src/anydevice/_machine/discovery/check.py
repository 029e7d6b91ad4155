"""Checking a device by a small computation in a child process, and the verdicts of past checks."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from anydevice._core import hooks
from anydevice._core.child.parent import Outcome
from anydevice._core.child.parent import ask as ask_child
from anydevice._core.device import Device
from anydevice._core.engine import Absent
from anydevice._core.finding import Facts, Reason, Verdict
from anydevice._core.record import as_dict
from anydevice._core.text import warn
from anydevice._machine.discovery import discover as discovery
from anydevice._machine.engines import registry
from anydevice._machine.engines.diagnosis import code_of_message, command_for
from anydevice._machine.engines.registry import place_of
from anydevice._machine.settings.files import read_cache, verdicts_file, write_cache
from anydevice.errors import DeviceNotFoundError

_LONG_ENOUGH = 60.0
_TO_INSTALL_AGAIN = ("cpu_only_build", "cuda_library_missing", "card_not_in_build")
"""Codes for which the library is to be installed again, in the build for this device."""

_PROBE = str(Path(__file__).with_name("matmul_probe"))


def check(device: Device, engine: str | None = None, limit: float = 120.0) -> Verdict:
    """Multiply two matrices on `device` through `engine`, and keep the verdict."""
    status = device.status
    if status is None or status.stage not in (None, "compute"):
        raise DeviceNotFoundError(
            f"{device} cannot be checked: {device.why_not}",
            tuple(discovery.discover()),
            status.reasons if status else (),
        )
    candidates = engines_to_check(device)
    chosen = engine or device.engine or candidates[0]
    if chosen not in candidates:
        refused = next((r.reason for r in status.refusals if r.engine == chosen), None)
        what = f"{chosen} does not drive {device}{f': {refused}' if refused else ''}"
        instead = f"check it with {' or '.join(candidates)}"
        raise Absent(what, instead, refused.code if refused else "not_driven").error()
    place = str(place_of(device.served_by(chosen)))
    began = time.perf_counter()
    path = [entry or os.getcwd() for entry in sys.path]
    question = {"path": path, "engine": chosen, "device": place}
    # By default JAX takes three quarters of a card, which would disturb its other users.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    outcome = ask_child(_PROBE, question, limit=limit, environment=environment, site=True)
    verdict = _judge(device, chosen, place, outcome, time.perf_counter() - began)
    if _is_conclusive(verdict, limit) and place == str(device):  # a fake device is elsewhere
        key = key_of(device.backend, device.index, status.facts, chosen)
        problem = keep_verdict(key, verdict)
        if problem:
            warn(problem)
        discovery.forget_report()
    return verdict


def engines_to_check(device: Device) -> tuple[str, ...]:
    """Return the engines that could drive a device, those with a bad verdict included."""
    status = device.status
    if status is None:
        return ()
    condemned = tuple(v.engine for v in status.verdicts if not v.right)
    return tuple(dict.fromkeys((*status.engines, *condemned)))


def _judge(device: Device, engine: str, place: str, outcome: Outcome, seconds: float) -> Verdict:
    if outcome.how != "answered":
        code: str = outcome.how
        named = code_of_message(outcome.error or "")
        # A library may end the process itself when memory runs out.
        if code == "failed" or (code == "crashed" and named == "out_of_memory"):
            code = named
        build, status = registry.installed(engine), device.status
        again = command_for(build, device.backend, status.facts) if status else None
        reason = Reason(code, outcome.sentence, again if code in _TO_INSTALL_AGAIN else None)
        return Verdict(str(device), engine, False, reason, round(seconds, 3))
    answer = outcome.answer
    wrong = None
    if answer["largest_error"] != 0:
        wrong = Reason("wrong_answer", f"wrong answer: off by {answer['largest_error']:g}")
    elif place not in answer["where"]:
        where = ", ".join(answer["where"]) or "no known device"
        wrong = Reason("computed_elsewhere", f"it computed on {where} instead")
    return Verdict(
        device=str(device),
        engine=engine,
        right=wrong is None,
        reason=wrong,
        seconds=round(seconds, 3),
        first_call=round(answer["first_call"], 6),
        second_call=round(answer["second_call"], 6),
    )


def _is_conclusive(verdict: Verdict, limit: float) -> bool:
    """Whether the device itself is judged, and not a full card or a short time limit."""
    code = verdict.reason.code if verdict.reason else None
    if code == "timed_out":
        return limit >= _LONG_ENOUGH
    return code not in ("out_of_memory", "not_started")


def key_of(backend: str, index: int, facts: Facts, engine: str) -> str:
    """Return the key of a verdict; a change of driver, version or folder makes it another."""
    card = facts.uuid or facts.pci_address or f"{facts.name} {index}"
    build = registry.installed(engine)
    library = f"{engine} {build.version} in {build.folder}"
    return " | ".join((backend, card, facts.driver_version or "-", library))


def read_verdicts() -> dict[str, Verdict]:
    """Return every verdict that is kept and can be read; none if the file is missing or damaged."""
    verdicts = {key: _verdict(value) for key, value in read_cache(verdicts_file()).items()}
    return {key: verdict for key, verdict in verdicts.items() if verdict is not None}


def _verdict(plain: Any) -> Verdict | None:
    """The verdict; `None` for one of another version, or a damaged one."""
    try:
        reason = Reason(**plain["reason"]) if plain["reason"] else None
        verdict = Verdict(**{**plain, "reason": reason})
    except (TypeError, KeyError):
        return None
    texts = (verdict.device, verdict.engine, *(as_dict(reason).values() if reason else ()))
    times = (verdict.seconds, verdict.first_call, verdict.second_call)
    fits = (
        isinstance(verdict.right, bool)
        and verdict.seconds is not None
        and all(isinstance(text, str | None) for text in texts)
        and all(isinstance(seconds, int | float | None) for seconds in times)
    )
    return verdict if fits else None


def keep_verdict(key: str, verdict: Verdict) -> str | None:
    """Save a verdict; returns a sentence if that fails, else `None`."""

    def merged() -> object:
        verdicts = read_verdicts() | {key: verdict}
        reasons = {name: one.reason and one.reason.to_dict() for name, one in verdicts.items()}
        return {name: {**as_dict(v), "reason": reasons[name]} for name, v in verdicts.items()}

    return write_cache(verdicts_file(), "the verdict", merged)


hooks.check.register(check)
