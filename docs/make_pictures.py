"""Makes the pictures in docs/pictures from real runs: `make pictures`, or with names, only those.

    python docs/make_pictures.py [--redraw] [NAME …]

`--redraw` draws the pictures of a run again whose figures are kept beside them, and runs nothing.

Each picture carries the command that it shows, the day, and a hash of what its command prints for
fixed values. The tests compute that hash anew: a picture is out of date as soon as the command
prints something else, and not before.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import platform
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import proof_boxes
from terminal_picture import Cell, drawn, screen_of, text_of

import anydevice
from anydevice import nn, testing
from anydevice._bench.results import read_results
from anydevice._core.finding import BackendScan, Facts, RawDevice, Reason
from anydevice._report.benchmark import measurement_lines, summary_lines
from anydevice.cli.main import main as command_line
from anydevice.cli.printing import Output

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/pictures"
MODEL = ROOT / ".cache/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DATA = Path(os.environ.get("ANYDEVICE_DATA") or ROOT.parent / "shared/data")
COLUMNS, LONGEST = 88, 300.0
"""Columns of a terminal, and the seconds that a command may take."""

CARD = BackendScan(
    "cuda",
    True,
    (
        RawDevice(
            0,
            "gpu",
            Facts(
                "NVIDIA GeForce RTX 4090",
                total_memory=24 * 2**30,
                free_memory=23 * 2**30,
                compute_capability="8.9",
                driver_version="580.65",
                runtime_version="13.0",
            ),
        ),
    ),
)
"""A card whose driver answers, beside the libraries that are really installed here."""

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PLAN = "plan Llama-3.1-70B/config.json --on 2xH100 --context 32k"


class MissingError(Exception):
    """A picture cannot be made here; the message says what it needs."""


class Picture(NamedTuple):
    """How a picture is made, and what its command prints for fixed values."""

    command: str
    make: Callable[[str], str]
    """From its metadata to the picture."""
    shows: Callable[[], str]
    drawn_from_file: bool = False
    """Whether `shows` is the picture itself, of figures that are kept beside it."""


def captured(
    words: Sequence[str], *, folder: Path, typed: Sequence[tuple[str, str]] = (), rows: int = 50
) -> list[list[Cell]]:
    """What a command shows in a terminal; a text is typed once the pattern before it is there."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(primary, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))
    kept = {name: value for name, value in os.environ.items() if "COLOR" not in name}
    kept |= {"TERM": "xterm", "PYTHONUTF8": "1", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(
        [sys.executable, *words],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        cwd=folder,
        env={**kept, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "docs")))},
        start_new_session=True,
    )
    os.close(secondary)
    text, waiting, deadline = "", list(typed), time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        if select.select([primary], [], [], 0.1)[0]:
            try:
                piece = os.read(primary, 65536)
            except OSError:  # the last process on it has ended
                break
            if not piece:
                break
            text += piece.decode("utf-8", "replace")
        elif process.poll() is not None:
            break
        if waiting and re.search(waiting[0][0], text):
            os.write(primary, waiting.pop(0)[1].encode())
    process.kill()
    process.wait()
    os.close(primary)
    return screen_of(text, COLUMNS)


def terminal(
    command: str,
    title: str | None = None,
    *,
    words: Sequence[str] | None = None,
    folder: Path | None = None,
    typed: Sequence[tuple[str, str]] = (),
    lines: Callable[[list[list[Cell]]], list[list[Cell]]] = list,
) -> Callable[[str], str]:
    """A maker of the picture of a terminal in which a command runs."""

    def make(metadata: str) -> str:
        with tempfile.TemporaryDirectory() as place:
            asked = words or ["-m", "anydevice", *command.split()[1:]]
            shown = captured(asked, folder=folder or _plan_folder(Path(place)), typed=typed)
        prompt: list[Cell] = [("$", "32"), (" ", ""), *((each, "1") for each in command)]
        return drawn([prompt, *lines(shown)], title or command, columns=COLUMNS, metadata=metadata)

    return make


def _plan_folder(place: Path) -> Path:
    (place / "Llama-3.1-70B").mkdir()
    (place / "Llama-3.1-70B/config.json").write_text(json.dumps(LLAMA))
    return place


