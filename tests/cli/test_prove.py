"""`anydevice prove`: what is proved and refuted, the exit codes, and the files that are written."""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice._proofs.checking.certificate import read_certificate
from tests.cli.conftest import Anydevice, Process
from tests.proofs.checking.theorems import certificate, dense, executed, leaf_tree, query
from tests.proofs.checking.written import onnx_of, vnnlib_of

NETWORK = dense((3, 8, 8, 2))
LEAST = executed(NETWORK, np.random.default_rng(0).uniform(-1, 1, (50_000, 3))).min(0)
TRUE = query([-1] * 3, [1] * 3, np.eye(2), np.ceil(0.25 - LEAST))
FALSE = query([-1] * 3, [1] * 3, np.eye(2), np.floor(-LEAST))


@pytest.fixture(autouse=True)
def files(project: Path) -> None:
    """A model, a property that holds, and one that does not, where the command runs."""
    Path("net.onnx").write_bytes(onnx_of(NETWORK))
    Path("true.vnnlib").write_text(vnnlib_of(TRUE))
    Path("false.vnnlib").write_text(vnnlib_of(FALSE, version=2))


def test_a_proof_and_its_certificate(anydevice: Anydevice) -> None:
    out = anydevice.text("prove", "net.onnx", "true.vnnlib", "--certificate", "p.proof")
    assert re.fullmatch(
        r"proved for every execution in float32, \d+ parts, in \d+\.\d s\n  certificate  p.proof\n",
        out,
    )
    out = anydevice.text("prove", "net.onnx", "true.vnnlib", "--check", "p.proof")
    assert re.fullmatch(r"proved again, in float32, \d+ parts\n", out)


