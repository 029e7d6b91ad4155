"""The choice of a device: a pure function that records every step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from anydevice._core import hooks
from anydevice._core.backends import AUTO, BACKENDS
from anydevice._core.device import Device, cards_of, parse_kind
from anydevice._core.finding import DeviceStatus, Finding, Reason
from anydevice._core.record import Record, replace
from anydevice._core.text import format_size, format_time, joined

FreeMemory = Callable[[Device], int | None]

MEASUREMENTS = "saved measurements"
"""The source of the step that decides between the engines of a device."""


class Wish(Record):
    """Device names from one source, first choice first.

    If a `binding` wish cannot be met, that is an error; any other is passed over. The name "auto"
    ends the list: the order of backends decides.
    """

    source: str
    names: tuple[str, ...]
    binding: bool = False
    detail: str = ""

    def __str__(self) -> str:
        return ", ".join(self.names)


class Measured(Record):
    """How long each engine took on a device for the same `count` calls of ops, fastest first."""

    device: str
    totals: tuple[tuple[str, float], ...]
    count: int

    @property
    def engine(self) -> str:
        return self.totals[0][0]

    def __str__(self) -> str:
        first, *others = [format_time(seconds) for _, seconds in self.totals]
        names = [engine for engine, _ in self.totals[1:]]
        rest = "".join(f", {name} {time}" for name, time in zip(names, others, strict=True))
        calls = f"{self.count} call{'' if self.count == 1 else 's'}"
        return f"{self.engine} was the fastest of those measured here: {calls} in {first}{rest}"


class Request(Record):
    """The input of a choice, besides the findings.

    An engine that is not `engine_binding` is given up if it drives no usable device. An
    `engine_picked` one came with a device and was not requested. `measured` has the results of
    `anydevice bench --save`, which decide between engines if none is requested.
    """

    wishes: tuple[Wish, ...] = ()
    engine: str | None = None
    engine_source: str | None = None
    engine_binding: bool = True
    engine_picked: bool = False
    min_free: int = 0
    order: tuple[str, ...] = ()
    local_rank: int | None = None
    loaded: frozenset[str] = frozenset()
    measured: tuple[Measured, ...] = ()


class Step(Record):
    """One step of a choice: its source, its wish and the result; `ignored` ones need no warning."""

    source: str
    asked: str
    outcome: str
    taken: bool = False
    ignored: bool = False
    reasons: tuple[Reason, ...] = ()

    def to_dict(self) -> dict[str, object]:
        return {
            "source": self.source,
            "asked": self.asked,
            "outcome": self.outcome,
            "code": self.reasons[0].code if self.reasons else None,
            "taken": self.taken,
        }


class Choice(Record):
    """The device and the steps; the device is `None` if a binding wish could not be met."""

    device: Device | None
    steps: tuple[Step, ...]

    @property
    def passed_over(self) -> tuple[Step, ...]:
        """The steps whose wish was not met."""
        return tuple(step for step in self.steps if not step.taken and not step.ignored)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        return tuple(reason for step in self.passed_over for reason in step.reasons)


def choose(request: Request, findings: Sequence[Finding], free_memory: FreeMemory) -> Choice:
    """Choose a device from findings alone; `free_memory` is called only if it decides."""
    choice = _Case(request, findings, free_memory).follow()
    if choice.device or request.engine is None or request.engine_binding:
        return choice
    without = _Case(replace(request, engine=None), findings, free_memory).follow()
    if without.device is None:
        return choice
    outcome = "; ".join(step.outcome for step in choice.passed_over)
    source = request.engine_source or "engine"
    given_up = Step(source, request.engine, outcome, reasons=choice.reasons)
    return Choice(without.device, (given_up, *without.steps))


class _Case:
    """One choice on its way: its input, and the steps so far."""

    def __init__(
        self, request: Request, findings: Sequence[Finding], free_memory: FreeMemory
    ) -> None:
        self.request, self.findings, self.free_memory = request, findings, free_memory
        self.steps: list[Step] = []

    def follow(self) -> Choice:
        """Follow the wishes, then the order of backends."""
        for wish in self.request.wishes:
            reasons: list[Reason] = []
            for name in wish.names:
                if name == AUTO:
                    texts = (
                        *(reason.with_fix for reason in reasons),
                        "left to the order of backends",
                    )
                    self.steps.append(
                        Step(wish.source, str(wish), "; ".join(texts), False, True, tuple(reasons))
                    )
                    return self._follow_order()
                named = find_devices(name, self.findings, self.request.order)
                picked, why = self._pick(named, name)
                if picked:
                    return self._take(picked, wish.source, str(wish))
                reasons += why
            self.steps.append(_not_taken(wish.source, str(wish), reasons))
            if wish.binding:
                return Choice(None, tuple(self.steps))
        return self._follow_order()

    def _follow_order(self) -> Choice:
        order, engine = self.request.order, self.request.engine
        findings = {finding.backend: finding for finding in self.findings}
        names = dict.fromkeys((*order, *findings))
        if "cpu" not in order:  # a backend that a probe added goes before the CPU
            names["cpu"] = names.pop("cpu", None)
        for name in names:
            finding = findings.get(name)
            if finding is None or not finding.present:
                continue
            is_requested = name in order or name == engine == "opencl"
            held_back = None if is_requested else _hold_back(finding, self.findings)
            if held_back:
                self.steps.append(held_back)
                continue
            source = "configure" if name in order else "order of backends"
            candidates = (d for d in finding.devices if is_requested or not _is_cpu_twice(d))
            picked, why = self._pick(candidates, name)
            if picked:
                return self._take(picked, source, name)
            self.steps.append(_not_taken(source, name, why))
        return Choice(None, tuple(self.steps))

    def _pick(self, candidates: Iterable[Device], name: str) -> tuple[Device | None, list[Reason]]:
        fit: list[Device] = []
        reasons: list[Reason] = []
        for device in _of_this_rank(list(candidates), self.request.local_rank):
            why = _why_unfit(device, self.request, self.free_memory)
            if why is None:
                fit.append(device)
            else:
                reasons.append(replace(why, text=f"{device}: {why.text}"))
        if not fit:
            return None, reasons or _nothing_named(name, self.findings)
        return _best(fit, self.free_memory), []

    def _take(self, device: Device, source: str, wanted: str) -> Choice:
        """Choose a device; past measurements decide on its engine, if none is requested."""
        request, status = self.request, device.status
        assert status is not None
        measured = next(
            (m for m in request.measured if m.device == str(device) and m.engine in status.engines),
            None,
        )
        if measured is not None and request.engine is None:
            self.steps.append(Step(MEASUREMENTS, str(device), str(measured), taken=True))
        elif measured is not None:
            by = f" by {request.engine_source}" if request.engine_source else ""
            outcome = f"{measured}; {request.engine} is asked for{by}"
            self.steps.append(Step(MEASUREMENTS, str(device), outcome, ignored=True))
        self.steps.append(Step(source, wanted, f"{device} is usable", taken=True))
        engine = request.engine or pick_engine(
            device, status.engines, request.loaded, measured.engine if measured else None
        )
        picked = request.engine_picked or request.engine is None
        return Choice(device.served_by(engine, source, picked=picked), tuple(self.steps))


def recommend(findings: Sequence[Finding]) -> str:
    """Return the backend that the order of backends gives, with the free memory of the report."""

    def as_reported(device: Device) -> int | None:
        return device.status.facts.free_memory if device.status else None

    chosen = choose(Request(), findings, as_reported).device
    return chosen.backend if chosen else "cpu"


def _not_taken(source: str, wanted: str, reasons: Sequence[Reason]) -> Step:
    outcome = "; ".join(reason.with_fix for reason in reasons)
    return Step(source, wanted, outcome, reasons=tuple(reasons))


def _hold_back(finding: Finding, findings: Sequence[Finding]) -> Step | None:
    """Return the step of a backend that is chosen only by name."""
    if finding.backend != "opencl" or not finding.usable:
        return None
    cards = [d for d in finding.devices if d.usable and not _is_cpu_twice(d)]
    if not cards:
        text = "an OpenCL device that is the CPU is only chosen by name"
        reasons = (Reason("only_by_name", text),)
        return Step("order of backends", "opencl", text, ignored=True, reasons=reasons)
    others = (d for other in findings if other.backend != "opencl" for d in other.devices)
    engines = {name for d in others if d.usable and d.status for name in d.status.engines}
    if not engines - {"numpy"}:
        return None
    verb, them, one = ("was", "it", "it") if len(cards) == 1 else ("were", "them", "one")
    text = f"{joined(map(str, cards))} {verb} passed over: no installed library but opencl drives "
    reason = Reason("only_by_name", f"{text}{them}; ask for {one} by name")
    return _not_taken("order of backends", "opencl", [reason])


def _is_cpu_twice(device: Device) -> bool:
    """Whether the device is the machine's CPU, seen through a driver such as PoCL."""
    return device.kind == "cpu" and device.backend != "cpu"


