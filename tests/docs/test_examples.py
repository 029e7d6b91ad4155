"""Every example of the documentation runs: Python, commands, and the examples in docstrings.

A page is a session of its own, in a folder of its own. Its `python` blocks run one after the
other, and a `text` block right after one is what it prints. In a `console` block every line that
calls `anydevice` is run; the lines below it are what it prints, and a comment that says
"exit code 1" is held to that ("exit code 1 if …" allows 0 as well). In all of them `…` stands for
what differs from machine to machine. The folder holds the `config.json` of one model, which the
pages plan for, `examples` as in a clone, and a small language model, `stories260K`: what names it is
left out where there is no such folder beside the project or in `ANYDEVICE_DATA`.
"""

from __future__ import annotations

import ast
import doctest
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, takewhile, zip_longest
from pathlib import Path

import numpy
import pytest

import anydevice
from tests.docs.sessions import Sessions
from tests.plan.configs import LLAMA_8B

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {ROOT / "docs/coming-from.md"})
"""coming-from.md holds two spellings side by side, and has its own test."""

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:[A-Z_]+=\S* )*(?:anydevice|python -m anydevice)\b")
EXIT = re.compile(r"# exit code (\d+)( if)?")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, the line of its fence, and what comes after it."""

    language: str
    text: str
    line: int
    prints: str | None


@dataclass(frozen=True)
class Command:
    """One line of a console block, and what is said of it."""

    line: str
    prints: str
    exit_codes: tuple[int, ...]


def blocks_of(page: str) -> Iterator[Block]:
    found = list(FENCE.finditer(page))
    for match, following in zip_longest(found, found[1:]):
        after = None
        if (
            following
            and following[1] == "text"
            and not page[match.end() : following.start()].strip()
        ):
            after = following[2]
        yield Block(match[1], match[2], page[: match.start()].count("\n") + 1, after)


def commands_of(text: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        if not COMMAND.match(line):
            continue
        said = EXIT.search(line)
        codes = (0,) if said is None else (0, int(said[1])) if said[2] else (int(said[1]),)
        yield Command(line, output, codes)


def matches(shown: str, printed: str) -> bool:
    """Whether `printed` is what a page shows, with `…` for anything within a line or more."""
    pattern = ".*".join(re.escape(part) for part in _trimmed(shown).split("…"))
    return re.fullmatch(pattern, _trimmed(printed), re.DOTALL) is not None


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def stories260k() -> Path | None:
    """The folder of a small language model, if it is here."""
    beside = ROOT.parent / "shared" / "data"
    folder = Path(os.environ.get("ANYDEVICE_DATA") or beside) / "stories260K"
    return folder if folder.is_dir() else None


def can_run(text: str) -> bool:
    """Whether what an example needs is here."""
    if missing_libraries(text):
        return False
    return "stories260K" not in text or stories260k() is not None


def missing_libraries(text: str) -> list[str]:
    """Those that an example names and that are not installed."""
    named = [name for name in ("torch", "jax", "mlx") if re.search(rf"\b{name}\b", text)]
    return [name for name in named if find_spec(name) is None]


def skip_if_left_out(texts: list[str]) -> None:
    """What could run has run: the test is skipped for what could not."""
    missing = sorted({name for text in texts for name in missing_libraries(text)})
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed: what names it was left out")


def runnable(blocks: list[Block]) -> list[Block]:
    """The blocks that can run here: those that need what an earlier one lacks are left out, too."""
    kept, lost, imported = [], set[str](), set[str]()
    for block in blocks:
        nodes = list(ast.walk(ast.parse(block.text)))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        imports = {name for node in nodes for name in imported_by(node)}
        if can_run(block.text + (block.prints or "")) and lost.isdisjoint(used):
            kept.append(block)
            imported |= imports
        else:
            lost |= {name for node in nodes for name in made_by(node)} | (imports - imported)
    return kept


def made_by(node: ast.AST) -> list[str]:
    """The names that a node gives a value."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def imported_by(node: ast.AST) -> list[str]:
    names = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
    return [(each.asname or each.name).partition(".")[0] for each in names]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables of a user who has never used anydevice; the folder has a model, and examples."""
    model = tmp_path / "folder" / "Llama-3.1-8B"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(LLAMA_8B))  # what the pages call Llama-3.1-8B
    stories = stories260k()
    if stories is not None:
        (tmp_path / "folder" / "stories260K").symlink_to(stories)
    (tmp_path / "folder" / "examples").symlink_to(ROOT / "examples")  # as in a clone
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    ours = {k: v for k, v in os.environ.items() if not k.startswith("ANYDEVICE_")}
    commands = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    own = {"ANYDEVICE_HOME": str(tmp_path / "home"), "ANYDEVICE_SEED": "1"}
    return {**ours, "PATH": commands, **own}


TWO_CARDS = """
from anydevice import testing
machine = testing.fake_machine(cuda=["NVIDIA H100 80GiB", "NVIDIA L4 24GiB"])
machine.__enter__()
"""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks(page: Path, environment: dict[str, str], sessions: Sessions) -> None:
    run_blocks(page, environment, sessions)


@pytest.mark.needs("torch")
def test_the_readme_runs_on_a_fake_machine(environment: dict[str, str], sessions: Sessions) -> None:
    printed = run_blocks(ROOT / "README.md", environment, sessions, TWO_CARDS)
    assert printed[0].split() == ["cuda:0", "gpu", "torch"]


def run_blocks(
    page: Path, environment: dict[str, str], sessions: Sessions, before: str = ""
) -> list[str]:
    """What the blocks of a page print, compared with what it shows."""
    shown = [b for b in blocks_of(page.read_text("utf-8")) if b.language == "python"]
    blocks = runnable(shown)
    code, output, errors = sessions.run(
        [("before", 0, before), *((name_of(page), block.line, block.text) for block in blocks)],
        cwd=Path.cwd(),
        env=environment,
        # A machine without an accelerator may say so; every other warning is an error.
        filters=("error", "ignore:using cpu"),
    )
    assert code == 0, errors
    for block, printed in zip(blocks, output[1:], strict=True):
        if block.prints is not None:
            where = f"{name_of(page)}, line {block.line}, prints:\n{printed}"
            assert matches(block.prints, printed), where
    skip_if_left_out([block.text + (block.prints or "") for block in shown])
    return output[1:]


MAIN = """
import sys
from anydevice.cli.main import main