def test_a_check_without_an_execution_says_so(
    anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    anydevice.text("prove", "net.onnx", "true.vnnlib", "--certificate", "p.proof")
    for name in ("onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    check = ("prove", "net.onnx", "true.vnnlib", "--check", "p.proof")
    out = anydevice.text(*check, "--results", "result", code=0)
    words = "checked for the network as read; reading not compared with an execution, in float32, "
    assert out.startswith(words)
    assert Path("result").read_text() == "unknown\n"
    assert anydevice.text(*check, code=3) == out
    assert anydevice.json(*check, code=3)["result"] == "checked"
    err = anydevice.refusal("prove", "net.onnx", "true.vnnlib")
    assert "pip install onnx onnxruntime" in err


def test_one_part_is_said_as_one(anydevice: Anydevice) -> None:
    far = query([-1] * 3, [1] * 3, np.eye(2), np.ceil(1000 - LEAST))
    Path("easy.vnnlib").write_text(vnnlib_of(far))
    out = anydevice.text("prove", "net.onnx", "easy.vnnlib", "--certificate", "p.proof")
    assert ", 1 part, in " in out
    out = anydevice.text("prove", "net.onnx", "easy.vnnlib", "--check", "p.proof")
    assert out == "proved again, in float32, 1 part\n"


def test_a_counterexample(anydevice: Anydevice) -> None:
    code, out, err = anydevice("prove", "net.onnx", "false.vnnlib", "--json", "--precision", "real")
    found = json.loads(out)
    assert (code, err, found["result"], found["precision"]) == (1, "", "counterexample", "real")
    x = np.array(found["x"])
    assert (np.abs(x) <= 1).all()
    y = executed(NETWORK, x)
    assert y == pytest.approx(found["y"])
    bad = y + [float(c) for c in FALSE.constants]
    assert bad.min() <= 0
    out = anydevice.text("prove", "net.onnx", "false.vnnlib", code=1)
    assert out.startswith("counterexample in ")


@pytest.mark.parametrize("option", [(), ("--certificate", "c.proof")])
def test_a_counterexample_names_conditions(anydevice: Anydevice, option: tuple[str, ...]) -> None:
    out = anydevice.text("prove", "net.onnx", "false.vnnlib", *option, code=1)
    first, x, y, why, *rest = out.splitlines()
    assert re.fullmatch(r"counterexample in \d+\.\d s", first)
    inputs = re.fullmatch(r"  x  \[(.+), (.+), (.+)\]", x)
    outputs = re.fullmatch(r"  y  \[(.+), (.+)\]", y)
    assert inputs
    assert outputs
    for text in inputs.groups():  # the shortest text of a float32
        assert text == str(np.float32(text))
    values = executed(NETWORK, np.array(inputs.groups(), np.float32))
    assert values == pytest.approx([float(text) for text in outputs.groups()])
    said = re.fullmatch(r"  violation  (\S+): Y_([01]) <= (\S+)", why)
    assert said
    number, bound = int(said[2]), float(said[3])
    assert bound == -float(FALSE.constants[number])
    assert float(said[1]) == pytest.approx(bound - values[number], rel=1e-3)
    none = "  certificate  none: a counterexample has none; x and y show it"
    assert rest == ([none] if option else [])
    assert not Path("c.proof").exists()


def test_of_many_numbers_the_first_are_printed(anydevice: Anydevice) -> None:
    network = dense((784, 4, 20))
    Path("wide.onnx").write_bytes(onnx_of(network))
    y = executed(network, np.zeros(784))
    least, other = int(y.argmin()), int(y.argmax())
    row = np.zeros(20)
    row[least], row[other] = 1, -1
    asked = query([-0.1] * 784, [0.1] * 784, [row.tolist()], [0])
    Path("wide.vnnlib").write_text(vnnlib_of(asked))
    out = anydevice.text("prove", "wide.onnx", "wide.vnnlib", code=1)
    _, first, second, why = out.splitlines()
    more = r"(?:-?[\d.e-]+, ){8}… %d more: --json has all of them\]"
    assert re.fullmatch(r"  x  \[" + more % 776, first)
    assert re.fullmatch(r"  y  \[" + more % 12, second)
    assert re.fullmatch(rf"  violation  \S+: Y_{least} <= Y_{other}", why)
    found = anydevice.json("prove", "wide.onnx", "wide.vnnlib", code=1)
    assert (len(found["x"]), len(found["y"])) == (784, 20)
    assert found["violated"] == [f"Y_{least} <= Y_{other}"]


def test_a_ball_around_an_input_of_a_file(anydevice: Anydevice) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (9000, 3)).astype(np.float32)
    network = dense((3, 8, 8, 2), 4)
    Path("net.onnx").write_bytes(onnx_of(network))
    y = executed(network, x)
    middle = np.abs(y[:, 0] - y[:, 1]).argmin()  # near an input of the other class
    label = int(y[middle].argmax())
    np.save("x.npy", x[middle])
    ball = ("prove", "net.onnx", "--ball", "x.npy", "--label", str(label))
    close = (*ball, "--eps", "1e-9")
    assert anydevice.text(*close, "--certificate", "p.proof").startswith("proved for every")
    assert anydevice.text(*close, "--check", "p.proof").startswith("proved again, in float32")
    far = (*ball, "--eps", "3", "--low", "-1", "--high", "1")
    first, *_ = anydevice.text(*far, code=1).splitlines()
    headline = re.fullmatch(rf"counterexample in \S+ s: class {label} became (\d), by (\S+)", first)
    found = anydevice.json(*far, code=1)
    assert np.abs(found["x"]).max() <= 1
    values = executed(network, np.array(found["x"]))
    assert headline
    assert int(headline[1]) == 1 - label
    assert float(headline[2]) == pytest.approx(values[1 - label] - values[label], rel=1e-3)
    err = anydevice("prove", *ball[1:], "--eps", "0.01", "--check", "p.proof")[2]
    assert "about other queries" in err


@cache
def _hard() -> tuple[bytes, str]:
    network = dense((6, 30, 30, 30, 1), 3)
    least = executed(network, np.random.default_rng(0).uniform(-1, 1, (200_000, 6))).min()
    asked = query([-1] * 6, [1] * 6, [[1]], [float(np.round((0.9 - least) * 8) / 8)])
    return onnx_of(network), vnnlib_of(asked)


def hard() -> None:
    """A property that holds by a hair, of a network with many cases."""
    model, claim = _hard()
    Path("hard.onnx").write_bytes(model)
    Path("hard.vnnlib").write_text(claim)


def test_what_stays_undecided(anydevice: Anydevice) -> None:
    hard()
    words = ("--timeout", "0.2", "--certificate", "c.proof")
    out = anydevice.text("prove", "hard.onnx", "hard.vnnlib", *words, code=3)
    assert re.match(r"undecided \(time\) in \d+\.\d s: \d+\.\d% proved, worst bound -", out)
    assert out.endswith("\n  certificate  none: only a proof has one\n")
    found = anydevice.json("prove", "hard.onnx", "hard.vnnlib", "--timeout", "0.2", code=3)
    assert (found["result"], found["reason"]) == ("undecided", "time")
    assert "certificate" not in found
    assert 0 <= found["proved_share"] < 1


@pytest.mark.parametrize("name", ["net.onnx", "true.vnnlib"])
@pytest.mark.parametrize("option", ["--certificate", "--results"])
def test_no_file_replaces_what_was_read(anydevice: Anydevice, option: str, name: str) -> None:
    before = Path(name).read_bytes()
    err = anydevice.refusal("prove", "net.onnx", "true.vnnlib", option, f"./{name}")
    assert f"./{name} cannot be written: it is what" in err
    assert Path(name).read_bytes() == before


def test_files_are_checked_first(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_: object, **__: object) -> None:
        raise AssertionError("it was searched before")

    monkeypatch.setattr("anydevice._proofs.prove.prove", unwanted)
    Path("is.proof").mkdir()
    for path, why in (("is.proof", "Is a directory"), ("no/such.proof", "there is no folder no")):
        for option in ("--certificate", "--results"):
            err = anydevice.refusal("prove", "net.onnx", "true.vnnlib", option, path)
            assert f"{path} cannot be written: {why}" in err
    assert not Path("no").exists()
    code, _, err = anydevice("prove", "net.onnx", "true.vnnlib", "--certificate", ".")
    assert (code, ". cannot be written: Is a directory" in err) == (2, True)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """A folder in which nothing can be written once a search is over."""
    from anydevice._proofs import prove as proving

    search, folder = proving.prove, Path("lost")

    def prove(*words: Any, **options: Any) -> Any:
        result = search(*words, **options)
        folder.rmdir()
        folder.touch()
        return result

    def made() -> Path:
        folder.unlink(missing_ok=True)
        folder.mkdir()
        return folder

    monkeypatch.setattr(proving, "prove", prove)
    return made


@pytest.mark.parametrize(
    ("claim", "option", "name"),
    [
        ("true", "--certificate", "c.proof"),
        ("true", "--results", "r.txt"),
        ("false", "--results", "r.txt"),
    ],
)
def test_what_was_found_is_said_where_a_file_of_it_cannot_be_written(
    anydevice: Anydevice, lost: Callable[[], Path], claim: str, option: str, name: str
) -> None:
    kind = {"true": "proved", "false": "counterexample"}[claim]
    words = ["net.onnx", f"{claim}.vnnlib", option, str(lost() / name)]
    code, out, err = anydevice("prove", *words)
    assert code == 2
    assert out.startswith(f"{kind} ")
    assert "certificate" not in out
    why = f"lost/{name} cannot be written: "
    assert (err.startswith(f"anydevice: {why}"), err.count("\n")) == (True, 1)
    lost()
    code, out, err = anydevice("prove", *words, "--json")
    found = json.loads(out)
    assert (code, err, found["result"], found["code"]) == (2, "", kind, "transfer_failed")
    assert found["error"].startswith(why)
    assert ("parts" in found, "x" in found) == (claim == "true", claim == "false")


def test_every_file_that_can_be_written_is(anydevice: Anydevice, lost: Callable[[], Path]) -> None:
    folder = lost()
    words = ["net.onnx", "true.vnnlib", "--certificate", str(folder / "c.proof")]
    code, _, err = anydevice("prove", *words, "--results", "r.txt")
    assert (code, Path("r.txt").read_text()) == (2, "unsat\n")
    assert [line.split(" ")[1] for line in err.splitlines()] == ["lost/c.proof"]
    lost()
    code, out, _ = anydevice("prove", *words, "--results", str(folder / "r.txt"), "--json")
    assert (code, json.loads(out)["error"].count("cannot be written")) == (2, 2)


def test_a_check_prints_one_json(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._proofs import files

    anydevice("prove", "net.onnx", "true.vnnlib", "--certificate", "p.proof")
    folder, check = Path("lost"), files.check
    folder.mkdir()

    def lose(*words: Any) -> int:
        folder.rmdir()
        folder.touch()
        return check(*words)

    monkeypatch.setattr(files, "check", lose)
    words = ("net.onnx", "true.vnnlib", "--check", "p.proof", "--results", "lost/r.txt", "--json")
    code, out, _ = anydevice("prove", *words)
    found = json.loads(out)
    assert (code, found["result"], "cannot be written" in found["error"]) == (2, "proved", True)


def test_results_as_vnncomp_wants_them(anydevice: Anydevice) -> None:
    hard()
    result = Path("r.txt")
    code, _, _ = anydevice("prove", "net.onnx", "true.vnnlib", "--results", "r.txt")
    assert (code, result.read_text()) == (0, "unsat\n")
    code, _, _ = anydevice("prove", "net.onnx", "false.vnnlib", "--results", "r.txt")
    assert code == 0
    first, *values = result.read_text().splitlines()
    assert first == "sat"
    pairs = re.findall(r"\(([XY])_(\d) ([-+.\de]+)\)", "\n".join(values))
    assert [kind + number for kind, number, _ in pairs] == ["X0", "X1", "X2", "Y0", "Y1"]
    assert values[0].startswith("((X_0 ")
    assert values[-1].endswith("))")
    line = ("hard.onnx", "hard.vnnlib", "--timeout", "0.1", "--results", "r.txt")
    assert (anydevice("prove", *line)[0], result.read_text()) == (0, "timeout\n")
    code, _, err = anydevice("prove", "no.onnx", "true.vnnlib", "--results", "r.txt")
    assert (code, result.read_text()) == (2, "error\n")
    assert "no.onnx" in err


def test_wrong_files_and_arguments_are_no_counterexamples(anydevice: Anydevice) -> None:
    Path("bad.onnx").write_bytes(b"\x00\x01 bad")
    Path("bad.vnnlib").write_text("(assert (<= Y_0 1)")
    Path("empty").touch()
    for words, said in [
        (("no.onnx", "true.vnnlib"), "no.onnx cannot be read: No such file or directory\n"),
        (("bad.onnx", "true.vnnlib"), "bad.onnx: it is no ONNX model"),
        (("net.onnx", "bad.vnnlib"), "bad.vnnlib: at 'a list of forms"),
        (("net.onnx", "true.vnnlib", "--check", "net.onnx"), "net.onnx: it does not begin as a"),
        (("empty", "true.vnnlib"), "empty is empty\n"),
        (("net.onnx", "empty"), "empty is empty\n"),
        (("net.onnx",), "required: PROPERTY"),
        (("net.onnx", "--ball", "x.npy", "--eps", "1"), "--label 3, not both"),
        (("net.onnx", "--ball", "x.npy", "--eps", "1", "--label", "0"), "x.npy cannot be read"),
        (
            ("net.onnx", "--ball", "bad.onnx", "--eps", "1", "--label", "0"),
            "bad.onnx is no file of numbers that numpy.save",
        ),
        (("net.onnx", "true.vnnlib", "--timeout", "soon"), "'soon' is not a number of seconds"),
        (("net.onnx", "true.vnnlib", "--timeout", "-1"), "'-1' is not a number of seconds"),
        (("net.onnx", "true.vnnlib", "--engine", "none"), "none"),
    ]:
        code, out, err = anydevice("prove", *words)
        assert (code, out) == (2, ""), words
        assert said in err
    code, out, err = anydevice("prove", "bad.onnx", "true.vnnlib", "--json")
    assert (code, json.loads(out)["code"], err) == (2, "bad_setting", "")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_no_endless_file_is_read(anydevice: Anydevice) -> None:
    os.mkfifo("pipe")
    for words in (("pipe", "true.vnnlib"), ("net.onnx", "pipe"), ("/dev/zero", "true.vnnlib")):
        code, _, err = anydevice("prove", *words)
        assert (code, "cannot be read: it is not an ordinary file" in err) == (2, True)


def test_results_that_cannot_be_written_are_said_once(anydevice: Anydevice) -> None:
    """And not with the exit code of a counterexample."""
    err = anydevice.refusal("prove", "net.onnx", "true.vnnlib", "--results", ".")
    assert err.count("cannot be written") == 1


def test_a_refused_certificate_names_the_leaf(anydevice: Anydevice) -> None:
    tree = leaf_tree([[255, 255]])
    Path("open.proof").write_bytes(certificate(NETWORK, [TRUE], [tree]).to_bytes())
    code, out, err = anydevice("prove", "net.onnx", "true.vnnlib", "--check", "open.proof")
    assert (code, out) == (1, "")
    assert "open.proof is refused: query 1, leaf 1 of 1 is not proved" in err
    found = anydevice.json("prove", "net.onnx", "false.vnnlib", "--check", "open.proof", code=1)
    assert (found["result"], found["code"]) == ("refused", "wrong_answer")
    assert "about other queries" in found["error"]
    anydevice("prove", "net.onnx", "true.vnnlib", "--certificate", "p.proof")
    data = read_certificate(Path("p.proof").read_bytes())
    assert len(data.model) == 64
    Path("p.proof").write_bytes(data._replace(model="0" * 64).to_bytes())
    code, _, err = anydevice("prove", "net.onnx", "true.vnnlib", "--check", "p.proof")
    assert code == 1
    assert "another file than net.onnx" in err


def test_a_certificate_that_unpacks_to_more_than_64_mib_is_refused(anydevice: Anydevice) -> None:
    check = ("prove", "net.onnx", "true.vnnlib", "--check", "p.proof")
    anydevice("prove", "net.onnx", "true.vnnlib", "--certificate", "p.proof")
    first, _, packed = Path("p.proof").read_bytes().partition(b"\n")
    header, _, rest = zlib.decompress(packed).partition(b"\n")
    padded = header + b" " * (64 << 20) + b"\n" + rest
    Path("p.proof").write_bytes(first + b"\n" + zlib.compress(padded, 1))
    assert "unpacks to over 64 MiB" in anydevice.refusal(*check)
    assert anydevice(*check, "--unpack", "65")[0] == 0


def test_a_cold_start_is_quick(process: Process) -> None:
    """In the time that CPUs spend, because others may use them too."""
    import resource

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = []
    for _ in range(3):
        begin = spent()
        done = process("prove", "net.onnx", "true.vnnlib")
        times.append(spent() - begin)
        assert done.returncode == 0
    assert min(times) < 0.8, times
