"""Containers, distributions and PCI cards, from trees of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from anydevice._machine.hardware import linux
from tests.machine.tree import plug_card, write_file


def test_a_container_is_known_by_its_file_or_variable(tmp_path: Path) -> None:
    for name in ("container", "KUBERNETES_SERVICE_HOST"):
        assert linux.in_container(tmp_path, {name: "oci"})
        assert not linux.in_container(tmp_path, {name: ""})
    for file in (".dockerenv", "run/.containerenv"):
        assert not linux.in_container(tmp_path / "machine", {})
        mark = write_file(tmp_path / "machine", file)
        assert linux.in_container(tmp_path / "machine", {})
        mark.unlink()


@pytest.mark.parametrize(
    ("group", "contained"),
    [
        ("0::/kubepods/besteffort/pod1\n", True),
        ("12:memory:/docker/0f3a\n", True),
        ("0::/machine.slice/libpod-2a.scope\n", True),
        ("0::/init.scope\n", False),
        ("", False),
    ],
)
def test_a_container_is_known_by_its_group(tmp_path: Path, group: str, contained: bool) -> None:
    write_file(tmp_path, "proc/1/cgroup", group)
    assert linux.in_container(tmp_path, {}) is contained


def test_an_empty_tree_tells_nothing(tmp_path: Path) -> None:
    assert not linux.in_container(tmp_path, {})
    assert linux.distribution(tmp_path) == ()
    assert linux.cards(linux.NVIDIA, tmp_path) == ()


@pytest.mark.parametrize(
    ("release", "names", "has_apt"),
    [
        ('NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\n', ("ubuntu", "debian"), True),
        ("ID=debian\n", ("debian",), True),
        (
            'ID="rocky"\nID_LIKE="rhel centos fedora"\n',
            ("rocky", "rhel", "centos", "fedora"),
            False,
        ),
        ("ID='opensuse-leap'\nID_LIKE='suse opensuse'\n", ("suse", "suse", "suse"), False),
        ("ID=Arch\nVARIANT_ID=debian\n", ("arch",), False),
        ("no such thing\n", (), False),
    ],
)
def test_distributions(tmp_path: Path, release: str, names: tuple[str, ...], has_apt: bool) -> None:
    write_file(tmp_path, "etc/os-release", release)
    assert linux.distribution(tmp_path) == names
    assert linux.uses_apt(names) is has_apt


def test_the_command_of_the_nearest_relative_fits() -> None:
    commands = {"debian": "apt", "ubuntu": "ubuntu-drivers"}
    assert linux.fitting(commands, ("pop", "ubuntu", "debian")) == "ubuntu-drivers"
    assert linux.fitting(commands, ("arch",)) is None
    assert linux.fitting(commands, ()) is None


@pytest.mark.parametrize(
    ("device_class", "is_card"),
    [
        *(("0x030000", True), ("0x030200", True), ("0x038000", True), ("0x120000", True)),
        # Audio, USB, bridges and networks.
        *(("0x040300", False), ("0x0c0330", False), ("0x060400", False), ("0x020000", False)),
    ],
)
def test_display_or_compute_is_a_card(tmp_path: Path, device_class: str, is_card: bool) -> None:
    plug_card(tmp_path, "0000:00:06.0", "0x10de", device_class)
    assert linux.cards(linux.NVIDIA, tmp_path) == (("0000:00:06.0",) if is_card else ())


def test_vendors_are_told_apart_and_addresses_are_sorted(tmp_path: Path) -> None:
    plug_card(tmp_path, "0000:41:00.0", "0x10de", "0x030200")
    plug_card(tmp_path, "0000:05:00.0", "0x10de")
    plug_card(tmp_path, "0000:03:00.0", "0x1002")
    assert linux.cards(linux.NVIDIA, tmp_path) == ("0000:05:00.0", "0000:41:00.0")
    assert linux.cards(linux.AMD, tmp_path) == ("0000:03:00.0",)


def test_a_broken_entry_hides_no_other(tmp_path: Path) -> None:
    plug_card(tmp_path, "0000:01:00.0", "0x10de", "nonsense")
    (plug_card(tmp_path, "0000:02:00.0", "0x10de") / "vendor").unlink()
    plug_card(tmp_path, "0000:03:00.0", "0x10de")
    assert linux.cards(linux.NVIDIA, tmp_path) == ("0000:03:00.0",)
