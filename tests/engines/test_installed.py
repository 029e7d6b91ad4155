from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from anydevice.engines.installed import distributions, entry_points, package_folder


def test_names_and_versions_come_from_the_folders_names(site) -> None:
    site.distribution("jax-cuda12-plugin", "0.10.2")
    (site.folder / "PyYAML-6.0-py3.11.egg-info").mkdir()
    (site.folder / "torch-2.13.0+cpu.dist-info").mkdir()
    (site.folder / "nameless.dist-info").mkdir()
    (site.folder / "dist-info").mkdir()
    assert distributions() == {
        "jax-cuda12-plugin": "0.10.2",
        "pyyaml": "6.0",
        "torch": "2.13.0+cpu",
    }


def test_what_comes_first_on_the_search_path_counts(site, tmp_path, monkeypatch) -> None:
    site.distribution("numpy", "1.0")
    other = tmp_path / "other"
    (other / "numpy-2.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(other), *sys.path])
    assert distributions()["numpy"] == "2.0"


def test_a_later_installation_is_seen(site) -> None:
    assert distributions() == {}
    site.distribution("jax", "0.10.2")
    os.utime(site.folder, ns=(1, 1))
    assert distributions() == {"jax": "0.10.2"}


def test_paths_that_are_no_folders_are_passed_over(site, tmp_path, monkeypatch) -> None:
    archive = tmp_path / "library.zip"
    archive.touch()
    monkeypatch.setattr(sys, "path", [str(archive), str(tmp_path / "gone"), *sys.path])
    site.distribution("jax", "0.10.2")
    assert distributions() == {"jax": "0.10.2"}


def test_the_empty_entry_is_the_working_directory(site, tmp_path, monkeypatch) -> None:
    (tmp_path / "jax-0.1.dist-info").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert distributions()["jax"] == "0.1"


def test_entry_points_of_one_group(site) -> None:
    text = """
[console_scripts]
tool = tool.main:run

[anydevice.engines]
# a comment = is.no:entry
tinygrad = tinygrad_anydevice:ROW [extra]
second=other : ROW
no entry here
"""
    site.distribution("tool", "1.0", entry_points=text)
    site.distribution("empty", "1.0", entry_points="")
    unreadable = site.distribution("broken", "1.0")
    (unreadable / "entry_points.txt").write_bytes(b"[anydevice.engines]\n\xff = a:b")
    found = entry_points("anydevice.engines")
    assert [(e.distribution, e.name, e.target) for e in found] == [
        ("tool", "tinygrad", "tinygrad_anydevice:ROW"),
        ("tool", "second", "other : ROW"),
    ]


def test_the_same_distribution_twice_offers_its_entries_once(site, tmp_path, monkeypatch) -> None:
    for folder, target in ((site.folder, "old:ROW"), (tmp_path / "first", "new:ROW")):
        info = folder / "tool-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "entry_points.txt").write_text(f"[anydevice.group]\ntool = {target}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), *sys.path])
    assert [entry.target for entry in entry_points("anydevice.group")] == ["new:ROW"]


def test_a_package_is_found_without_being_imported(site) -> None:
    folder = site.package("torch")
    assert package_folder("torch") == folder
    assert "torch" not in sys.modules


def test_a_folder_without_code_is_no_package(site) -> None:
    (site.folder / "torch" / "lib").mkdir(parents=True)
    assert package_folder("torch") is None


def test_a_namespace_folder_with_a_compiled_module_is_one(site) -> None:
    assert package_folder("mlx") is None
    assert package_folder("mlx") is None
    folder = site.mlx("0.32.4")
    os.utime(site.folder, ns=(1, 1))
    assert package_folder("mlx") == folder


def test_a_module_without_a_spec_is_no_package(site, monkeypatch: pytest.MonkeyPatch) -> None:
    made_by_hand = types.ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", made_by_hand)
    assert package_folder("torch") is None


def test_a_built_in_module_has_no_folder() -> None:
    assert package_folder("sys") is None


def test_a_loaded_package_is_where_it_was_loaded_from() -> None:
    import numpy

    assert package_folder("numpy") == Path(numpy.__file__).parent
