"""The words of the field, and none of a private dialect, wherever people read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Each is written as another word: what is meant stands beside it.
FORBIDDEN = {
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bwhole[ _]numbers?\b": "integer",
    r"\btruth[ _]values?\b": "boolean",
    r"\b(is|are) (not|no) numbers?\b(?! of)": "NaN",
    r"\bnot a number\b(?! of)": "NaN",
    r"\bno number\b(?! (is|of)\b)": "NaN",
    r"\belement[ _]types?\b": "dtype",
    r"\bdoes as well\b": "falls back",
    r"\bnests?\b": "tree",
    r"\bbut for\b": "except for",
}
PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern in FORBIDDEN), re.IGNORECASE)


def _texts() -> list[Path]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    code = [
        path
        for folder in ("src", "bench", "demo", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cl")
    ]
    return sorted([*pages, *code])


def test_the_words_of_the_field_are_used() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{number}: {match.group(0)!r} in {line.strip()!r}"
        for path in _texts()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for match in PATTERN.finditer(line)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["what mends it", "a whole number", "an element_type", "is not a number"], True),
        (["a nest of dicts", "all but for one"], True),
        (["recommended", "nested trees", "not a number of seconds"], False),
        (["no number is given twice"], False),
    ],
)
def test_words_of_the_old_dialect_are_found_and_no_others(lines: list[str], found: bool) -> None:
    assert [bool(PATTERN.search(line)) for line in lines] == [found] * len(lines)


PARTICIPLES = {"begun", "bound", "built", "chosen", "done", "drawn", "driven", "found", "given"}
PARTICIPLES |= {"grown", "held", "hidden", "kept", "known", "laid", "led", "left", "lost", "made"}
PARTICIPLES |= {"meant", "met", "said", "seen", "sent", "shown", "spent", "stood"}
PARTICIPLES |= {"taken", "thrown", "told", "understood", "written"}
"""Irregular ones; the others end in -ed."""

PARTICIPLE_NAMES: dict[str, str] = {}
"""Private functions that are called by a participle all the same, each with its reason."""

VERBS_IN_ED = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed"}

OPENINGS = ("What", "Which", "Those", "That", "Whose", "Where", "Of", "As", "Its")
"""No docstring opens with one of these: a verb, "Whether" or a noun says it sooner."""

NOT_VERBS = {
    "A",
    "All",
    "An",
    "Another",
    "Any",
    "At",
    "Both",
    "By",
    "Each",
    "Every",
    "First",
    "For",
}
NOT_VERBS |= {"From", "How", "If", "In", "It", "Like", "More", "No", "None", "Nothing", "On", "One"}
NOT_VERBS |= {"Only", "Our", "Several", "So", "Some", "The", "There", "These", "They", "This", "To"}
NOT_VERBS |= {"Two", "When", "Who", "Why", "With", "Without", "You", "Your"}
"""Openings of a public function's docstring that tell that it does not open with a verb."""

ASIDES = re.compile(r"\b(so many|nobody|whoever|what is named)\b", re.IGNORECASE)

NOT_LOCALS = {"asked", "each", "found", "held", "kept", "seen", "told"}
"""Names of no variable or argument: it is called what it is, such as `device`, `match`, `cache`."""

LOCALS = {"errors.py": 1, "_formats/gguf.py": 1, "_llm/generate.py": 2, "_llm/model.py": 1}
LOCALS |= {"_llm/sampling.py": 2}
"""How many a file may have: `asked` of an error is public, and the others are to be renamed."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _source() -> list[Path]:
    return sorted((ROOT / "src").rglob("*.py"))


def is_participle(name: str) -> bool:
    """Whether the whole name of a private function is a participle."""
    word = name.lstrip("_")
    return name.startswith("_") and (
        word in PARTICIPLES or (word.endswith("ed") and word not in VERBS_IN_ED and "_" not in word)
    )


def opening_faults(tree: ast.Module) -> Iterator[str]:
    """Yield each docstring, of code or of a value, that opens with one of `OPENINGS`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str) and text.split() and text.split()[0].rstrip(",:;") in OPENINGS:
                yield f"{node.lineno}: {text.splitlines()[0]}"


def verb_faults(tree: ast.Module) -> Iterator[str]:
    """Yield each docstring of a public function or method that does not open with a verb."""
    for node in _public(tree):
        text = ast.get_docstring(node)
        if text and text.split()[0].rstrip(",:;") in NOT_VERBS:
            yield f"{node.lineno}: {node.name}: {text.splitlines()[0]}"


def _public(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    bodies = [tree.body, *(each.body for each in classes if not each.name.startswith("_"))]
    for body in bodies:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = [ast.unparse(each) for each in node.decorator_list]
                is_value = any("property" in each for each in decorators)
                if not node.name.startswith("_") and not is_value:
                    yield node


def vague_locals(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each variable or argument that is called by a word of `NOT_LOCALS`.

    Fields of records are left out: an error's `asked` is public.
    """
    fields = {id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = "" if id(node) in fields else node.id
        if name in NOT_LOCALS:
            yield node.lineno


def test_variables_are_called_what_they_are() -> None:
    lines = {
        path.relative_to(ROOT / "src" / "anydevice").as_posix(): numbers
        for path in _source()
        if path.name != "_anydevice_pytest.py"
        and (numbers := list(vague_locals(ast.parse(path.read_text("utf-8")))))
    }
    more = {path: n for path, n in lines.items() if len(n) > LOCALS.get(path, 0)}
    assert not more, "lines of variables that are called by no noun"


def faults_of(text: str) -> Iterator[str]:
    """Yield the line and the kind of each fault."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and is_participle(node.name) and node.name not in PARTICIPLE_NAMES:
            yield f"{node.lineno}: a function is a verb and its object: {node.name}"
    for fault in opening_faults(tree):
        yield f"{fault} (a docstring opens with a verb or a noun)"
    for fault in verb_faults(tree):
        yield f"{fault} (the docstring of a public function opens with a verb)"
    for number, line in enumerate(text.splitlines(), 1):
        if ASIDES.search(line):
            yield f"{number}: {line.strip()}"


def test_names_and_sentences_need_no_second_reading() -> None:
    faults = [
        f"{path.relative_to(ROOT / 'src')}:{fault}"
        for path in _source()
        for fault in faults_of(path.read_text("utf-8"))
    ]
    assert not faults, f"{len(faults)}:\n" + "\n".join(faults)


def test_few_functions_are_called_by_a_participle() -> None:
    assert len(PARTICIPLE_NAMES) <= 15
    text = "\n".join(path.read_text("utf-8") for path in _source())
    unused = [name for name in PARTICIPLE_NAMES if f"def {name}(" not in text]
    assert not unused, "exceptions that are not needed any more"


def test_each_fault_is_found() -> None:
    planted = ast.parse(
        '''
def load(path):
    """The file, loaded."""

LIMIT = 3
"""What is allowed."""
'''
    )
    assert is_participle("_turned")
    assert is_participle("_held")
    assert not is_participle("_embed")
    assert not is_participle("_rotate_queries")
    assert len(list(opening_faults(planted))) == 1
    assert len(list(verb_faults(planted))) == 1
    assert ASIDES.search("so many rows")
    local = ast.parse("class Error(Record):\n  asked: int\ndef f(kept): [each for each in kept]")
    assert sorted(vague_locals(local)) == [3, 3]
