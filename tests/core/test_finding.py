"""One card seen through two backends is recognised by UUID or PCI address, and by nothing else."""

from __future__ import annotations

import pytest

from anydevice._core.device import Device
from anydevice._core.finding import Facts, Finding, same_card

CARD = "GPU-4f2a6b1c-0d3e-8f57-91aa-b2c3d4e5f607"
OTHER = "GPU-00112233-4455-6677-8899-aabbccddeeff"
SLICE = "MIG-9c3f8a10-5b7e-5d2f-8c1d-0123456789ab"


def facts(uuid: str | None = None, pci: str | None = None, name: str = "NVIDIA H200") -> Facts:
    return Facts(name=name, uuid=uuid, pci_address=pci)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (facts(CARD), facts(CARD.upper(), name="H200 through OpenCL")),
        (facts(CARD, "0000:00:06.0"), facts(CARD, "0000:00:07.0")),
        (facts(pci="0000:0A:00.0"), facts(pci="00000000:0a:00.0")),
        (facts(pci="0a:00.0"), facts(pci="0000:0a:00.0")),
        (facts(CARD, "0000:00:06.0"), facts(pci="0000:00:06.0")),
        (facts("GPU-8c2d", "0000:03:00.0"), facts("0123-4567", "0000:03:00.0")),
        (facts("GPU-" + "0" * 32, "0000:03:00.0"), facts(CARD, "0000:03:00.0")),
        (facts(SLICE, "0000:00:06.0"), facts(SLICE.lower(), "0000:00:06.0")),
    ],
)
def test_one_card(one: Facts, two: Facts) -> None:
    assert same_card(one, two)
    assert same_card(two, one)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (facts(), facts()),
        (facts(CARD), facts(OTHER)),
        (facts(CARD), facts()),
        (facts(CARD, "0000:00:06.0"), facts(OTHER, "0000:00:06.0")),
        (facts("00000000-0000-0000-0000-000000000000"), facts("0" * 8 + "-0000")),
        (facts("GPU-ffffffff-ffff"), facts("GPU-ffffffff-ffff")),
        (facts(""), facts("")),
        (facts(SLICE, "0000:00:06.0"), facts(CARD, "0000:00:06.0")),
        (facts(SLICE, "0000:00:06.0"), facts(None, "0000:00:06.0")),
        (facts(pci="0000:00:06.0"), facts(pci="0001:00:06.0")),
        (facts(pci="0000:00:06.0"), facts(pci="0000:00:06.1")),
        (facts(pci="not an address"), facts(pci="not an address")),
    ],
)
def test_not_known_to_be_one_card(one: Facts, two: Facts) -> None:
    assert not same_card(one, two)
    assert not same_card(two, one)


def test_the_keys_of_a_finding_in_json_stay() -> None:
    finding = Finding("cpu", True, True, "stable", (Device("cpu"),))
    assert set(finding.to_dict()) == {
        *("backend", "present", "usable", "tier", "devices", "stage", "reasons", "fix", "notes"),
        *("code", "reason"),
    }
