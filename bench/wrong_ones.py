"""The shares of wrong ops that `verify` finds and of wrong models that `compile(verify=)` refuses.

The wrong ones are those of the tests; each is tried with every seed. The right models, of which
none may be refused, are drawn from their number.

    python bench/wrong_ones.py [--seeds 1 2 3 4 5] [--right 252] [ops | models | right …]

Prints a row for each set, and the names of those missed or refused with how often.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
sys.path[:0] = [str(Path(__file__).parent.parent)]

import anydevice  # noqa: E402
from anydevice import _ops as ops  # noqa: E402
from anydevice._check.verify import verify  # noqa: E402
from anydevice.errors import VerificationError  # noqa: E402

Outcome = tuple[str, bool]
"""What was tried, and whether it was called wrong."""


def is_refused(model: Any, device: Any, example: Any, **options: Any) -> bool:
    try:
        anydevice.compile(model, device, optimize="none", verify=example, **options)
    except VerificationError:
        return True
    return False


def wrong_ops(seeds: Sequence[int], right: int) -> Iterator[Outcome]:
    from tests.check.mutants import MUTANTS

    for mutant in MUTANTS:
        original = getattr(ops, mutant.op)
        setattr(ops, mutant.op, mutant.broken(original))
        try:
            for seed in seeds:
                found = verify(mutant.op, "cpu", "numpy", mutant.dtype, isolated=False, seed=seed)
                yield str(mutant), any(x.state == "wrong" for x in found if x.of == "value")
        finally:
            setattr(ops, mutant.op, original)


def wrong_models(seeds: Sequence[int], right: int) -> Iterator[Outcome]:
    from tests.compile.conftest import X
    from tests.compile.mutants import MUTANTS, Mutant

    for name, precision, correct, wrong in MUTANTS:
        for seed in seeds:
            model = Mutant(correct, wrong).eval()
            yield name, is_refused(model, "cpu", X, precision=precision, seed=seed)


def right_models(seeds: Sequence[int], right: int) -> Iterator[Outcome]:
    from tests.compile.right_models import KINDS, draw_right_model
    from tests.nn.conftest import device_of_engine

    for number in range(right):
        model, engine, x, precision = draw_right_model(number)
        name = f"{number}, {KINDS[number % len(KINDS)]}, {precision}"
        device = device_of_engine(engine)
        yield name, is_refused(model, device, x, precision=precision, seed=seeds[0] + number)


SETS = {"ops": wrong_ops, "models": wrong_models, "right": right_models}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", metavar="|".join(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--right", type=int, default=252, help="how many right models")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in given.sets or SETS:
        called: Counter[str] = Counter()
        tried: Counter[str] = Counter()
        for title, is_wrong in SETS[name](given.seeds, given.right):
            tried[title] += 1
            called[title] += is_wrong
        if name == "right":
            print(f"right models: {called.total()} of {len(tried)} refused")
            print(*[f"  refused: {title}" for title, n in called.items() if n], sep="\n", end="")
            continue
        always = sum(called[title] == n for title, n in tried.items())
        share = f"{called.total()} of {tried.total()} trials ({called.total() / tried.total():.1%})"
        print(f"wrong {name}: {always} of {len(tried)} in every seed; {share}", flush=True)
        for title, n in tried.items():
            if called[title] < n:
                print(f"  {called[title]} of {n}: {title}")


if __name__ == "__main__":
    main()
