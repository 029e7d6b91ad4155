"""The processor: its name, its vector instructions and its cores, on each system."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from anydevice._core.record import Record
from anydevice._machine.hardware.linux import as_cpu_set, as_number, read_text

# Level by level, what the x86-64 psABI asks for, in the words of /proc/cpuinfo.
_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("x86-64-v2", frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})),
    (
        "x86-64-v3",
        frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    ),
    ("x86-64-v4", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
)

# Vector units, the best first; a processor is named by the first that it has.
_X86_VECTORS = (
    ("avx512f", "AVX-512"),
    ("avx2", "AVX2"),
    ("avx", "AVX"),
    ("sse4_2", "SSE4.2"),
    ("sse2", "SSE2"),
)
_ARM_VECTORS = (("sve2", "SVE2"), ("sve", "SVE"), ("asimd", "NEON"), ("neon", "NEON"))
_MATRIX = (("amx_tile", "AMX"), ("sme", "SME"))
_NUMBER_FORMATS = (
    ("avx512_vnni", "VNNI"),
    ("avx_vnni", "VNNI"),
    ("avx512_bf16", "BF16"),
    ("bf16", "BF16"),
    ("avx512_fp16", "FP16"),
    ("i8mm", "I8MM"),
)

_ARM_NAMES = """
    41: d03 Cortex-A53, d04 Cortex-A35, d05 Cortex-A55, d07 Cortex-A57, d08 Cortex-A72,
        d09 Cortex-A73, d0a Cortex-A75, d0b Cortex-A76, d0c Neoverse-N1, d0d Cortex-A77,
        d40 Neoverse-V1, d41 Cortex-A78, d42 Cortex-A78AE, d44 Cortex-X1, d46 Cortex-A510,
        d47 Cortex-A710, d48 Cortex-X2, d49 Neoverse-N2, d4a Neoverse-E1, d4d Cortex-A715,
        d4e Cortex-X3, d4f Neoverse-V2, d80 Cortex-A520, d81 Cortex-A720, d82 Cortex-X4,
        d83 Neoverse-V3AE, d84 Neoverse-V3, d85 Cortex-X925, d87 Cortex-A725, d8e Neoverse-N3
    43: 0a1 ThunderX, 0af ThunderX2
    46: 001 Fujitsu A64FX
    48: d01 Kunpeng 920
    4e: 004 NVIDIA Carmel, 010 NVIDIA Olympus
    51: 001 Qualcomm Oryon, c00 Qualcomm Falkor
    61: 022 Apple M1, 023 Apple M1, 024 Apple M1 Pro, 025 Apple M1 Pro, 028 Apple M1 Max,
        029 Apple M1 Max, 032 Apple M2, 033 Apple M2, 034 Apple M2 Pro, 035 Apple M2 Pro,
        038 Apple M2 Max, 039 Apple M2 Max
    6d: d49 Azure Cobalt 100
    c0: ac3 AmpereOne, ac4 AmpereOne
