"""Plans of trainings against published runs: tokens a second, memory of a card, and "fits".

    python bench/plan_training.py [--tables FOLDER]

The folder (`.cache/tables`) has two files of llm-foundry and torchtitan, which are not part of this
project:

- `llm-foundry.md`: `scripts/train/benchmarking/README.md` of github.com/mosaicml/llm-foundry, 216
  runs on 8 to 512 A100 and H100;
- `torchtitan/*.md`: `benchmarks/llama3_h100_202412_torchtitan.md` and
  `benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md` of github.com/pytorch/torchtitan, 20
  figures of memory.

The constants are fitted to the runs on 64 cards or fewer and compared with those in
`anydevice._plan.training_plan`; errors are printed for the runs on 128 cards or more, to which
nothing was fitted. Needs SciPy.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from anydevice._core.record import replace
from anydevice._plan.cards import Cluster, cluster_of
from anydevice._plan.estimates import plannable
from anydevice._plan.families import ModelShape
from anydevice._plan.model import shape_of
from anydevice._plan.training_plan import (
    FITTED,
    Constants,
    TrainingRun,
    card_memory,
    tokens_a_second,
)

TABLES = Path(__file__).parents[1] / ".cache" / "tables"
FOUNDRY, TITAN = "llm-foundry.md", "torchtitan"
MOST_FITTED = 64

MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Width, layers and heads of llm-foundry's models, from its `scripts/train/yamls/pretrain`."""

LLAMA = {
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
    "405B": (16384, 53248, 126, 128),
}


class Published(NamedTuple):
    """A run that someone has measured."""

    name: str
    shape: ModelShape
    run: TrainingRun
    cluster: Cluster
    figure: float  # tokens a second of all cards, or GiB of one
    more: float = 0.0  # tokens a second of all cards, where the figure is GiB


@cache
def mpt(name: str, context: int) -> ModelShape:
    """A model of llm-foundry: layers like GPT-2's, learned positions, a tied head."""
    hidden, layers, heads = MPT[name]
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": context}
    return shape_of({"model_type": "gpt2", "vocab_size": 50368, **sizes})


@cache
def llama(name: str) -> ModelShape:
    """Llama 3.1 of this size."""
    hidden, inner, layers, heads = LLAMA[name]
    return shape_of(
        hidden=hidden,
        intermediate=inner,
        layers=layers,
        heads=heads,
        kv_heads=8,
        vocabulary=128256,
    )


def foundry(path: Path) -> list[Published]:
    """The runs of llm-foundry's tables."""
    lines = (line.strip().strip("|").split("|") for line in path.read_text("utf-8").splitlines())
    rows = ([cell.strip() for cell in cells] for cells in lines if len(cells) == 20)
    return [_foundry_run(row) for row in rows if row[1].isdigit()]


def _foundry_run(row: Sequence[str]) -> Published:
    name, context, cards, card, micro_batch, accumulate, each = (
        row[index] for index in (0, 1, 2, 3, 7, 8, 12)
    )
    run = TrainingRun(
        int(context),
        int(micro_batch),
        strategy="shard_gradients" if row[16] == "SHARD_GRAD_OP" else "shard",
        recompute="full" if row[17] == "True" else "none",
        accumulate=int(accumulate),
        fused_loss=True,
        float8="fp8" in row[14],
        reduced=2 if row[15] == "PURE" else 4,
    )
    cluster = cluster_of(f"{cards}x{card.replace('_', '-')}")
    rate = float(each) * int(cards)
    return Published(
        f"{name} {context} × {micro_batch}", mpt(name, run.context), run, cluster, rate
    )


def titan(folder: Path) -> list[Published]:
    """The figures of memory in torchtitan's tables, whose titles tell how they were made."""
    found: list[Published] = []
    for path in sorted(folder.glob("*.md")):
        text = path.read_text("utf-8")
        found += _tables(text) if "**Table 1**" in text else _h200(text)
    return found