def said(*words: str) -> str:
    """What a command prints in this process, without colours."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        command_line(words)
    return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())


def without_numbers(text: str) -> str:
    """A text that is the same on every machine and at every speed."""
    text = text.replace(platform.system(), "SYSTEM")
    text = re.sub(r"\d[\d.,]*(?:\+\w+)?( [µnm]?s\b)?", "N", text)
    return re.sub(r" +", " ", re.sub(r" +$", "", text, flags=re.MULTILINE))


@contextlib.contextmanager
def fixed_machine() -> Iterator[None]:
    """A machine that is the same everywhere: NumPy on a CPU and a card, another without driver."""
    cpu = RawDevice(0, "cpu", Facts("a CPU", total_memory=2**34, usable_memory=2**34))
    lacking = Reason("driver_missing", "there is a card but no driver", "install the driver")
    scans = [
        BackendScan("cpu", True, (cpu,), engines=("numpy",)),
        BackendScan("cuda", True, stage="driver", reason=lacking),
    ]
    with testing.fake_machine(rocm=["a card 16GiB"], engines=["numpy"], scans=scans):
        yield


# --- the pictures -------------------------------------------------------------------------------


def overview_shows() -> str:
    """The summary of a fixed machine."""
    with fixed_machine():
        return f"{_minor_version()} {without_numbers(said())}"


def doctor_shows() -> str:
    """What doctor says of a fixed machine, but for advice that depends on how fast it is."""
    with fixed_machine():
        text = said("doctor", "--engine", "numpy")
    text = re.sub(r"Worth knowing\n[\s\S]*?\n(?=\S)", "", text)
    return without_numbers(text + "".join(_explanations()))


def _explanations() -> Iterator[str]:
    """What the picture of doctor explains, in words that are the same on every machine."""
    from anydevice._machine.engines import diagnosis, installed
    from anydevice._report.diagnosis import CAUSES

    for library in ("torch", "jax"):
        build = installed.Build(library, library, "1.0")
        reason = diagnosis.why_not(build, "cuda", Facts("a card"))
        assert reason is not None, "a build without CUDA drives no card"
        yield f"{reason} {CAUSES[reason.code]}"
    yield f"{CAUSES['slow_first_call']}"


def plan_shows() -> str:
    """The whole plan: it is the same on every machine."""
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(_plan_folder(Path(place))):
        return said(*PLAN.split())


def watch_shows() -> str:
    """A frame of fixed readings."""
    from anydevice._machine.hardware.readers import DeviceProcess, Readings
    from anydevice.cli.watch import DeviceUsage, frame

    readings = Readings(free_memory=3 * 2**30, load=0.5)
    process = DeviceProcess(1, "python", 2**30, None)
    used = DeviceUsage("cpu", "a CPU", 2**32, 2**32, readings, (process,))
    return "\n".join(frame([used], Output(io.StringIO(), True), width=COLUMNS))


def chat_shows() -> str:
    """All that chat says beside the model's own words, for fixed values."""
    from types import SimpleNamespace as Stub

    from anydevice._plan.estimates import PARTS
    from anydevice.cli.chat import Chat, Dialogue, described
    from anydevice.cli.loading import Loaded

    estimate = Stub(parameters=10**8, total=2**30, **dict.fromkeys(PARTS, 2**20))
    place = anydevice.Device("cpu", engine="numpy")
    model: Any = Stub(name="m", dtype="float32", context=8192, device=place, executor="numpy")
    model.plan, model.tokenizer = Stub(estimate=estimate), Stub(templates=["{{ m }}"])
    model.generation_defaults = {}
    speed = Stub(decode=20.0, first_token=0.5)
    reply: Any = Stub(tokens=[1, 2], speed=speed, ended="length")
    out = io.StringIO()
    before, sys.stdin = sys.stdin, io.StringIO("")
    try:
        Dialogue(Chat(model, {}), Output(io.StringIO()), Output(out)).run()
    finally:
        sys.stdin = before
    return "\n".join([*Loaded(model, "a reason", ()).lines(), out.getvalue(), described(reply)])


