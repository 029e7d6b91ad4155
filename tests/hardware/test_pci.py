"""Cards on the PCI bus, from recorded trees of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from anydevice.hardware import linux as pci


def plug(root: Path, address: str, vendor: str, device_class: str) -> Path:
    entry = root / "sys/bus/pci/devices" / address
    entry.mkdir(parents=True)
    (entry / "vendor").write_text(vendor + "\n")
    (entry / "class").write_text(device_class + "\n")
    return entry


@pytest.mark.parametrize("device_class", ["0x030000", "0x030200", "0x038000", "0x120000"])
def test_a_display_or_compute_function_is_a_card(tmp_path: Path, device_class: str) -> None:
    plug(tmp_path, "0000:00:06.0", "0x10de", device_class)
    assert pci.cards(pci.NVIDIA, tmp_path) == ("0000:00:06.0",)


@pytest.mark.parametrize("device_class", ["0x040300", "0x0c0330", "0x060400", "0x020000"])
def test_audio_usb_bridge_and_network_functions_are_not(tmp_path: Path, device_class: str) -> None:
    plug(tmp_path, "0000:00:06.1", "0x10de", device_class)
    assert pci.cards(pci.NVIDIA, tmp_path) == ()


def test_vendors_are_told_apart_and_addresses_are_sorted(tmp_path: Path) -> None:
    plug(tmp_path, "0000:41:00.0", "0x10de", "0x030200")
    plug(tmp_path, "0000:05:00.0", "0x10de", "0x030000")
    plug(tmp_path, "0000:03:00.0", "0x1002", "0x030000")
    assert pci.cards(pci.NVIDIA, tmp_path) == ("0000:05:00.0", "0000:41:00.0")
    assert pci.cards(pci.AMD, tmp_path) == ("0000:03:00.0",)


def test_a_machine_without_a_pci_tree_has_no_cards(tmp_path: Path) -> None:
    assert pci.cards(pci.NVIDIA, tmp_path) == ()


def test_a_broken_entry_hides_no_other(tmp_path: Path) -> None:
    plug(tmp_path, "0000:01:00.0", "0x10de", "nonsense")
    (plug(tmp_path, "0000:02:00.0", "0x10de", "0x030000") / "vendor").unlink()
    plug(tmp_path, "0000:03:00.0", "0x10de", "0x030000")
    assert pci.cards(pci.NVIDIA, tmp_path) == ("0000:03:00.0",)
