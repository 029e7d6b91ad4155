"""What the README and the pages claim is true of the code; their examples run elsewhere."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from anydevice import __version__
from anydevice._core.backends import BACKENDS
from anydevice._core.engine import Engine
from anydevice._machine.choose.scope import _LOCAL_RANKS
from anydevice._machine.engines.registry import BUILT_IN
from anydevice._machine.settings.config import SETTINGS
from tests.programs import run_python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def rows(text: str, after: str) -> list[list[str]]:
    """The cells of the first table below a line, without its head."""
    table = re.search(r"^\|.*?(?=^[^|]|\Z)", text.partition(after)[2], re.MULTILINE | re.DOTALL)
    assert table is not None, after
    lines = table[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def test_the_table_of_backends_is_that_of_the_code() -> None:
    shown = rows(page("engines.md"), "## Backends")
    expected = [
        [
            f"`{row.name}`",
            row.vendor,
            ", ".join(row.platforms),
            ", ".join(row.engines),
            f"{row.tier}: {row.tier_note}",
        ]
        for row in BACKENDS.values()
    ]
    assert shown == expected


def words_beside_code(text: str) -> int:
    """The words of a page that are read: not code, not what pictures are described by, no links."""
    read = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    read = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", read)
    read = re.sub(r"\]\([^)]*\)", "]", read)
    return len(re.findall(r"\w[\w'.,–-]*", read))


def test_the_readme_is_short_and_shows() -> None:
    assert words_beside_code(README) <= 900
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert len(pictures) >= 3
    assert all((ROOT / picture).suffix == ".svg" for picture in pictures)
    text = "One two `three`.\n\n```python\nfour\n```\n![five](six.svg)\n[seven](eight.md)\n"
    assert words_beside_code(text) == 4


def test_each_speed_up_has_the_command_that_repeats_it() -> None:
    shown = rows(README, "It is for people")
    assert len(shown) >= 5
    for what, _, figure, command in shown:
        assert re.search(r"\*\*\d", figure), what
        [words] = _code(command)
        found = re.search(r"bench/\w+\.py", words)
        assert (ROOT / found[0]).exists() if found else words == "make bench", what


def test_the_extras_that_it_names_exist() -> None:
    sentences = README.partition("## Install")[2].partition("##")[0]
    named = {word for words in re.findall(r"`([a-z ]+)`", sentences) for word in words.split()}
    assert named == set(BUILT_IN) - {"numpy"} | set(BACKENDS) - {"cpu", "opencl"} | {"llm"}
    assert named <= set(PROJECT["optional-dependencies"])


def test_the_order_every_setting_and_variable_are_on_the_page() -> None:
    text = page("choosing.md")
    assert f"the order of backends: {', '.join(BACKENDS)}\n" in text
    settings = {name for cells in rows(text, "## Settings of a run") for name in _code(cells[0])}
    assert settings == set(SETTINGS)
    variables = {name for cells in rows(text, "## Environment") for name in _code(cells[0])}
    assert {"ANYDEVICE_DEVICE", "ANYDEVICE_ENGINE", "ANYDEVICE_HOME", *_LOCAL_RANKS} <= variables


def test_the_protocol_on_the_page_is_that_of_the_code() -> None:
    shown = {
        _code(cells[0])[0].partition("(")[0] for cells in rows(page("engines.md"), "# Engines")
    }
    methods = {name for name in vars(Engine) if not name.startswith("_")}
    assert shown == methods


@pytest.mark.parametrize("stage", ["Driver", "Device", "Library"])
def test_what_troubleshooting_quotes_is_what_the_code_says(stage: str) -> None:
    said = "\n".join(
        " ".join(node.value.split())  # tables of texts are wrapped
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    for cells in rows(page("troubleshooting.md"), f"\n## {stage}\n"):
        for part in re.split(r"…|\d+|=|\(|\)|/dev/|: ", cells[0]):
            assert " ".join(part.strip("; ,").split()) in said, f"{cells[0]}: {part!r}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_to_a_file_leads_to_one(path: Path) -> None:
    for target, anchor in re.findall(
        r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", path.read_text("utf-8")
    ):
        there = path.parent / target if target else path
        assert there.exists(), f"{path.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", there.read_text("utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{path.name}: {target}#{anchor}"


def test_the_changelog_knows_this_version() -> None:
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


STORY = ("find", "choose", "check", "move", "chat", "train", "prove")


def story(*lines: str) -> CompletedProcess[str]:
    """The demo, run by some lines of Python."""
    program = ["import sys", "sys.path.insert(0, 'demo')", "import story", *lines]
    return run_python("-c", "\n".join(program), cwd=ROOT)


@pytest.mark.skipif(
    not any(find_spec(name) for name in ("torch", "jax", "mlx")),
    reason="training needs torch, jax or mlx",
)
def test_the_demo_tells_the_whole_story() -> None:
    ended = story("sys.exit(story.main())")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *lines, blank, last = ended.stdout.splitlines()
    told = {line.split()[1]: line for line in lines}
    assert (tuple(told), blank) == (STORY, "")
    assert all(re.fullmatch(r"[✓–] .+  \[\d+\.\d s\]", line) for line in lines)
    assert "every number is the same" in told["move"]
    assert re.search(r"loss \d\.\d\d → 0\.\d\d .* reads 9\d\.\d% of 360 new digits", told["train"])
    assert "is always read as a" in told["prove"]
    if told["chat"].startswith("✓"):
        assert "'The capital of Japan is Tokyo.'" in told["chat"]
    assert re.match(r"\d+ s in all", last)


def test_the_demo_says_what_it_leaves_out_and_goes_on() -> None:
    ended = story(
        "from anydevice import UnsupportedError, nn",
        "def train(*_, **__): raise UnsupportedError('no engine has gradients')",
        "nn.train, story.TARGET = train, story.Path('nowhere.gguf')",
        "sys.exit(story.main())",
    )
    assert ended.returncode == 0, ended.stderr
    assert "– chat    nowhere.gguf is not here; make chat fetches it" in ended.stdout
    assert "– train   no engine has gradients: pip install" in ended.stdout
    assert "– prove   there is no trained model" in ended.stdout


def test_the_demo_ends_with_1_on_a_device_that_does_not_compute() -> None:
    ended = story(
        "from anydevice import testing",
        "from anydevice._core.finding import Facts, RawDevice, BackendScan",
        "seen = RawDevice(0, 'gpu', Facts('a card', uuid='GPU-1'))",
        "card = BackendScan('cuda', True, (seen,), engines=('numpy',))",
        "with testing.fake_machine(scans=[card]):",  # NumPy in the child knows no cuda:0
        "    sys.exit(story.main())",
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "✗ check   cuda:0: " in ended.stdout
    assert "anydevice doctor says more" in ended.stdout
    assert "move" not in ended.stdout


def test_the_demo_says_what_is_wrong_with_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYDEVICE_DEVICE", "banana")
    ended = story("sys.exit(story.main())")
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "✗ choose  ANYDEVICE_DEVICE: there is no backend 'banana'" in ended.stdout
    assert "check" not in ended.stdout


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