"""
"""Cores by maker and part, both in hexadecimal, as /proc/cpuinfo has them."""

SYSCTL_NAMES = (
    "machdep.cpu.brand_string",
    "hw.memsize",
    "hw.physicalcpu",
    "hw.logicalcpu",
    "hw.perflevel0.physicalcpu",
    "hw.optional.arm.FEAT_SME",
    "hw.optional.avx2_0",
    "hw.optional.avx512f",
)
"""The names to ask `sysctl` for on a Mac; it passes over those that the machine does not have."""

# Features of IsProcessorFeaturePresent, with the words of /proc/cpuinfo that each implies: Windows
# lists few instruction sets, and its processors with AVX2 have the rest of that level.
_WINDOWS_FEATURES: tuple[tuple[int, frozenset[str]], ...] = (
    (10, frozenset({"sse2"})),
    (38, _LEVELS[0][1]),
    (39, frozenset({"avx"})),
    (40, _LEVELS[1][1]),
    (41, _LEVELS[2][1]),
    (19, frozenset({"asimd"})),
    (46, frozenset({"sve"})),
    (47, frozenset({"sve2"})),
)

_TRADEMARK = re.compile(r"\((?:R|TM|C)\)", re.IGNORECASE)
_NOISE = re.compile(
    r"@.*$"
    r"|(?<!Virtual )\bCPU\b"
    r"|\b(?:\d+|Dual|Triple|Quad|Six|Eight|Twelve|Sixteen)-Core\b"
    r"|\bProcessor\b(?: \(with IBPB\))?"
    r"|\b\d+th Gen\b"
    r"|\b(?:with|w/) Radeon.*$",
    re.IGNORECASE,
)


class Processor(Record):
    """A CPU, apart from how much of it this process may use.

    `cores` has the processors (hardware threads) of each physical core; it is empty where the
    system does not tell which share one, and `physical_cores` is then its own count or the logical
    one. `performance_cores` is known for Apple Silicon only.
    """

    name: str
    architecture: str
    simd: str
    physical_cores: int
    logical_cores: int
    performance_cores: int | None = None
    cores: tuple[frozenset[int], ...] = ()


def read_linux(root: Path, machine: str) -> Processor:
    """Return the processor from `/proc/cpuinfo` and `/sys/devices/system/cpu`."""
    # On x86 every block of the file is like the first, and writing all of them takes the kernel
    # long on a large machine; on ARM the blocks are short and may differ.
    x86 = machine in ("x86_64", "AMD64", "i686", "i386")
    text = read_text(root / "proc/cpuinfo", limit=16384 if x86 else -1) or ""
    blocks = [_fields(block) for block in text.split("\n\n") if block.strip()]
    first = blocks[0] if blocks else {}
    flags = frozenset((first.get("flags") or first.get("Features") or "").split())
    online = online_processors(root)
    cores = _cores(root, online)
    logical = len(online) or 1
    return Processor(
        name=_linux_name(blocks, machine),
        architecture=_architecture(machine, flags),
        simd=_simd(flags),
        physical_cores=len(cores) or logical,
        logical_cores=logical,
        cores=cores,
    )


def read_macos(values: Mapping[str, str], machine: str) -> Processor:
    """Return the processor from what `sysctl` answered to `SYSCTL_NAMES`."""
    logical = as_number(values.get("hw.logicalcpu")) or 1
    flags = {"asimd"} if machine == "arm64" else {"sse2", *_LEVELS[0][1]}
    for name, stands_for in (
        ("hw.optional.arm.FEAT_SME", {"sme"}),
        ("hw.optional.avx2_0", _LEVELS[1][1]),
        ("hw.optional.avx512f", _LEVELS[2][1]),
    ):
        if as_number(values.get(name)):
            flags |= stands_for
    return Processor(
        name=tidy_name(values.get("machdep.cpu.brand_string", "")) or machine,
        architecture=_architecture(machine, flags),
        simd=_simd(flags),
        physical_cores=as_number(values.get("hw.physicalcpu")) or logical,
        logical_cores=logical,
        performance_cores=as_number(values.get("hw.perflevel0.physicalcpu")),
    )


def read_windows(
    name: str | None,
    has_feature: Callable[[int], bool],
    physical_cores: int | None,
    logical_cores: int | None,
    machine: str,
) -> Processor:
    """Return the processor from ProcessorNameString and IsProcessorFeaturePresent."""
    flags: set[str] = set()
    for number, stands_for in _WINDOWS_FEATURES:
        if has_feature(number):
            flags |= stands_for
    logical = logical_cores or 1
    return Processor(
        name=tidy_name(name or "") or machine,
        architecture=_architecture(machine, flags),
        simd=_simd(flags),
        physical_cores=physical_cores or logical,
        logical_cores=logical,
    )


def tidy_name(name: str) -> str:
    """Return a processor's name without the words that all processors have."""
    bare = _TRADEMARK.sub("", name)
    # "Common KVM processor" is a name, unlike the word that vendors append.
    short = bare if "processor" in bare else _NOISE.sub(" ", bare)
    return " ".join(short.split()) or " ".join(name.split())


