"""Apple GPUs, from recorded outputs of the tools of macOS."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from anydevice._core.finding import BackendScan, Facts, RawDevice
from anydevice._machine.hardware import macos
from anydevice._machine.hardware.metal import reader as metal
from tests.machine.scans import only, stop_of
from tests.reasons import fix_of, text_of

RECORDED = Path(__file__).parents[3] / "recorded" / "metal"
GIB = 2**30


class Mac:
    """A recorded Mac: answers commands by the name of the tool, and remembers what was asked."""

    def __init__(self, name: str | None = None, **printed: str | None) -> None:
        recorded = tomllib.loads((RECORDED / f"{name}.toml").read_text())["printed"] if name else {}
        self.printed: dict[str, str | None] = {**recorded, **printed}
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str]) -> str | None:
        tool = Path(command[0]).name
        self.asked.append(tool)
        return self.printed.get(tool)

    def with_version(self, version: str) -> Mac:
        lines = (self.printed["sysctl"] or "").splitlines()
        kept = [line for line in lines if not line.startswith("kern.osproductversion")]
        self.printed["sysctl"] = "\n".join([*kept, f"kern.osproductversion: {version}"])
        return self


def see(mac: Mac, machine: str = "x86_64") -> BackendScan:
    return metal.look(5, run=mac, platform="darwin", machine=machine)


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_other_systems_are_refused_without_asking_anything(platform: str) -> None:
    mac = Mac()
    stop = stop_of(metal.look(5, run=mac, platform=platform))
    assert (stop, mac.asked) == ((False, "driver", "Metal is only on macOS"), [])


M1_FREE = (18228 + 148651 + 2472 + 7595) * 16384


def test_an_m1() -> None:
    mac = Mac("m1")
    seen = see(mac)
    assert (seen.present, seen.stage, seen.notes) == (True, None, ())
    approximation = "an approximation: two thirds of the memory"
    facts = Facts(
        name="Apple M1",
        memory_kind="unified",
        total_memory=8 * GIB,
        usable_memory=8 * GIB * 2 // 3,
        free_memory=M1_FREE,
        architecture="Apple M1",
        driver_version="14.5",
        details={"gpu_cores": 7, "usable_memory_is": approximation},
    )
    assert only(seen) == RawDevice(index=0, kind="gpu", facts=facts)
    assert "system_profiler" not in mac.asked


def test_how_much_memory_is_usable() -> None:
    mac = Mac("m2_pro")
    facts = only(see(mac)).facts
    assert (facts.name, facts.architecture) == ("Apple M2 Pro", "Apple M2")
    assert facts.usable_memory == 28 * GIB
    assert facts.free_memory == (1330580 + 362220 + 120000 + 3000) * 16384
    assert facts.details["usable_memory_is"] == "set by iogpu.wired_limit_mb"
    mac.printed["sysctl"] = (mac.printed["sysctl"] or "").replace("28672", "65536")
    assert only(see(mac)).facts.usable_memory == 32 * GIB  # the memory caps the user's limit
    large = only(see(Mac("m3_ultra"))).facts
    assert large.usable_memory == large.free_memory == 384 * GIB
    assert (large.details["gpu_cores"], large.architecture) == (80, "Apple M3")


def test_rosetta_is_named_and_the_gpu_keeps_its_name() -> None:
    device = only(see(Mac("rosetta")))
    assert device.facts.name == "Apple M2 Pro"
    assert text_of(device) == "this Python is an Intel build running under Rosetta"
    assert fix_of(device) == "arch -arm64 brew install python"


def test_a_virtual_machine_is_noted() -> None:
    seen = see(Mac("virtual"))
    device, facts = only(seen), only(seen).facts
    assert text_of(device) is None
    assert (facts.name, facts.architecture) == ("Apple Paravirtual device", "Apple M1")
    assert "virtual machine" in seen.notes[0]
    assert (facts.free_memory, facts.details["gpu_cores"]) == (None, None)


@pytest.mark.parametrize("mark", ["hw.model: VirtualMac2,1", "kern.hv_vmm_present: 1"])
def test_each_mark_of_a_virtual_machine_is_enough(mark: str) -> None:
    mac = Mac(sysctl=f"hw.optional.arm64: 1\nmachdep.cpu.brand_string: Apple M4\n{mark}\n")
    assert only(see(mac)).facts.name == "Apple Paravirtual device"


@pytest.mark.parametrize(
    ("version", "refused", "noted"),
    [
        *(("12.2.1", True, False), ("11.7", True, False)),
        *(("12.3", False, True), ("13.4.1", False, True)),
        *(("13.5", False, False), ("26.0", False, False), ("nonsense", False, False)),
    ],
)
def test_an_old_macos_serves_torch_at_most(version: str, refused: bool, noted: bool) -> None:
    seen = see(Mac("m1").with_version(version))
    text = f"macOS {version} is too old: torch needs 12.3 and mlx 13.5" if refused else None
    note = f"mlx needs macOS 13.5 or newer; on {version} only torch serves"
    assert (text_of(only(seen)), seen.notes) == (text, (note,) if noted else ())
    assert bool(fix_of(only(seen))) is refused


def test_an_intel_mac_with_a_card() -> None:
    seen = see(Mac("macbook_pro_16"))
    card, integrated = seen.devices
    assert (card.facts.name, card.facts.memory_kind) == ("AMD Radeon Pro 5500M", "dedicated")
    assert card.facts.total_memory == card.facts.usable_memory == 8 * GIB
    assert (card.index, text_of(card)) == (0, None)
    assert integrated.facts.name == "Intel UHD Graphics 630"
    assert (integrated.index, integrated.facts.memory_kind) == (1, "unified")
    assert text_of(integrated) == "Metal needs Apple Silicon or a discrete GPU"
    assert seen.notes == ("the last torch for Intel Macs is 2.2, and mlx has none",)
    card, _ = see(Mac("macbook_pro_16").with_version("10.15.7")).devices
    assert text_of(card).startswith("macOS 10.15.7 is too old")


def test_an_intel_mac_without_a_card() -> None:
    seen = see(Mac("macbook_air_intel"))
    device = only(seen)
    assert device.facts.total_memory == 1536 * 2**20
    assert text_of(device) == "Metal needs Apple Silicon or a discrete GPU"
    assert (fix_of(device), seen.notes) == (None, ())


def test_an_intel_mac_in_a_virtual_machine() -> None:
    profile = '{"SPDisplaysDataType": [{"spdisplays_vendor-id": "0x1234"}]}'
    seen = see(Mac(sysctl="kern.hv_vmm_present: 1\n", system_profiler=profile))
    assert only(seen).facts == Facts(name="unknown GPU", memory_kind="unified")
    assert text_of(only(seen)) is not None
    assert "virtual machine" in seen.notes[0]


@pytest.mark.parametrize("printed", [None, "", "unknown oid 'hw.memsize'\n", "\x00\x01 : :\n"])
def test_sysctl_missing_or_garbled_on_apple_silicon(printed: str | None) -> None:
    device = only(see(Mac(sysctl=printed), machine="arm64"))
    assert text_of(device) is None
    assert device.facts.name == "Apple Silicon GPU"
    assert (device.facts.total_memory, device.facts.usable_memory) == (None, None)
    assert device.facts.details["usable_memory_is"] == "unknown"
    silent = see(Mac(), machine="arm64").notes
    assert silent == ("sysctl did not answer: memory and version of macOS are unknown",)


def test_garbled_figures_are_unknown() -> None:
    told = "hw.optional.arm64: 1\nhw.memsize: lots\niogpu.wired_limit_mb: -\n"
    facts = only(see(Mac(sysctl=told, vm_stat="Pages free: many."))).facts
    assert (facts.total_memory, facts.usable_memory, facts.free_memory) == (None, None, None)


@pytest.mark.parametrize(
    "printed", [None, "", "{", "[]", '{"SPDisplaysDataType": {}}', '{"SPAudioDataType": []}']
)
def test_a_profile_that_cannot_be_read_is_not_an_absent_gpu(printed: str | None) -> None:
    seen = see(Mac(system_profiler=printed))
    text = "system_profiler did not tell which graphics hardware this Mac has"
    assert (*stop_of(seen), seen.devices) == (True, "driver", text, ())
    none = see(Mac(system_profiler='{"SPDisplaysDataType": ["no entry"]}'))
    assert stop_of(none) == (False, "device", "this Mac has no GPU")


def test_free_memory_is_read_anew_and_capped() -> None:
    facts = only(see(Mac("m1"))).facts
    assert metal.free_memory(0, facts, run=Mac("m2_pro")) == facts.usable_memory
    assert metal.free_memory(0, facts, run=Mac()) is None
    card = see(Mac("macbook_pro_16")).devices[0].facts
    assert metal.free_memory(0, card, run=Mac("m2_pro")) is None
    unlimited = Facts(name="Apple Silicon GPU", memory_kind="unified")
    assert metal.free_memory(0, unlimited, run=Mac("m1")) == M1_FREE


# ---------------------------------------------------------------- running the tools


def test_a_command_is_run_and_what_it_prints_counts_even_if_it_fails() -> None:
    run = macos.running_until(time.monotonic() + 20)
    assert run(["/bin/sh", "-c", "echo told; exit 1"]) == "told\n"
    assert run(["/bin/sh", "-c", "exit 1"]) is None
    assert run(["/nowhere/sysctl"]) is None


def test_all_commands_share_one_limit() -> None:
    start = time.monotonic()
    run = macos.running_until(start + 0.2)
    assert run(["/bin/sleep", "600"]) is None
    assert run(["/bin/echo", "late"]) is None
    assert time.monotonic() - start < 60


def test_without_a_recording_the_tools_themselves_are_asked() -> None:
    # On a machine without them, that is a Mac whose tools do not answer.
    seen = metal.look(5, platform="darwin")
    assert seen.present
    facts = Facts(name="Apple M1", memory_kind="unified", usable_memory=GIB)
    free = metal.free_memory(0, facts)
    assert free is None or 0 < free <= GIB
