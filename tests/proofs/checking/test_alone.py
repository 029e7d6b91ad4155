"""The checker stands alone: it needs NumPy and nothing else, and is short enough to be read."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import numpy as np

from anydevice._proofs import checking
from tests.proofs.checking.theorems import certificate, dense, executed, proved, query
from tests.proofs.checking.written import onnx_of, vnnlib_of

FOLDER = Path(checking.__file__).parent

PROGRAM = """
import sys

ALLOWED = ("anydevice", "anydevice._core", "anydevice._core.lazy")
ALLOWED += ("anydevice._proofs", "anydevice._proofs.checking")

class Wall:
    def find_spec(self, name, path=None, target=None):
        root = name.split(".")[0]
        ours = name in ALLOWED or name.startswith("anydevice._proofs.checking.")
        if root != "numpy" and not ours and root not in sys.stdlib_module_names:
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Wall())
from anydevice._proofs.checking.certificate import read_certificate
from anydevice._proofs.checking.checker import check
from anydevice._proofs.checking.operators import read_onnx
from anydevice._proofs.checking.readers import read_vnnlib

folder = sys.argv[1]
network, _ = read_onnx(open(f"{folder}/net.onnx", "rb").read())
_, _, queries = read_vnnlib(open(f"{folder}/p.vnnlib").read())
print(check(network, queries, read_certificate(open(f"{folder}/p.proof", "rb").read())))
try:
    import anydevice.errors
except ImportError as error:
    print(error)
"""


def test_checking_imports_numpy_alone(tmp_path: Path) -> None:
    network = dense((3, 8, 8, 2))
    least = executed(network, np.random.default_rng(0).uniform(-1, 1, (9000, 3))).min(0)
    question = query([-1] * 3, [1] * 3, np.eye(2), np.ceil(0.5 - least))  # integers in decimals
    tree = proved(network, question)
    (tmp_path / "net.onnx").write_bytes(onnx_of(network, gemm=True))
    (tmp_path / "p.vnnlib").write_text(vnnlib_of(question))
    (tmp_path / "p.proof").write_bytes(certificate(network, [question], [tree]).to_bytes())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        str(tree.leaves),
        "anydevice.errors must not be imported",
    ], done.stderr


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_no_file_imports_anything_else() -> None:
    for file in FOLDER.glob("*.py"):
        for name in imports(file):
            root = name.split(".")[0]
            ours = name.startswith("anydevice._proofs.checking")
            assert root == "numpy" or root in sys.stdlib_module_names or ours, (file.name, name)


def lines_of_code(file: Path) -> int:
    """Lines that are neither empty nor comments nor docstrings."""
    text = file.read_text("utf-8")
    strings = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    words = {n for node in strings for n in range(node.lineno, (node.end_lineno or 0) + 1)}
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in {*nothing, tokenize.ENDMARKER}
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - words)


def test_the_core_is_short() -> None:
    """Bounds over affine and piecewise linear networks, and trees: at most 250 lines of code."""
    assert sum(lines_of_code(FOLDER / name) for name in ("bounds.py", "checker.py")) <= 250


def test_what_is_trusted_is_as_short_as_the_documentation_says() -> None:
    """All that decides whether a certificate proves its theorem, beside what reads the model."""
    reading = {"operators.py", "readers.py"}
    files = [file for file in FOLDER.glob("*.py") if file.name not in reading]
    assert sum(map(lines_of_code, files)) <= 920
    docs = Path(__file__).parents[3] / "docs"
    assert "A checker of 920 lines" in (docs / "proofs.md").read_text("utf-8")
    assert "920 lines of NumPy" in (docs / "compare.md").read_text("utf-8")


def test_the_readers_are_short() -> None:
    """The formats of ONNX and VNN-LIB; what each operator of ONNX means stands beside them.

    Ten lines pass over what parsers of protocol buffers pass over, and limit the time.
    """
    assert lines_of_code(FOLDER / "readers.py") <= 230
