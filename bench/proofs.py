"""Proofs: ACAS Xu with its 186 instances, and other networks in the format of VNN-COMP.

    PYTHONPATH=src OPENBLAS_NUM_THREADS=1 python bench/proofs.py acasxu [--precision real]
    PYTHONPATH=src python bench/proofs.py folder ../mnist_fc --limit 120 [--check] [--cpu]
    PYTHONPATH=src python bench/proofs.py digits [--seed 1] [--images 100 360]
    PYTHONPATH=src python bench/proofs.py card       # on an NVIDIA card; engines: all it has

One line for each instance: what came out, CPU seconds and seconds of the clock, boxes, bytes of the
certificate; then the sums. `--check` checks each certificate again. `--cpu` limits the CPU seconds
of the search instead of those of the clock, for a machine that others use. `--engine` and
`--device` say where bounds are computed. Exits with 1 where an answer is not the known one.
"""

from __future__ import annotations

import argparse
import csv
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from anydevice import AnyDeviceError, proofs
from anydevice._proofs import prove as proving
from anydevice._proofs.machines import numpy_machine
from anydevice._proofs.search import SearchLimits

ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("ANYDEVICE_DATA", ROOT.parent / "shared" / "data"))


class Instance(NamedTuple):
    name: str
    model: Path
    claim: Path
    limit: float
    expected: str = ""


class Outcome(NamedTuple):
    instance: Instance
    answer: str
    cpu: float
    seconds: float
    boxes: int
    bytes: int
    checked: float
    result: Any

    def line(self) -> str:
        wrong = self.instance.expected and self.answer not in (self.instance.expected, "unknown")
        return (
            f"{self.instance.name:28} {self.answer:8}{' WRONG' if wrong else ''} "
            f"cpu {self.cpu:7.2f}  clock {self.seconds:7.2f}  boxes {self.boxes:7}  "
            f"bytes {self.bytes:7}  check {self.checked:6.2f}"
        )


def acasxu() -> list[Instance]:
    folder = DATA / "acasxu"
    if not (folder / "truth.csv").exists():
        sys.exit(
            f"there is no {folder / 'truth.csv'}: ANYDEVICE_DATA names the folder that has acasxu. "
            "For the benchmark as VNN-COMP publishes it: python bench/proofs.py folder PATH"
        )
    with (folder / "truth.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [
        Instance(
            f"{row['property']}:{row['net']}",
            folder / "onnx" / f"ACASXU_run2a_{row['net']}_batch_2000.onnx",
            folder / "vnnlib" / f"prop_{row['property']}.vnnlib",
            float(row["timeout_s"]),
            row["expected"],
        )
        for row in rows
    ]


def folder(path: Path) -> list[Instance]:
    """The instances of a benchmark of VNN-COMP: instances.csv and the files that it names."""
    with (path / "instances.csv").open() as file:
        rows = [row for row in csv.reader(file) if row]
    return [
        Instance(f"{Path(m).stem} {Path(c).stem}", path / m, path / c, float(limit))
        for m, c, limit in rows
    ]


def proved_by_cpu(instance: Instance, precision: str, limit: float) -> Any:
    """What `prove` does on NumPy, with a limit of CPU seconds."""
    theorems, shape, file_hash = proving._theorems(instance.model, instance.claim, None, precision)
    machine = numpy_machine()
    clock = time.process_time
    limits = SearchLimits(until=clock() + limit, clock=clock)
    with machine.context():
        return proving.prove_theorems(theorems, machine, limits, time.monotonic(), shape, file_hash)


def run(instance: Instance, options: argparse.Namespace) -> Outcome:
    begin, cpu = time.monotonic(), time.process_time()
    limit = options.limit or instance.limit
    if options.cpu:
        result = proved_by_cpu(instance, options.precision, limit)
    else:
        result = proofs.prove(
            instance.model,
            instance.claim,
            precision=options.precision,
            limit=limit,
            device=options.device,
            engine=options.engine,
        )
    cpu, seconds = time.process_time() - cpu, time.monotonic() - begin
    size, checked = 0, 0.0
    if isinstance(result, proofs.Proof):
        size = len(result.certificates[0].to_bytes())
        if options.check:
            start = time.process_time()
            result.check()
            checked = time.process_time() - start
    answers = {proofs.Proof: "unsat", proofs.Counterexample: "sat"}
    answer = answers.get(type(result), "unknown")
    boxes = getattr(result, "boxes", 0)
    return Outcome(instance, answer, cpu, seconds, boxes, size, checked, result)


def measure(instances: list[Instance], options: argparse.Namespace) -> list[Outcome]:
    if options.only:
        instances = [each for each in instances if any(o in each.name for o in options.only)]
    outcomes = []
    for instance in instances:
        outcomes.append(run(instance, options))
        print(outcomes[-1].line(), flush=True)
    return outcomes