def prove_shows() -> str:
    """The line of a proof, for fixed values."""
    from anydevice.cli import prove

    found = {
        "result": "proved",
        "precision": "float32",
        "parts": 9,
        "seconds": 1.0,
        "executors": [],
        "logits": False,
    }
    return prove._words(found | {"certificate": ["p.proof"]})


def acas(*options: str) -> list[str]:
    """The words of a proof about a network of ACAS Xu, whose folder the picture does not show."""
    return ["-m", "anydevice", "prove", "network_1_1.onnx", "property_1.vnnlib", *options]


def prove_picture(metadata: str) -> str:
    """A property of a network for aircraft, proved, and its certificate checked again."""
    networks, properties = DATA / "acasxu/onnx", DATA / "acasxu/vnnlib"
    if not networks.is_dir():
        raise MissingError("the networks of ACAS Xu: ANYDEVICE_DATA names the folder above acasxu")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "network_1_1.onnx").symlink_to(networks / "ACASXU_run2a_1_1_batch_2000.onnx")
        (folder / "property_1.vnnlib").symlink_to(properties / "prop_1.vnnlib")
        lines: list[list[Cell]] = []
        for option in ("--certificate", "--check"):
            words = acas(option, "p.proof")
            typed = " ".join(words[1:])
            lines += [[("$", "32"), (" ", ""), *((each, "1") for each in typed)]]
            lines += [line for line in captured(words, folder=folder) if line]
    title = "anydevice prove: ACAS Xu, network 1_1, property 1"
    return drawn(lines, title, columns=COLUMNS, metadata=metadata)


