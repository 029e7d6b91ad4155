"""What kind of Linux a tree of files is."""

from __future__ import annotations

from pathlib import Path

import pytest

from anydevice.hardware import linux


def write(root: Path, name: str, text: str = "") -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize("file", [".dockerenv", "run/.containerenv"])
def test_a_container_is_known_by_its_file(tmp_path: Path, file: str) -> None:
    write(tmp_path, file)
    assert linux.in_container(tmp_path, {})


@pytest.mark.parametrize("name", ["container", "KUBERNETES_SERVICE_HOST"])
def test_a_container_is_known_by_its_variable(tmp_path: Path, name: str) -> None:
    assert linux.in_container(tmp_path, {name: "oci"})
    assert not linux.in_container(tmp_path, {name: ""})


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
def test_a_container_is_known_by_the_group_of_its_first_process(
    tmp_path: Path, group: str, contained: bool
) -> None:
    write(tmp_path, "proc/1/cgroup", group)
    assert linux.in_container(tmp_path, {}) is contained


def test_an_empty_tree_is_no_container_and_no_distribution(tmp_path: Path) -> None:
    assert not linux.in_container(tmp_path, {})
    assert linux.distribution(tmp_path) == ()


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
def test_a_distribution_and_those_it_is_like(
    tmp_path: Path, release: str, names: tuple[str, ...], has_apt: bool
) -> None:
    write(tmp_path, "etc/os-release", release)
    assert linux.distribution(tmp_path) == names
    assert linux.uses_apt(names) is has_apt


def test_the_command_of_the_nearest_relative_fits() -> None:
    commands = {"debian": "apt", "ubuntu": "ubuntu-drivers"}
    assert linux.fitting(commands, ("pop", "ubuntu", "debian")) == "ubuntu-drivers"
    assert linux.fitting(commands, ("arch",)) is None
    assert linux.fitting(commands, ()) is None
