"""A model by its name on the hub: found among the files of the cache, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anydevice._plan.config import locate
from anydevice.errors import ConfigurationError

NAME = "meta-llama/Llama-3.1-8B"
FOLDER = "models--meta-llama--Llama-3.1-8B"


def snapshot(cache: Path, commit: str, *files: str) -> Path:
    folder = cache / FOLDER / "snapshots" / commit
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text("{}")
    return folder


def say_main_is(cache: Path, commit: str) -> None:
    (cache / FOLDER / "refs").mkdir()
    (cache / FOLDER / "refs" / "main").write_text(f"{commit}\n")


def test_a_path_that_exists_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / NAME
    here.mkdir(parents=True)
    snapshot(tmp_path / "cache", "a", "config.json")
    monkeypatch.chdir(tmp_path)
    assert locate(NAME, {"HF_HUB_CACHE": str(tmp_path / "cache")}) == Path(NAME)


def test_the_state_of_the_main_branch_is_taken(tmp_path: Path) -> None:
    main = snapshot(tmp_path, "aaa", "config.json")
    snapshot(tmp_path, "bbb", "config.json")
    os.utime(main, (1, 1))
    say_main_is(tmp_path, "aaa")
    assert locate(NAME, {"HF_HUB_CACHE": str(tmp_path)}) == main


def test_without_a_main_branch_the_newest_that_has_what_is_needed(tmp_path: Path) -> None:
    old = snapshot(tmp_path, "old", "config.json")
    middle = snapshot(tmp_path, "middle", "model.safetensors")
    newest = snapshot(tmp_path, "newest", "tokenizer.json")
    for age, folder in enumerate((old, middle, newest), 1):
        os.utime(folder, (age, age))
    assert locate(NAME, {"HF_HUB_CACHE": str(tmp_path)}) == middle


def test_a_main_branch_that_names_nothing_does_not_hide_the_others(tmp_path: Path) -> None:
    there = snapshot(tmp_path, "there", "config.json")
    say_main_is(tmp_path, "")
    assert locate(NAME, {"HF_HUB_CACHE": str(tmp_path)}) == there


@pytest.mark.parametrize(
    ("variable", "below"),
    [
        ("HF_HUB_CACHE", "."),
        ("HUGGINGFACE_HUB_CACHE", "."),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ],
)
def test_the_cache_folder(
    variable: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = snapshot(tmp_path / below, "a", "config.json")
    monkeypatch.setenv(variable, str(tmp_path))
    environment = {} if variable == "HOME" else {variable: str(tmp_path)}
    assert locate(NAME, environment) == folder


def test_a_model_that_is_nowhere_says_how_to_get_it(tmp_path: Path) -> None:
    snapshot(tmp_path, "a", "tokenizer.json")
    with pytest.raises(ConfigurationError, match=f"to get it: hf download {NAME}$") as error:
        locate(NAME, {"HF_HUB_CACHE": str(tmp_path)})
    assert str(tmp_path) in str(error.value)
    with pytest.raises(ConfigurationError, match=rf"hf download {NAME} \(a plan needs no more"):
        locate(NAME, {"HF_HUB_CACHE": str(tmp_path)}, planning=True)


def test_a_name_without_an_owner_is_not_one_to_download(tmp_path: Path) -> None:
    for planning in (False, True):
        with pytest.raises(ConfigurationError, match="such as 'org/stories260K'") as error:
            locate("stories260K", {"HF_HUB_CACHE": str(tmp_path)}, planning=planning)
        assert "hf download" not in str(error.value)


def test_a_snapshot_of_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, "a", "README.md", "._tiny.gguf")
    blob = tmp_path / FOLDER / "blobs" / "0123"
    blob.parent.mkdir()
    blob.write_bytes(b"GGUF")
    (folder / "Tiny.Q4_K_M.GGUF").symlink_to(blob)
    assert locate(NAME, {"HF_HUB_CACHE": str(tmp_path)}) == folder / "Tiny.Q4_K_M.GGUF"
    assert locate(str(folder)) == folder / "Tiny.Q4_K_M.GGUF"


def test_several_gguf_files_are_listed(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, "a", "tiny.Q4_0.gguf", "tiny.Q8_0.gguf")
    listed = r"2 GGUF files \(tiny\.Q4_0\.gguf, tiny\.Q8_0\.gguf\); give the path of one"
    for name in (NAME, str(folder)):
        with pytest.raises(ConfigurationError, match=listed) as error:
            locate(name, {"HF_HUB_CACHE": str(tmp_path)})
        assert str(folder / "tiny.Q4_0.gguf") in str(error.value)


def test_a_gguf_file_beside_a_model_does_not_hide_it(tmp_path: Path) -> None:
    both = snapshot(tmp_path, "a", "config.json", "model.safetensors", "x.gguf")
    assert locate(str(both)) == both
    only_config = snapshot(tmp_path, "b", "config.json", "x.gguf")
    assert locate(str(only_config)) == only_config / "x.gguf"
    (only_config / "y.gguf").touch()
    assert locate(str(only_config)) == only_config  # its config is enough for a plan


@pytest.mark.parametrize("path", ["/nowhere/config.json", "config.json", "a/b/c", "./x", "~/x y"])
def test_what_is_no_name_is_said_to_be_no_file(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file or folder; write the path"):
        locate(path, {"HF_HUB_CACHE": str(tmp_path)})