def summary(outcomes: list[Outcome]) -> tuple[str, int]:
    """A line about all instances, and how many answers are not the known ones."""
    counts = {name: sum(o.answer == name for o in outcomes) for name in ("unsat", "sat", "unknown")}
    wrong = sum(
        bool(o.instance.expected) and o.answer != o.instance.expected and o.answer != "unknown"
        for o in outcomes
    )
    text = (
        f"{len(outcomes)} instances: {counts['unsat']} proved, {counts['sat']} refuted, "
        f"{counts['unknown']} undecided, {wrong} wrong; "
        f"CPU {sum(o.cpu for o in outcomes):.1f} s, longest {max(o.cpu for o in outcomes):.1f}; "
        f"clock {sum(o.seconds for o in outcomes):.1f} s, "
        f"longest {max(o.seconds for o in outcomes):.1f}; "
        f"certificates {sum(o.bytes for o in outcomes)} bytes; "
        f"checks {sum(o.checked for o in outcomes):.1f} s"
    )
    return text, wrong


def digits(options: argparse.Namespace) -> int:
    """Digits of a classifier that was trained with interval bounds, each a ball of 0.06.

    The settings were chosen by the first 100 test images of seed 0; `--seed` gives other weights
    and other test images, and `--images` are numbers of the test images.
    """
    example = runpy.run_path(str(ROOT / "examples/certified_digits.py"))
    asked = argparse.Namespace(epochs=60, seed=options.seed)
    model = example["fitted"](example["robust_loss"](asked.epochs), None, asked)
    images, labels = example["held_out"](options.seed)
    some = slice(*options.images)
    images, labels = images[some], labels[some]
    right = (example["guesses"](model, images) == labels).mean()
    begin, cpu = time.monotonic(), time.process_time()
    share = example["certified_share"](model, images, labels, example["CHANGE"])
    cpu, seconds = time.process_time() - cpu, time.monotonic() - begin
    count = len(labels)
    print(
        f"digits, seed {options.seed}: {count * share.certified:.0f} of {count} certified, "
        f"{count * share.refuted:.0f} refuted, {right:.1%} read correctly; "
        f"CPU {cpu:.1f} s, clock {seconds:.1f} s"
    )
    return int(share.certified < 0.9)


def card(options: argparse.Namespace) -> int:
    """All of ACAS Xu on a card, as rows: the sum, the longest, and what is wrong."""
    options.device = options.device or "cuda"
    options.engine = options.engine or "torch"
    run(acasxu()[0], options)  # the libraries load
    outcomes = measure(acasxu(), options)
    text, wrong = summary(outcomes)
    total, longest = sum(o.seconds for o in outcomes), max(o.seconds for o in outcomes)
    undecided = sum(o.answer == "unknown" for o in outcomes)
    rows = [
        ("ACAS Xu answers", text, not wrong and not undecided),
        ("ACAS Xu sum", f"{total:.1f} s (bar 50)", total <= 50),
        ("ACAS Xu longest", f"{longest:.1f} s (bar 5)", longest <= 5),
    ]
    for name, said, right in rows:
        print(f"{'✓' if right else '✗'} {name:<28}  {said}")
    return int(not all(right for _, _, right in rows))


def engines(options: argparse.Namespace) -> int:
    """A few instances on every engine of a card: the same answers."""
    some = [each for each in acasxu() if each.name in ("1:1_1", "3:3_3", "2:2_1", "5:1_1")]
    same = True
    for engine in ("torch", "cupy", "jax"):
        options.engine, options.device = engine, options.device or "cuda"
        try:
            answers = [run(each, options) for each in some]
        except AnyDeviceError as error:
            print(f"✗ proofs on {engine:<20}  {str(error).splitlines()[0]}")
            same = False
            continue
        right = all(o.answer == o.instance.expected for o in answers)
        took = ", ".join(f"{o.instance.name} {o.answer} {o.seconds:.1f} s" for o in answers)
        print(f"{'✓' if right else '✗'} proofs on {engine:<20}  {took}")
        same = same and right
    return int(not same)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["acasxu", "card", "digits", "engines", "folder"])
    parser.add_argument("path", nargs="?", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--limit", type=float)
    parser.add_argument("--device")
    parser.add_argument("--engine")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, nargs=2, default=[0, 100], metavar=("FROM", "TO"))
    options = parser.parse_args()
    others = {"card": card, "digits": digits, "engines": engines}
    if options.what in others:
        return others[options.what](options)
    instances = acasxu() if options.what == "acasxu" else folder(options.path)
    text, wrong = summary(measure(instances, options))
    print(text)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
