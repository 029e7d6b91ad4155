"""Why a device was chosen, in words."""

from __future__ import annotations

import pytest

from anydevice._core.choice import Choice, Request, Wish, choose
from anydevice._core.device import Device
from anydevice._core.finding import DeviceStatus, Facts, Finding, Kind, Reason
from anydevice._machine.discovery.discover import Report
from anydevice._report.choice import because, unmet_wishes, was_automatic


def finding(backend: str, *kinds: Kind, engines: tuple[str, ...] = ("torch",)) -> Finding:
    devices = tuple(
        Device.seen(backend, index, DeviceStatus(kind, Facts(backend), engines))
        for index, kind in enumerate(kinds)
    )
    return Finding(backend, True, True, "stable", devices)


def stopped(backend: str, count: int) -> Finding:
    reasons = (Reason("library_missing", "no"),)
    status = DeviceStatus("gpu", Facts(backend), stage="library", reasons=reasons)
    devices = tuple(Device.seen(backend, index, status) for index in range(count))
    return Finding(backend, True, False, "stable", devices, "library", reasons)


CPU = finding("cpu", "cpu", engines=("numpy", "torch"))


def chosen(findings: list[Finding], **request: object) -> tuple[Report, Choice]:
    choice = choose(Request(**request), findings, lambda device: None)  # type: ignore[arg-type]
    return Report(tuple(findings), "cpu"), choice


def test_every_backend_that_was_passed_over_is_named() -> None:
    report, choice = chosen([stopped("cuda", 2), stopped("rocm", 1), stopped("tpu", 1), CPU])
    assert because(report, choice) == (
        'cuda stopped at "library", rocm:0 stopped at "library" and tpu:0 stopped at "library"'
    )
    assert was_automatic(choice)


def test_the_cpu_behind_opencl_is_no_accelerator() -> None:
    report, choice = chosen([finding("opencl", "cpu", engines=("opencl",)), CPU])
    assert because(report, choice) == "no accelerator is in this machine"


def test_an_opencl_card_that_is_held_back_is_named() -> None:
    report, choice = chosen([finding("opencl", "gpu", engines=("opencl",)), CPU])
    assert because(report, choice) == choice.reasons[0].text


def test_a_card_that_the_asked_engine_does_not_drive_is_named() -> None:
    report, choice = chosen([finding("cuda", "gpu"), CPU], engine="numpy", engine_source="argument")
    assert because(report, choice) == "cuda:0: numpy does not drive it (asked for by argument)"


def test_a_configured_order() -> None:
    report, choice = chosen([finding("cuda", "gpu"), CPU], order=("cpu",))
    assert because(report, choice) == "it is the first usable one in the configured order"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("argument", "it was asked for"),
        ("set_device", "set_device() asks for it"),
        ("environment", "ANYDEVICE_DEVICE asks for it"),
        ("user file", "the user's anydevice.toml asks for it"),
        ("a plugin", "a plugin asks for it"),
    ],
)
def test_who_asked(source: str, words: str) -> None:
    report, choice = chosen([CPU], wishes=(Wish(source, ("cpu",)),))
    assert because(report, choice) == words
    assert not was_automatic(choice)
    assert unmet_wishes(choice) == []


def test_wishes_that_were_not_met() -> None:
    wishes = (Wish("environment", ("tpu",)), Wish("user file", ("cuda", "rocm")))
    _, choice = chosen([CPU], wishes=wishes)
    assert unmet_wishes(choice) == [
        "tpu is not available, although ANYDEVICE_DEVICE asks for it",
        "cuda, rocm is not available, although the user's anydevice.toml asks for it",
    ]


def test_a_choice_of_nothing_has_no_reason() -> None:
    report, choice = chosen([CPU], wishes=(Wish("argument", ("tpu",), binding=True),))
    assert because(report, choice) == ""
    assert not was_automatic(choice)