def watch_picture(metadata: str) -> str:
    """The live view beside a training."""
    training = [sys.executable, "digits.py", "--epochs", "1000", "--engine", "torch"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        training,
        cwd=ROOT / "examples",
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        time.sleep(8)  # its library is loaded by then
        typed = [(r"(?:watch  [\s\S]*){5}", "q")]  # the fifth time that it is drawn
        shown = captured(["-m", "anydevice", "watch"], folder=ROOT, typed=typed, rows=8)
    finally:
        process.kill()
        process.wait()
    return drawn(shown, "anydevice watch", columns=COLUMNS, metadata=metadata)


def chat_picture(metadata: str) -> str:
    """A conversation of two turns."""
    if not MODEL.exists():
        raise MissingError(f"{MODEL.name}: make chat fetches it")
    command = f"anydevice chat {MODEL.name} --temperature 0"
    ended = r"\[\d+ tokens[^\]]*\][\s\S]*"
    make = terminal(
        command,
        folder=MODEL.parent,
        typed=[
            ("> ", "What is the capital of Japan?\n"),
            (f"{ended}> ", "Write one sentence about GPUs.\n"),
            (f"{ended}{ended}> ", "/exit\n"),
        ],
        lines=lambda shown: [line for line in shown if "/exit" not in text_of([line])],
    )
    return make(metadata)


def training_picture(metadata: str) -> str:
    """The losses of the digits classifier of the examples, which the metadata keeps."""
    sys.path.insert(0, str(ROOT / "examples"))
    import digits  # type: ignore[import-not-found]

    (pictures, labels), (seen, known) = digits.kept_for_training(), digits.held_out()
    done = nn.train(
        digits.network(),
        nn.Batches(pictures, labels, digits.BATCH, whole_only=True),
        nn.AdamW(nn.CosineRate(1e-2, steps=12 * (len(labels) // digits.BATCH))),
        nn.cross_entropy,
        epochs=12,
        device=anydevice.device("cpu", engine="jax"),
        validation=nn.Batches(seen, known, digits.BATCH),
    )
    epochs = [each.to_dict() for each in done.history]
    (FOLDER / "training.json").write_text(json.dumps(epochs, indent=0) + "\n", "utf-8")
    return with_metadata(training_shows(), metadata)


def training_shows() -> str:
    """The kept losses, drawn, at a size of its own for pages that give none."""
    from anydevice._train.history import Epoch, History

    epochs = json.loads((FOLDER / "training.json").read_text("utf-8"))
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "losses.svg")
        History([Epoch(**each) for each in epochs]).plot(path)
        return path.read_text("utf-8").replace("<svg ", '<svg width="480" ', 1)


BENCH = "bench --quick --op matmul,softmax,rmsnorm,attention --dtype float32 --device cpu"


def bench_picture(metadata: str) -> str:
    """The tables of `anydevice bench`, from a run whose figures are kept."""
    path = FOLDER / "bench.json"
    ended = subprocess.run(
        [sys.executable, "-m", "anydevice", *BENCH.split(), "--json", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise MissingError(ended.stderr)
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")), indent=0) + "\n", "utf-8")
    return with_metadata(bench_shows(), metadata)


def bench_shows() -> str:
    """The kept run, drawn as a terminal shows it."""
    results = read_results(str(FOLDER / "bench.json"))
    words = "$ anydevice bench --quick --op matmul,softmax,rmsnorm,attention"
    lines = [words, *summary_lines(results), *measurement_lines(results, COLUMNS)]
    cells = [[(letter, "") for letter in line] for line in lines]
    return drawn(cells, "anydevice bench", columns=COLUMNS)


def boxes_shows() -> str:
    """The proof that divides a square, made anew: its legend."""
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", proof_boxes.picture()))


def with_metadata(svg: str, metadata: str) -> str:
    """A picture with its metadata as the first element."""
    head, closing, rest = svg.partition(">")
    return f"{head}{closing}<metadata>{escape(metadata)}</metadata>{rest}"


def _minor_version() -> str:
    return ".".join(anydevice.__version__.split(".")[:2])


SIMULATED = """
import sys
from anydevice import testing
from anydevice.cli.main import main
from anydevice._machine.discovery.discover import look_everywhere
from make_pictures import CARD
others = [each for each in look_everywhere(5.0) if each.backend not in ("cuda", "opencl")]
with testing.fake_machine(scans=[*others, CARD]):
    sys.exit(main(["doctor"]))
"""
PICTURES = {
    "overview": Picture("anydevice", terminal("anydevice"), overview_shows),
    "doctor": Picture(
        "anydevice doctor",
        terminal(
            "anydevice doctor",
            "anydevice doctor · real libraries, simulated card",
            words=["-c", SIMULATED],
        ),
        doctor_shows,
    ),
    "plan": Picture(f"anydevice {PLAN}", terminal(f"anydevice {PLAN}"), plan_shows),
    "watch": Picture("anydevice watch", watch_picture, watch_shows),
    "chat": Picture("anydevice chat", chat_picture, chat_shows),
    "prove": Picture("anydevice prove", prove_picture, prove_shows),
    "bench": Picture("anydevice bench --quick", bench_picture, bench_shows, True),
    "training": Picture("nn.train", training_picture, training_shows, True),
    "boxes": Picture(
        "proofs.prove",
        lambda metadata: with_metadata(proof_boxes.picture(), metadata),
        boxes_shows,
    ),
}


def fingerprint(picture: Picture) -> str:
    """What a picture's command prints for fixed values, as a hash."""
    return hashlib.sha256(picture.shows().encode()).hexdigest()[:16]


def kept(name: str) -> dict[str, str]:
    """What a picture says of itself."""
    text = (FOLDER / f"{name}.svg").read_text("utf-8")
    found = re.search(r"<metadata>(.*?)</metadata>", text, re.DOTALL)
    assert found is not None, f"{name}.svg says nothing of itself"
    data: dict[str, str] = json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))
    return data


def main(names: Sequence[str], *, redraw: bool = False) -> int:
    """Make the pictures of these names, or all; the exit code is 1 if one could not be made."""
    code = 0
    for name in names or PICTURES:
        picture, path = PICTURES[name], FOLDER / f"{name}.svg"
        if redraw and not picture.drawn_from_file:
            continue
        try:
            text = picture.make("METADATA") if not redraw else picture.shows()
        except MissingError as error:
            print(f"{name}: not made, for want of {error}", file=sys.stderr)
            code = 1
            continue
        made = kept(name)["made"] if redraw else f"{date.today()}"
        about = {"command": picture.command, "made": made, "shows": fingerprint(picture)}
        if redraw:
            text = with_metadata(text, "METADATA")
        path.write_text(text.replace("METADATA", escape(json.dumps(about)), 1), "utf-8")
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1000:.1f} kB")
    return code


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word != "--redraw"]
    sys.exit(main(given, redraw="--redraw" in sys.argv))