def online_processors(root: Path) -> frozenset[int]:
    """Return the numbers of the processors that are switched on; empty if the system hides them."""
    online = as_cpu_set(read_text(root / "sys/devices/system/cpu/online"))
    if online is not None:
        return online
    text = read_text(root / "proc/cpuinfo") or ""
    return frozenset(int(number) for number in re.findall(r"(?m)^processor\s*:\s*(\d{1,5})$", text))


def _cores(root: Path, online: frozenset[int]) -> tuple[frozenset[int], ...]:
    cores: list[frozenset[int]] = []
    counted: set[int] = set()
    for number in sorted(online):
        # One file a core, not one a thread: on a large machine this is most of the time.
        if number in counted:
            continue
        topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
        siblings = as_cpu_set(
            read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list")
        )
        if siblings is None:
            return _cores_from_cpuinfo(root)
        cores.append(siblings)
        counted |= siblings | {number}
    return tuple(cores)


def _cores_from_cpuinfo(root: Path) -> tuple[frozenset[int], ...]:
    threads: dict[tuple[str, str], set[int]] = {}
    for block in (read_text(root / "proc/cpuinfo") or "").split("\n\n"):
        fields = _fields(block)
        number = as_number(fields.get("processor"))
        if number is not None and "core id" in fields:
            place = (fields.get("physical id", ""), fields["core id"])
            threads.setdefault(place, set()).add(number)
    return tuple(frozenset(numbers) for numbers in threads.values())


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def _linux_name(blocks: list[dict[str, str]], machine: str) -> str:
    for field in ("model name", "cpu model", "uarch", "cpu"):
        for block in blocks:
            # A 32-bit ARM kernel writes its architecture here, which names no processor.
            if block.get(field) and not block[field].startswith("ARMv"):
                return tidy_name(block[field])
    parts = [_arm_name(block) for block in blocks if "CPU part" in block]
    # With cores of several kinds the later, larger ones are what the machine is known for.
    return " + ".join(dict.fromkeys(reversed(parts))) or machine or "unknown processor"


def _arm_name(block: dict[str, str]) -> str:
    maker, part = block.get("CPU implementer", ""), block["CPU part"]
    try:
        return _arm_names()[int(maker, 16), int(part, 16)]
    except (KeyError, ValueError):
        return f"ARM implementer {maker or 'unknown'} part {part}"


def _arm_names() -> dict[tuple[int, int], str]:
    names: dict[tuple[int, int], str] = {}
    for row in _ARM_NAMES.strip().replace(",\n", ",").splitlines():
        maker, _, cores = row.partition(":")
        for core in cores.split(","):
            part, _, name = core.strip().partition(" ")
            names[int(maker, 16), int(part, 16)] = name
    return names


def _architecture(machine: str, flags: Iterable[str]) -> str:
    flags = frozenset(flags)
    level = machine
    if machine in ("x86_64", "AMD64"):
        level = "x86-64"
        for name, needed in _LEVELS:
            if not needed <= flags:
                break
            level = name
    units = [*_vectors(flags), *_unit_names(flags, _MATRIX)]
    return f"{level.replace('ARM64', 'arm64')} ({', '.join(units)})" if units else level


def _simd(flags: Iterable[str]) -> str:
    flags = frozenset(flags)
    return ", ".join(
        [*_vectors(flags), *_unit_names(flags, _NUMBER_FORMATS), *_unit_names(flags, _MATRIX)]
    )


def _vectors(flags: frozenset[str]) -> list[str]:
    return _unit_names(flags, _X86_VECTORS)[:1] + _unit_names(flags, _ARM_VECTORS)[:1]


def _unit_names(flags: frozenset[str], names: tuple[tuple[str, str], ...]) -> list[str]:
    return list(dict.fromkeys(name for flag, name in names if flag in flags))