sys.argv = ["anydevice", *{words!r}]
try:
    code = main({words!r})
except SystemExit as ended:
    code = ended.code or 0
sys.stdout.write(chr(0) + str(code))
"""


def run_command(line: str, environment: dict[str, str], sessions: Sessions) -> tuple[int, str, str]:
    """The exit code and the output of a command: in a session, or in a shell if it needs one."""
    words = shlex.split(line, comments=True)
    variables = dict(word.split("=", 1) for word in takewhile(lambda each: "=" in each, words))
    words = words[len(variables) :]
    words = words[3:] if words[0] == "python" else words[1:]
    if re.search(r"[|<>&;$*]", line.partition("#")[0]):
        ended = subprocess.run(
            ["sh", "-c", line],
            capture_output=True,
            text=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=400,
        )
        return ended.returncode, ended.stdout, ended.stderr
    blocks = [("console", 0, MAIN.format(words=words))]
    failed, output, errors = sessions.run(
        blocks, cwd=Path.cwd(), env={**environment, **variables}, filters=("default",)
    )
    assert failed == 0, errors
    printed, _, code = output[0].rpartition(chr(0))
    return int(code), printed, errors


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_console_blocks(page: Path, environment: dict[str, str], sessions: Sessions) -> None:
    blocks = [b for b in blocks_of(page.read_text("utf-8")) if b.language == "console"]
    shown = [list(commands_of(block.text)) for block in blocks]
    for command in chain.from_iterable(takewhile(has_all, each) for each in shown):
        code, printed, errors = run_command(command.line, environment, sessions)
        said = f"$ {command.line}\n{printed}{errors}"
        assert code in command.exit_codes, said
        if command.prints.strip():
            assert matches(command.prints, printed), said
    skip_if_left_out([each.line + each.prints for each in chain.from_iterable(shown)])


def has_all(command: Command) -> bool:
    """Whether a command can run here; the later ones of its block may need what it did."""
    return can_run(command.line + command.prints)


# Examples of docstrings need not import these.
NAMES = {"anydevice": anydevice, "numpy": numpy} | {
    name: import_module(f"anydevice.{name}") for name in ("extend", "nn", "ops", "proofs", "testing")
}

# Ops say that they are of `anydevice.ops`: their examples run with that module.
OPS = set((SOURCE / "anydevice" / "_ops").glob("*.py"))
MODULES = sorted(
    path for path in set(SOURCE.rglob("*.py")) - OPS if ">>> " in path.read_text("utf-8")
)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_doctests(path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYDEVICE_HOME", environment["ANYDEVICE_HOME"])
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if parts[1] in ("_engines", "_libraries"):
        skip_if_left_out([parts[2]])
    module = import_module(".".join(part for part in parts if part != "__init__"))
    flags = doctest.ELLIPSIS | doctest.REPORT_NDIFF
    result = doctest.testmod(module, extraglobs=NAMES, optionflags=flags)
    assert result.attempted > 0
    assert result.failed == 0


def test_what_a_page_shows_is_compared() -> None:
    assert matches("cuda:0 … free\n", "cuda:0   80.0 GiB free")
    assert not matches("cuda:0", "cuda:0, and more")
    page = "```python\nprint(1)\n```\n\n```text\n1\n```\n"
    page += "```console\n$ anydevice x # exit code 2\n```\n"
    python, _, console = blocks_of(page)
    assert (python.prints, python.line) == ("1\n", 1)
    assert [c.exit_codes for c in commands_of(console.text)] == [(2,)]