def find_devices(
    name: str, findings: Sequence[Finding], order: Sequence[str] = ()
) -> tuple[Device, ...]:
    """Return the devices that a wish names; "gpu:1" is the second card, through every backend."""
    every = tuple(device for finding in findings for device in finding.devices)
    # Not parse_place(), which reads the machine: the wish was checked when it was made.
    kind, card = parse_kind(name)
    if kind is not None:
        rank = {backend: place for place, backend in enumerate(order)}
        kin = (d for d in every if d.kind == kind and not _is_cpu_twice(d))
        ranked = sorted(kin, key=lambda device: rank.get(device.backend, len(rank)))
        cards = (*cards_of(ranked), ())
        return tuple(ranked) if card is None else cards[min(card, len(cards) - 1)]
    backend, _, index = name.partition(":")
    return tuple(
        device
        for device in every
        if device.backend == backend and (not index or device.index == int(index))
    )


def _of_this_rank(candidates: list[Device], local_rank: int | None) -> list[Device]:
    """Return the local rank's own card, whatever is free: no two processes may share one."""
    cards = [device for device in candidates if device.usable and device.kind != "cpu"]
    cards = [device for device in cards if device.backend == cards[0].backend]
    if local_rank is None or len(cards) < 2:
        return candidates
    return [cards[local_rank % len(cards)]]


