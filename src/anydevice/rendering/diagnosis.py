"""What lies behind a reason, in plain words, and what to do: the knowledge of `anydevice doctor`.

Pure data and functions: they read a report, verdicts and an environment, and ask nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from anydevice.core.device import Device
from anydevice.core.finding import Finding, Stage, Standing, Verdict
from anydevice.core.record import Record
from anydevice.core.text import format_size
from anydevice.hardware.readers import DeviceProcess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anydevice.discovery.report import Report


class Cause(Record):
    """One cause that a device is not usable for: how reasons show it, and what helps."""

    name: str
    signs: str
    meaning: str
    advice: str


class Explanation(Record):
    """What is the matter with `subject`: the cause, what was seen, what it means, what to do."""

    subject: str
    cause: str
    evidence: tuple[str, ...]
    meaning: str
    advice: str

    def to_dict(self) -> dict[str, object]:
        """The same as plain data, ready for JSON."""
        return {
            "subject": self.subject,
            "cause": self.cause,
            "evidence": list(self.evidence),
            "meaning": self.meaning,
            "advice": self.advice,
        }


CAUSES = (
    Cause(
        "out of memory",
        r"out of memory|OUT_OF_MEMORY|MemoryError|RESOURCE_EXHAUSTED|no memory left"
        r"|ALLOC_FAILED|ALLOCATION_FAILURE",
        "The device has no memory left: another process, or another library in this one, holds it.",
        "end what holds it (anydevice watch lists the processes), or ask for less",
    ),
    Cause(
        "hidden by a variable",
        r"VISIBLE_(DEVICES|CHIPS)|ROCR_VISIBLE|hides every",
        "An environment variable hides the device from every library.",
        "unset the variable, or put the device's index or UUID into it",
    ),
    Cause(
        "version mismatch",
        r"version mismatch|needs (CUDA|ROCm) [\d.]+, but|does not fit jaxlib"
        r"|older than the CUDA in use|forward-compatibility|CUDA 12 or newer is needed"
        r"|CUDA driver version is insufficient|is too old",
        "Two parts that must fit each other are of different versions: the kernel's driver, the "
        "driver's libraries, the CUDA or ROCm that a library was made for, or a plugin.",
        "bring both to versions that fit; after an update of a driver, reboot",
    ),
    Cause(
        "library built without this backend",
        r"CPU-only build|has no \w+ plugin|is a build for .+, not for|libtpu is not installed"
        r"|has no Metal|not compiled with CUDA",
        "The library is installed, but this build of it cannot drive the device.",
        "install the build for this backend in place of it",
    ),
    Cause(
        "CUDA missing",
        r"lib(cuda|cudart|cublas|cublasLt|cudnn|cusparse|cufft|nvrtc|nvJitLink)[\w.-]*"
        r"(: cannot open|.* not found)|CUDA driver library is installed"
        r"|CUDA driver cannot be loaded|Unable to (load|find) (CUDA|cuDNN|cuBLAS)"
        r"|(cudart|cublas|nvrtc)64_\d+\.dll",
        "A library of CUDA itself cannot be found.",
        "install the array library with its CUDA parts, such as: pip install anydevice[cuda]",
    ),
    Cause(
        "card not in the build",
        r"was built for (sm|gfx)|needs compute capability|no kernel image|compute capability [\d.]+"
        r" is older",
        "The card's generation is not among those that the library was compiled for.",
        "install a release of the library that still, or already, carries this card",
    ),
    Cause(
        "damaged installation",
        r"is damaged|is installed without|overwrite each other|importing it failed",
        "The library's files are incomplete, or two packages wrote over each other.",
        "uninstall the library and everything beside it of the same name, then install it again",
    ),
    Cause(
        "no library",
        r"no array library|(?<!jaxlib) is not installed$",
        "The driver and the device are fine; no installed Python library can drive them.",
        "install one",
    ),
    Cause(
        "no permission",
        r"may not (open|use)|no permission|blocked the request|Permission denied",
        "This user, or this container, may not open the device's files.",
        "join the group that owns them (video, render) and log in again, or start the container "
        "with the device",
    ),
    Cause(
        "the driver crashes",
        r"\bcrashed\b",
        "Asking it took the child process down. Your program would have gone down with it.",
        "reinstall it, or update the driver and the library; then run: anydevice doctor",
    ),
    Cause(
        "no answer in time",
        r"timed out|no answer within|did not answer",
        "It did not answer within the time limit. A card that is starting, asleep or hung does so.",
        "try again; with more time: anydevice doctor --limit 600; if that does not help, reboot",
    ),
    Cause(
        "wrong answer",
        r"wrong answer",
        "The device computed something else than the processor does. Nothing computed on it can "
        "be trusted.",
        "update the driver and the library; if it stays, test the card's memory",
    ),
)
"""Looked through in this order: the first whose signs are in a reason is its cause."""

_BY_STAGE: dict[Stage, Cause] = {
    "driver": Cause(
        "no driver",
        "",
        "The hardware is here, but its driver is missing or does not work.",
        "install or repair the driver, reboot, then run: anydevice doctor",
    ),
    "device": Cause(
        "the device cannot be used",
        "",
        "The driver works, but this device does not meet what is needed.",
        "see what the backend requires: anydevice backends",
    ),
    "library": Cause(
        "no library",
        "",
        "The driver and the device are fine; no installed Python library can drive them.",
        "install one",
    ),
    "compute": Cause(
        "the computation failed",
        "",
        "The library is there and fits, but a small computation on the device failed.",
        "update the driver and the library; then run: anydevice doctor",
    ),
}

_MUCH_SLOWER, _NOTICEABLE = 10.0, 0.05
_LITTLE_FREE = 0.25
_TAKEN_BY_JAX = (0.72, 0.78)


def explain(report: Report) -> tuple[Explanation, ...]:
    """An explanation for everything that is here and not usable, cause by cause."""
    return tuple(
        explanation
        for finding in report
        if finding.present
        for subject, stopped in _stopped(finding)
        for explanation in _explain(subject, stopped)
    )


def explain_verdict(verdict: Verdict) -> Explanation | None:
    """Why a check failed; `None` where its answer was right."""
    if verdict.right:
        return None
    reason = verdict.reason or "it gave no reason"
    cause = cause_of(reason, "compute")
    subject = f"{verdict.device} with {verdict.engine}"
    return Explanation(subject, cause.name, (reason,), cause.meaning, cause.advice)


def cause_of(reason: str, stage: Stage) -> Cause:
    """The cause behind a reason.

    >>> cause_of("torch 2.13.0+cpu is a CPU-only build", "library").name
    'library built without this backend'
    """
    found = next((cause for cause in CAUSES if re.search(cause.signs, reason)), None)
    return found or _BY_STAGE[stage]


def worth_knowing(
    report: Report,
    verdicts: Iterable[Verdict],
    environment: Mapping[str, str],
    holders: Mapping[Device, Sequence[DeviceProcess]] | None = None,
) -> tuple[Explanation, ...]:
    """What is no fault and surprises all the same: memory that is held, slow first calls.

    `holders` are the processes that use a device, of those that have little memory free.
    """
    return (
        *_preallocation(report, environment),
        *_held_memory(report, holders or {}),
        *_slow_first_calls(verdicts),
    )


def _stopped(finding: Finding) -> Iterator[tuple[str, Standing | Finding]]:
    """Everything of a backend that is not usable; devices with one and the same trouble as one."""
    if not finding.devices:
        yield finding.backend, finding
    groups: dict[tuple[object, ...], tuple[list[str], Standing]] = {}
    for device in finding.devices:
        standing = device.standing
        if standing is not None and not standing.usable:
            key = (standing.stage, standing.reasons, standing.mend)
            groups.setdefault(key, ([], standing))[0].append(str(device))
    for names, standing in groups.values():
        yield ", ".join(names), standing


def _explain(subject: str, stopped: Standing | Finding) -> Iterator[Explanation]:
    stage = stopped.stage or "device"
    evidence: dict[Cause, list[str]] = {}
    for reason in stopped.reasons:
        evidence.setdefault(cause_of(reason, stage), []).append(reason)
    if not evidence:
        evidence[_BY_STAGE[stage]] = []
    advice = stopped.mend if stage != "compute" else None  # that one leads here
    for cause, reasons in evidence.items():
        yield Explanation(
            subject, cause.name, tuple(reasons), cause.meaning, advice or cause.advice
        )


def _preallocation(report: Report, environment: Mapping[str, str]) -> Iterator[Explanation]:
    """JAX takes most of a card when it starts, which looks like a leak to everyone else."""
    cards = [
        str(device)
        for device in report.devices
        if device.backend in ("cuda", "rocm")
        and device.standing is not None
        and "jax" in device.standing.engines
    ]
    switch = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower()
    on_demand = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform"
    if not cards or switch in ("false", "0") or on_demand:
        return
    share = environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    yield Explanation(
        ", ".join(cards),
        "memory held by preallocation",
        (),
        f"JAX takes {_percent(share)} of a card's memory when it starts, whether it needs it or "
        "not; another library or process then finds the card full.",
        "export XLA_PYTHON_CLIENT_PREALLOCATE=false, or a smaller share: "
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.4",
    )


def _percent(share: str) -> str:
    try:
        return f"{float(share):.0%}".replace("%", " %")
    except ValueError:
        return "75 %"


def has_little_free(device: Device) -> bool:
    """Whether most of an accelerator's memory is taken, as far as that is known."""
    facts = device.standing.facts if device.standing else None
    if facts is None or device.kind == "cpu" or not facts.total_memory:
        return False
    return facts.free_memory is not None and facts.free_memory < _LITTLE_FREE * facts.total_memory


