"""What lies behind the code of a reason, in plain words, and what to do: for `anydevice doctor`.

Pure data and functions: they read a report, verdicts and an environment, and ask nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from anydevice.core.device import Device
from anydevice.core.finding import Finding, Reason, Stage, Standing, Verdict
from anydevice.core.record import Record
from anydevice.core.text import format_size, format_time, percent
from anydevice.hardware.readers import DeviceProcess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anydevice.discovery.report import Report


class Cause(Record):
    """One cause: its name for people, what it means, and what to do where no fix is known."""

    name: str
    meaning: str
    advice: str


class Explanation(Record):
    """What is the matter with `subjects`: the cause, what was seen, what it means, what to do."""

    subjects: tuple[str, ...]
    code: str
    cause: str
    evidence: tuple[str, ...]
    meaning: str
    advice: str

    @property
    def subject(self) -> str:
        return ", ".join(self.subjects)

    def to_dict(self) -> dict[str, object]:
        """The same as plain data, ready for JSON."""
        return {
            "subject": self.subject,
            "code": self.code,
            "cause": self.cause,
            "evidence": list(self.evidence),
            "meaning": self.meaning,
            "advice": self.advice,
        }


CAUSES: dict[str, Cause] = {
    "no_hardware": Cause(
        "not in this machine",
        "This machine has no such hardware.",
        "nothing: choose another device",
    ),
    "wrong_system": Cause(
        "another operating system is needed",
        "This backend does not exist on this operating system.",
        "nothing: choose another device",
    ),
    "system_too_old": Cause(
        "operating system too old",
        "The operating system is older than every library for this backend needs.",
        "update the operating system",
    ),
    "driver_missing": Cause(
        "no driver",
        "The hardware is here, but its driver, or the part that computes, is missing or broken.",
        "install or repair the driver, reboot, then run: anydevice doctor",
    ),
    "driver_not_loaded": Cause(
        "driver not loaded",
        "The driver's kernel module is not loaded, or another driver holds the card.",
        "load the kernel module; if that fails, reinstall the driver and reboot",
    ),
    "driver_broken": Cause(
        "driver cannot be loaded",
        "A library of the driver is here and cannot be loaded.",
        "reinstall the driver, reboot, then run: anydevice doctor",
    ),
    "driver_failed": Cause(
        "driver reports an error",
        "The driver answers, and what it answers is an error.",
        "see the system's messages (sudo dmesg), reboot, or reinstall the driver",
    ),
    "driver_too_old": Cause(
        "driver too old",
        "The driver, or the runtime beside it, is older than the oldest that is supported.",
        "update the driver; then reboot",
    ),
    "driver_mismatch": Cause(
        "parts of the driver do not fit",
        "The loaded kernel module and the driver's libraries are of different versions.",
        "reboot after an update of a driver; take other copies out of the library path",
    ),
    "driver_shadowed": Cause(
        "another library hides the driver",
        "A stub that is made only for linking stands before the real driver library.",
        "take its folder out of LD_LIBRARY_PATH",
    ),
    "loader_missing": Cause(
        "no OpenCL loader",
        "OpenCL drivers are reached through a loader library, and none is installed.",
        'pip install "anydevice[opencl]"',
    ),
    "other_loader": Cause(
        "another OpenCL loader",
        "Only the system's OpenCL loader shows the device, and pyopencl uses one of its own.",
        "build pyopencl against the system's loader",
    ),
    "not_in_container": Cause(
        "not passed on to the container",
        "The hardware is in the machine, but its device files are not here, as in a container "
        "that was started without them.",
        "start the container with the device, such as: docker run --gpus all",
    ),
    "no_permission": Cause(
        "no permission",
        "This user, or this container, may not open the device's files.",
        "join the group that owns them (video, render) and log in again, or start the container"
        " with the device",
    ),
    "no_device": Cause(
        "the driver shows no device",
        "The driver works and shows this process no device.",
        "see what the driver's own tool shows (nvidia-smi, rocminfo, clinfo)",
    ),
    "not_ready": Cause(
        "device not ready",
        "The driver waits for something: a card that starts, or the fabric manager of an "
        "NVSwitch machine.",
        "wait, start the service that is named, or reboot",
    ),
    "needs_reset": Cause(
        "card must be reset",
        "The card has failed or has fallen off the bus.",
        "reset the card or reboot; if it comes back, check power and cooling",
    ),
    "card_busy": Cause(
        "another process holds the card",
        "The card is in exclusive use by another process.",
        "end what holds it (anydevice watch lists the processes)",
    ),
    "mps_failed": Cause(
        "MPS server does not answer",
        "CUDA is set to share the card through an MPS server, and that server does not work.",
        "restart the MPS server, or stop it",
    ),
    "not_readable": Cause(
        "the system does not tell",
        "The system shows no files or list from which the device could be read.",
        "see the reason above; the libraries may work all the same",
    ),
    "hidden": Cause(
        "hidden by a variable",
        "An environment variable hides the device from every library.",
        "unset the variable, or put the device's index or UUID into it",
    ),
    "no_mig_instance": Cause(
        "no MIG instance",
        "The card is in MIG mode, in which only its instances can be used, and it has none.",
        "make an instance, or switch MIG mode off: sudo nvidia-smi -mig 0",
    ),
    "compute_prohibited": Cause(
        "computing is prohibited",
        "The card's compute mode lets no program compute on it.",
        "set the compute mode: sudo nvidia-smi -c DEFAULT",
    ),
    "card_too_old": Cause(
        "card too old",
        "The card's generation is older than the oldest that current libraries support.",
        "use OpenCL or the CPU",
    ),
    "card_unsupported": Cause(
        "the device cannot be used",
        "The driver works, but this device does not meet what is needed.",
        "see what the backend requires: anydevice backends",
    ),
    "translated_python": Cause(
        "Python for another processor",
        "This Python is built for Intel and runs under Rosetta, which hides the GPU.",
        "install a Python for Apple Silicon",
    ),
    "library_missing": Cause(
        "no library",
        "The driver and the device are fine; no installed Python library can drive them.",
        "install one",
    ),
    "cpu_only_build": Cause(
        "library built without this backend",
        "The library is installed, but this build of it computes on the CPU only.",
        "install the build for this backend in place of it",
    ),
    "other_build": Cause(
        "library built for another backend",
        "The library is installed, but this build of it is for other hardware.",
        "install the build for this backend in place of it",
    ),
    "plugin_missing": Cause(
        "plugin missing",
        "JAX is installed without its plugin for this backend.",
        'install the plugin, such as: pip install "jax[cuda13]"',
    ),
    "version_mismatch": Cause(
        "versions do not fit",
        "Two parts that must fit each other are of different versions: the driver, the CUDA or "
        "ROCm that a library was made for, or a plugin.",
        "bring both to versions that fit; after an update of a driver, reboot",
    ),
    "card_not_in_build": Cause(
        "card not in the build",
        "The card's generation is not among those that the library was compiled for.",
        "install a release of the library that still, or already, carries this card",
    ),
    "damaged_installation": Cause(
        "damaged installation",
        "The library's files are incomplete, or two packages wrote over each other.",
        "uninstall the library and everything beside it of the same name, then install it again",
    ),
    "cuda_library_missing": Cause(
        "CUDA missing",
        "A library of CUDA itself cannot be found.",
        "install the array library with its CUDA parts, such as: pip install anydevice[cuda]",
    ),
    "not_driven": Cause(
        "library does not drive it",
        "This array library has no support for the device.",
        "use an engine that drives it: anydevice devices",
    ),
    "crashed": Cause(
        "it crashes",
        "Asking it took the child process down. Your program would have gone down with it.",
        "reinstall it, or update the driver and the library; then run: anydevice doctor",
    ),
    "timed_out": Cause(
        "no answer in time",
        "It did not answer within the time limit. A card that is starting, asleep or hung does so.",
        "try again; with more time: anydevice doctor --limit 600; if that does not help, reboot",
    ),
    "not_started": Cause(
        "no child process",
        "No child process could be started, so the driver was not asked.",
        "run from a normal Python interpreter, with memory and processes to spare",
    ),
    "failed": Cause(
        "the computation failed",
        "The library is there and fits, but a small computation on the device failed.",
        "update the driver and the library; then run: anydevice doctor",
    ),
    "reading_failed": Cause(
        "reading failed",
        "anydevice itself failed while it read what the driver shows.",
        "report it with the text above",
    ),
    "probe_failed": Cause(
        "a probe failed",
        "A package that adds a probe said something that cannot be used.",
        "update or uninstall that package",
    ),
    "out_of_memory": Cause(
        "out of memory",
        "The device has no memory left: another process, or another library in this one, holds it.",
        "end what holds it (anydevice watch lists the processes), or ask for less",
    ),
    "wrong_answer": Cause(
        "wrong answer",
        "The device computed something else than the processor does. Nothing computed on it can"
        " be trusted.",
        "update the driver and the library; if it stays, test the card's memory",
    ),
    "computed_elsewhere": Cause(
        "computed on another device",
        "The library did not compute on the device that it was given.",
        "update the library; check the variables that choose its devices",
    ),
    "no_such_device": Cause(
        "no such device",
        "This machine has no device of that name.",
        "list what it has: anydevice devices",
    ),
    "too_little_memory": Cause(
        "too little memory free",
        "The device is usable, but has less free memory than was asked for.",
        "ask for less, or end what holds it: anydevice watch",
    ),
    "only_by_name": Cause(
        "chosen only by name",
        "The device is usable, but is not chosen unless it is asked for.",
        'ask for it: device("opencl")',
    ),
    "preallocated_memory": Cause(
        "memory held by preallocation",
        "JAX takes it whether it needs it or not; another library or process then finds the "
        "card full.",
        "export XLA_PYTHON_CLIENT_PREALLOCATE=false, or a smaller share: "
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.4",
    ),
    "little_memory_free": Cause(
        "little memory free",
        "Other processes hold the rest; a JAX process alone takes 75 % unless told not to.",
        "see who holds it, and whether they compute: anydevice watch; or choose with "
        'device(min_free="8GiB")',
    ),
    "slow_first_call": Cause(
        "slow first iteration",
        "A first call starts the device and compiles for it; later ones reuse that.",
        "warm up: run one batch of the real shapes before the loop, and measure only after it",
    ),
    "unsupported": Cause(
        "not supported",
        "The array library cannot do this.",
        "use what the message names instead",
    ),
    "no_autodiff": Cause(
        "no gradients",
        "The array library computes no gradients.",
        "train on torch, jax or mlx",
    ),
    "no_compiler": Cause(
        "no compiler",
        "The array library compiles no functions.",
        "compile on torch, jax or mlx",
    ),
    "no_collectives": Cause(
        "one device only",
        "The array library does not compute on several devices together.",
        "use torch or jax for several",
    ),
    "no_dtype": Cause(
        "dtype missing",
        "The array library, or this device, does not have the dtype.",
        "use another dtype, or the CPU",
    ),
    "no_views": Cause(
        "no views",
        "The array library has no views: two arrays never share memory.",
        "take a part of the array, which is a copy",
    ),
    "no_dlpack": Cause(
        "not shared without a copy",
        "The array library cannot take over this array without a copy.",
        "copy it with to_device",
    ),
    "device_mismatch": Cause(
        "data on several devices",
        "The leaves of one tree live on different devices.",
        "move them to one: to_device(tree, device)",
    ),
    "transfer_failed": Cause(
        "a leaf cannot be moved",
        "One value of a tree cannot be moved or saved.",
        "see the path in the message",
    ),
    "bad_usage": Cause(
        "the command is written wrongly",
        "The command line has an argument that the command does not take.",
        "see what it takes: anydevice --help",
    ),
    "bad_setting": Cause(
        "a setting is wrong",
        "A file, variable or argument has a value that makes no sense.",
        "correct what the message names",
    ),
}
"""Every code of a reason, in the order in which the documentation lists them."""

_BY_STAGE: dict[Stage, str] = {
    "driver": "driver_missing",
    "device": "card_unsupported",
    "library": "library_missing",
    "compute": "failed",
}
"""The code that stands for one that is not in the table, as a user's own probe may give."""