def _cells(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) > 2 and re.fullmatch(r"[\d.]+", cells[-1]):
            yield cells


def _tables(text: str) -> Iterator[Published]:
    for title, body in re.findall(r"\*\*Table \d\*\*(.*?)\n(.*?)(?=\*\*Table|###|\Z)", text, re.S):
        size = re.search(r"Llama 3\.1 (\w+)", title)[1]
        cards = int(re.search(r"(\d+) GPUs", title)[1])
        local = int(re.search(r"Local batch size (\d+)", title)[1])
        split = {key: _degree(title, key) for key in ("TP", "PP")}
        for cells in _cells(body):
            context = int(cells[1]) if len(cells) == 4 else 8192
            run = TrainingRun(
                context,
                max(1, local // split["PP"]),  # as many micro-batches as stages
                recompute="selective" if "Selective" in title else "full",
                compiled="torch.compile" in title + cells[0],
                float8="Float8" in title + cells[0],
                tensor=split["TP"],
                pipeline=split["PP"],
                sequence=_degree(cells[0], "CP"),
            )
            name = f"Llama {size}, {cells[0]}, {context} × {local}"
            cluster = cluster_of(f"{cards}xH100-96GB")
            yield Published(name, llama(size), run, cluster, *_figures(cells, cards))


def _figures(cells: Sequence[str], cards: int) -> tuple[float, float]:
    """GiB, and tokens a second of all cards."""
    return float(cells[-1]), cards * float(cells[-2].replace(",", ""))


def _degree(text: str, key: str) -> int:
    found = re.search(rf"{key} ?(\d+)", text)
    return int(found[1]) if found else 1


def _h200(text: str) -> Iterator[Published]:
    for cells in _cells(text):
        run = TrainingRun(
            8192, 2, recompute="selective", compiled=True, fused_loss=True, float8=True
        )
        cluster = cluster_of(f"{cells[0]}x8xH200-141GB")
        figures = _figures(cells, cluster.cards)
        yield Published(f"Llama 8B, {cells[0]} nodes", llama("8B"), run, cluster, *figures)


def fit(runs: Sequence[Published]) -> Constants:
    """The constants that explain these runs best, within what is physical."""
    from scipy.optimize import least_squares

    names = [name for name in Constants._fields if name != "compiled"]  # none of them is
    start = [START.get(name, 0.5) for name in names]
    shares = [name for name in names if name not in ABOVE_ONE]
    most = [1.0 if name in shares else MOST[name] for name in names]
    least = [1.0 if name == "float8" else 0.0 for name in names]

    def errors(values: Sequence[float]) -> list[float]:
        constants = Constants(*values, compiled=FITTED.compiled)
        return [error(each, constants) for each in runs]

    found = least_squares(
        errors, start, bounds=(least, most), loss="soft_l1", f_scale=0.05, x_scale=start
    )
    return Constants(*map(float, found.x), compiled=FITTED.compiled)


def fit_compiled(runs: Sequence[Published]) -> float:
    """The share of the traffic that compiled layers have, from two runs that differ in no more."""
    pair = [each for each in runs if each.cluster.cards == 8 and not each.run.float8]
    plain, compiled = sorted(pair, key=lambda each: each.run.compiled)

    def off(share: float) -> float:
        return error(compiled, replace(FITTED, compiled=share)) - error(plain)

    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if off(middle) > 0 else (low, middle)
    return low


START = {
    "few_tokens": 500.0,
    "traffic": 5.0,
    "loss_traffic": 20.0,
    "update_traffic": 100.0,
    "hop": 5.0,
    "float8": 1.5,
}
"""Where the fit begins; shares begin at one half."""

MOST = {
    "few_tokens": 8000.0,
    "traffic": 50.0,
    "loss_traffic": 100.0,
    "update_traffic": 500.0,
    "hop": 50.0,
    "float8": 2.0,
}
ABOVE_ONE = tuple(MOST)
"""The constants that are no shares, and the most that each may be."""


def error(published: Published, constants: Constants = FITTED) -> float:
    """How far off the tokens a second are: 0.1 is 10 % too many."""
    _, shape, run, cluster, figure, more = published
    return tokens_a_second(shape, run, cluster, constants) / (more or figure) - 1


def memory_error(published: Published) -> float:
    """How far off the memory of a card is."""
    _, shape, run, cluster, gib, _ = published
    return card_memory(shape, run, cluster).allocated / 2**30 / gib - 1


def fits(published: Published) -> bool:
    """Whether a plan says, with its margin, that the run fits."""
    _, shape, run, cluster, *_ = published
    return card_memory(shape, run, cluster).total <= plannable(cluster.card.memory)


def is_split(run: TrainingRun) -> bool:
    """Whether products, layers or sequences are split, of which no time is known."""
    return max(run.tensor, run.pipeline, run.sequence) > 1


class Errors(NamedTuple):
    """Errors without their signs: the middle, that of nine in ten, and the largest."""

    count: int
    median: float
    nine_in_ten: float
    largest: float

    def __str__(self) -> str:
        return (
            f"{self.count} runs: median {self.median:.1%}, 90 % within {self.nine_in_ten:.1%}, "
            f"largest {self.largest:.1%}"
        )


def summary(errors: Sequence[float]) -> Errors:
    """What is said of many errors."""
    ordered = sorted(map(abs, errors))
    within = ordered[-(-9 * len(ordered) // 10) - 1]
    return Errors(len(ordered), statistics.median(ordered), within, ordered[-1])


def parts(runs: Sequence[Published]) -> tuple[list[Published], list[Published]]:
    """The runs that are fitted to, and those that are held out."""
    return (
        [each for each in runs if each.cluster.cards <= MOST_FITTED],
        [each for each in runs if each.cluster.cards > MOST_FITTED],
    )


def main() -> int:
    """Print what was fitted, and all errors; 1 if a file is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, default=TABLES, help="the folder of the two files")
    folder = parser.parse_args().tables
    if not (folder / FOUNDRY).exists() or not list((folder / TITAN).glob("*.md")):
        print(f"{folder} has no {FOUNDRY} or no {TITAN}/*.md; see --help", file=sys.stderr)
        return 1
    runs = foundry(folder / FOUNDRY)
    fitted_to, held_out = parts(runs)
    memory = titan(folder / TITAN)
    constants = replace(fit(fitted_to), compiled=fit_compiled(memory))
    print(f"{'constant':16} {'committed':>10} {'fitted now':>10}")
    for name in Constants._fields:
        print(f"{name:16} {getattr(FITTED, name):10.4g} {getattr(constants, name):10.4g}")
    for label, some in (("fitted to", fitted_to), ("held out", held_out)):
        print(f"\n{label}, committed:  {summary([error(each) for each in some])}")
        print(f"{label}, fitted now: {summary([error(each, constants) for each in some])}")
    for each in held_out:
        print(f"  {error(each):+7.1%}  {each.cluster!s:16} {each.name}")
    print(f"\nmemory: {summary([memory_error(each) for each in memory])}")
    for each in memory:
        print(f"  {memory_error(each):+7.1%}  {each.cluster!s:16} {each.name}")
    plain = [each for each in memory if not is_split(each.run)]
    print(f"\nspeed of another program: {summary([error(each) for each in plain])}")
    for each in plain:
        print(f"  {error(each):+7.1%}  {each.cluster!s:16} {each.name}")
    refused = [each for each in runs if not fits(each)]
    print(f"\nfits: {len(runs) - len(refused)} of {len(runs)} runs that ran")
    for each in refused:
        needed = card_memory(each.shape, each.run, each.cluster).total / 2**30
        print(
            f"  {each.cluster!s:16} {each.name}, recompute {each.run.recompute}: {needed:.1f} GiB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