def _held_memory(
    report: Report, holders: Mapping[Device, Sequence[DeviceProcess]]
) -> Iterator[Explanation]:
    for device in filter(has_little_free, report.devices):
        assert device.standing is not None
        facts = device.standing.facts
        amounts = f"{format_size(facts.free_memory)} free of {format_size(facts.total_memory)}"
        known = [process for process in holders.get(device, ()) if process.memory]
        yield Explanation(
            str(device),
            "little memory free",
            (amounts, *(_holding(process, facts.total_memory or 0) for process in known)),
            "Other processes hold the rest; a JAX process alone takes 75 % unless told not to.",
            "see who holds it, and whether they compute: anydevice watch; or choose with "
            'device(min_free="8GiB")',
        )


def _holding(process: DeviceProcess, total: int) -> str:
    size = process.memory or 0
    words = f"{process.name} (pid {process.pid}) holds {format_size(size)}"
    low, high = _TAKEN_BY_JAX
    return (
        f"{words}, about what JAX takes at its start"
        if low * total < size < high * total
        else words
    )


def _slow_first_calls(verdicts: Iterable[Verdict]) -> Iterator[Explanation]:
    slow: dict[str, str] = {}
    for verdict in verdicts:
        first, second = verdict.first_call, verdict.second_call
        if not verdict.right or first is None or second is None:
            continue
        if first - second >= _NOTICEABLE and first >= _MUCH_SLOWER * second:
            who = f"{verdict.device} with {verdict.engine}"
            times = f"{seconds_in_words(first)}, the second {seconds_in_words(second)}"
            slow[who] = f"{who}: the first call took {times}"
    if slow:
        yield Explanation(
            ", ".join(slow),
            "slow first iteration",
            tuple(slow.values()),
            "A first call starts the device and compiles for it; later ones reuse that.",
            "warm up: run one batch of the real shapes before the loop, and measure only after it",
        )


def seconds_in_words(seconds: float) -> str:
    """A time with the precision that a person reads.

    >>> seconds_in_words(0.0004), seconds_in_words(0.25), seconds_in_words(3.14)
    ('0.4 ms', '250 ms', '3.1 s')
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    milliseconds = seconds * 1000
    return f"{milliseconds:.1f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