_MUCH_SLOWER, _NOTICEABLE = 10.0, 0.05
_LITTLE_FREE = 0.25
_TAKEN_BY_JAX = (0.72, 0.78)


def explain(report: Report) -> tuple[Explanation, ...]:
    """An explanation for everything that is here and not usable, cause by cause."""
    return tuple(
        explanation
        for finding in report
        if finding.present
        for subjects, stopped in _stopped(finding)
        for explanation in _explain(subjects, stopped)
    )


def explain_verdict(verdict: Verdict) -> Explanation | None:
    """Why a check failed; `None` where its answer was right."""
    if verdict.right:
        return None
    reason = verdict.reason or Reason("failed", "it gave no reason")
    subject = f"{verdict.device} with {verdict.engine}"
    return _explanation((subject,), _known(reason.code, "compute"), (reason.text,), reason.fix)


def worth_knowing(
    report: Report,
    verdicts: Iterable[Verdict],
    environment: Mapping[str, str],
    holders: Mapping[Device, Sequence[DeviceProcess]] | None = None,
) -> tuple[Explanation, ...]:
    """Surprises that are no faults: memory that is held, slow first calls.

    `holders` are the processes that use a device, of those that have little memory free.
    """
    return (
        *_preallocation(report, environment),
        *_held_memory(report, holders or {}),
        *_slow_first_calls(verdicts),
    )