def _nothing_named(name: str, findings: Sequence[Finding]) -> list[Reason]:
    """Return why no device has that name: the backend stopped early, or is not in this machine."""
    kind, _ = parse_kind(name)
    if kind is not None:
        concerned = [
            f for f in findings if f.backend in BACKENDS and BACKENDS[f.backend].kind == kind
        ]
    else:
        concerned = [f for f in findings if f.backend == name.partition(":")[0]]
    stopped = [_stop_reason(f) for f in concerned if f.present and not f.devices]
    if stopped:
        return stopped
    absent = [f for f in concerned if f.reason and not f.present]
    if len(concerned) == 1 and absent:
        code = absent[0].code or "no_hardware"
        return [Reason(code, f"this machine has no {name}: {absent[0].reason}")]
    return [Reason("no_such_device", f"this machine has no {name}")]


def accelerators_passed_over(findings: Sequence[Finding], engine: str | None = None) -> list[str]:
    """Return why each accelerator was not chosen; with `engine`, why its library cannot use it."""
    here = [finding for finding in findings if finding.present and finding.backend != "cpu"]
    statuses = ((d, d.status) for finding in here for d in finding.devices if d.kind != "cpu")
    refused = {
        device: f"{device}: {_add_advice(_refusal_of(status, engine), status)}"
        for device, status in statuses
        if engine and status and engine not in status.engines
        if status.usable or _refuses(status, engine)
    }
    backends = {device.backend for device in refused}
    stopped = [
        _add_advice(_stop_reason(f), f) for f in here if not f.usable and f.backend not in backends
    ]
    held_back = [] if engine else [_hold_back(finding, findings) for finding in here]
    outcomes = [s.outcome for s in held_back if s and not s.ignored]
    return [*stopped, *refused.values(), *outcomes]


def _add_advice(reason: Reason, stopped: DeviceStatus | Finding) -> str:
    """Return a reason with the fix that `anydevice doctor` gives for an unusable device."""
    if stopped.usable:
        return reason.with_fix
    advice = hooks.render(replace(stopped, reasons=(reason,)), "advice")
    return replace(reason, fix=advice).with_fix


def _stop_reason(finding: Finding) -> Reason:
    text = f"{finding.backend} stopped at {finding.stage}: {finding.reason}"
    return Reason(finding.code or "driver_failed", text, finding.fix)


def _why_unfit(device: Device, request: Request, free_memory: FreeMemory) -> Reason | None:
    status = device.status
    if status is None:
        return Reason("no_such_device", f"this machine has no {device}")
    if not status.usable and not _refuses(status, request.engine):
        return Reason(status.code or "card_unsupported", status.reason or "", status.fix)
    if request.engine and request.engine not in status.engines:
        asked_by = f" (asked for by {request.engine_source})" if request.engine_source else ""
        refused = _refusal_of(status, request.engine)
        return replace(refused, text=f"{refused.text}{asked_by}")
    if request.min_free:
        free, total = free_memory(device), status.facts.total_memory
        most = status.facts.obtainable_memory if free is None else free
        if most is not None and most < request.min_free:
            text = (
                f"{format_size(free)} free of {format_size(total)}, "
                f"{format_size(request.min_free)} needed"
            )
            return Reason("too_little_memory", text)
    return None


def _refuses(status: DeviceStatus, engine: str | None) -> bool:
    """Whether this engine's library is the reason why it cannot drive the device."""
    return any(refused.engine == engine for refused in status.refusals)


def _refusal_of(status: DeviceStatus, engine: str) -> Reason:
    refused = (refusal.reason for refusal in status.refusals if refusal.engine == engine)
    return next(refused, Reason("not_driven", f"{engine} does not drive it"))


def _best(fit: list[Device], free_memory: FreeMemory) -> Device:
    """Return the device with the most free memory of the first backend; integrated ones last."""
    same = [device for device in fit if device.backend == fit[0].backend]
    same = [device for device in same if not _is_cpu_twice(device)] or same
    if len(same) == 1 or same[0].kind == "cpu":
        return same[0]
    same = [d for d in same if d.status and d.status.facts.memory_kind == "dedicated"] or same
    free = {device: free_memory(device) or 0 for device in same}
    most = max(free.values())
    # A desktop's few windows must not decide between two otherwise idle cards.
    return next(device for device in same if free[device] >= 0.98 * most)


def pick_engine(
    device: Device, engines: Sequence[str], loaded: Collection[str], measured: str | None = None
) -> str | None:
    """Return the engine for a device: the fastest measured, an imported or an installed one."""
    if measured in engines:
        return measured
    if device.backend == "cpu" and "numpy" in engines:
        return "numpy"
    imported = [engine for engine in engines if engine in loaded]
    return next(iter([*imported, *engines]), None)
