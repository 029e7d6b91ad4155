"""Checking a device: a small computation in a child process, and its verdict."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

from anydevice.core import hooks
from anydevice.core.device import Device
from anydevice.core.engine import Absent
from anydevice.core.finding import Verdict
from anydevice.discovery import _discover as discovery
from anydevice.discovery.verdicts import keep_verdict, key_of
from anydevice.engines.lookup import place_of
from anydevice.errors import DeviceNotFoundError
from anydevice.hardware.driver_process.parent import Outcome
from anydevice.hardware.driver_process.parent import ask as ask_child
from anydevice.rendering.diagnosis import cause_of

_LONG_ENOUGH = 60.0
_TRIAL = str(Path(__file__).with_name("trial"))


def check(device: Device, engine: str | None = None, limit: float = 120.0) -> Verdict:
    """Run the trial on `device` through `engine` and keep the verdict.

    Raises `DeviceNotFoundError` where there is no such device or no library that could drive it,
    and `UnsupportedError` where this engine cannot.
    """
    standing = device.standing
    if standing is None or standing.stage not in (None, "compute"):
        raise DeviceNotFoundError(
            f"{device} cannot be checked: {device.why_not}", tuple(discovery.discover())
        )
    candidates = engines_to_check(device)
    chosen = engine or device.engine or candidates[0]
    if chosen not in candidates:
        reasons = [f": {r.reason}" for r in standing.refusals if r.engine == chosen]
        what = f"{chosen} does not drive {device}{''.join(reasons[:1])}"
        raise Absent(what, instead=f"check it with {' or '.join(candidates)}").error()
    place = str(place_of(device.served_by(chosen)))
    began = time.perf_counter()
    outcome = ask_child(
        _TRIAL,
        {"path": _search_path(), "engine": chosen, "device": place},
        limit=limit,
        environment=_environment(),
        site=True,
    )
    verdict = _judge(device, chosen, place, outcome, time.perf_counter() - began)
    if _worth_keeping(verdict, limit) and place == str(device):  # what is elsewhere is a fake
        problem = keep_verdict(
            key_of(device.backend, device.index, standing.facts, chosen), verdict
        )
        if problem:
            warnings.warn(problem, stacklevel=3)
        discovery.forget_report()
    return verdict


def engines_to_check(device: Device) -> tuple[str, ...]:
    """The engines that could drive a device, those with a bad verdict included."""
    standing = device.standing
    if standing is None:
        return ()
    condemned = tuple(v.engine for v in standing.verdicts if not v.right)
    return tuple(dict.fromkeys((*standing.engines, *condemned)))


def _search_path() -> list[str]:
    return [entry or os.getcwd() for entry in sys.path]


def _environment() -> dict[str, str]:
    # Three quarters of a card for one small product would disturb whoever else is on it.
    return {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def _judge(device: Device, engine: str, place: str, outcome: Outcome, seconds: float) -> Verdict:
    if outcome.how != "answered":
        return Verdict(str(device), engine, False, outcome.sentence, round(seconds, 3))
    answer = outcome.answer
    reason = None
    if answer["largest_error"] != 0:
        reason = f"wrong answer: off by {answer['largest_error']:g}"
    elif place not in answer["where"]:
        reason = f"it computed on {', '.join(answer['where']) or 'no known device'} instead"
    return Verdict(
        device=str(device),
        engine=engine,
        right=reason is None,
        reason=reason,
        seconds=round(seconds, 3),
        first_call=round(answer["first_call"], 6),
        second_call=round(answer["second_call"], 6),
    )


def _worth_keeping(verdict: Verdict, limit: float) -> bool:
    # A card that is full at this moment, or was given no time, is not one that computes wrongly.
    reason = verdict.reason or ""
    if reason.startswith("timed out") and limit < _LONG_ENOUGH:
        return False
    full = cause_of(reason, "compute").name == "out of memory"
    return not full and not reason.startswith("not started")


hooks.check.register(check)