def _stopped(finding: Finding) -> Iterator[tuple[tuple[str, ...], Standing | Finding]]:
    """Everything of a backend that is not usable; devices with the same reasons as one."""
    if not finding.devices:
        yield (finding.backend,), finding
    groups: dict[tuple[object, ...], tuple[list[str], Standing]] = {}
    for device in finding.devices:
        standing = device.standing
        if standing is not None and not standing.usable:
            key = (standing.stage, standing.reasons, standing.fix)
            groups.setdefault(key, ([], standing))[0].append(str(device))
    for names, standing in groups.values():
        yield tuple(names), standing


def _explain(subjects: tuple[str, ...], stopped: Standing | Finding) -> Iterator[Explanation]:
    stage = stopped.stage or "device"
    evidence: dict[str, list[str]] = {}
    for reason in stopped.reasons:
        evidence.setdefault(_known(reason.code, stage), []).append(reason.text)
    fix = stopped.fix if stage != "compute" else None  # that one leads here
    for code, texts in (evidence or {_BY_STAGE[stage]: []}).items():
        yield _explanation(subjects, code, tuple(texts), fix)


def _known(code: str, stage: Stage) -> str:
    return code if code in CAUSES else _BY_STAGE[stage]


def _explanation(
    subjects: tuple[str, ...], code: str, evidence: tuple[str, ...], fix: str | None = None
) -> Explanation:
    cause = CAUSES[code]
    return Explanation(subjects, code, cause.name, evidence, cause.meaning, fix or cause.advice)


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
    share = _percent(environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION", ""))
    taken = f"JAX takes {share} of a card's memory when it starts"
    yield _explanation(tuple(cards), "preallocated_memory", (taken,))


def _percent(share: str) -> str:
    try:
        return percent(float(share))
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
        evidence = (amounts, *(_holding(process, facts.total_memory or 0) for process in known))
        yield _explanation((str(device),), "little_memory_free", evidence)


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
            times = f"{format_time(first)}, the second {format_time(second)}"
            slow[who] = f"{who}: the first call took {times}"
    if slow:
        yield _explanation(tuple(slow), "slow_first_call", tuple(slow.values()))
