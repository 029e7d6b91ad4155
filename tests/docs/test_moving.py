"""What the page on moving says of the code is true; its examples run elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from anydevice._arrays.stage import _BUFFERS, CHUNK, MOST_LANES
from anydevice._core.backends import BACKENDS
from anydevice._machine.engines.registry import BUILT_IN

PAGE = (Path(__file__).parents[2] / "docs/moving.md").read_text("utf-8")


def test_the_table_of_libraries_follows_from_which_library_drives_what() -> None:
    lines = re.findall(r"^\| .*\|$", PAGE.partition("## Which array")[2], re.MULTILINE)
    head, *rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[:7]]
    assert set(head[1:]) == set(BACKENDS)
    assert [row[0] for row in rows] == list(BUILT_IN)
    for library, *ends in rows:
        for backend, end in zip(head[1:], ends, strict=True):
            stays = library != "numpy" and library in BACKENDS[backend].engines
            assert end == (library if stays else "the engine's"), (library, backend)


def test_the_size_of_a_ring_is_that_of_the_code() -> None:
    most = MOST_LANES * _BUFFERS * CHUNK // 2**20
    assert f"at most {most} MiB" in PAGE
    assert MOST_LANES == 12, "the page says twelve"
