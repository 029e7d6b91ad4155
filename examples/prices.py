"""A table: prices of flats, from a DataFrame of pandas to a report.

    python examples/prices.py [--device cuda:0] [--engine torch]

The table is made here: areas, ages, distances, floors and districts, and a price that depends on
all of them. Columns are given as they are: batch norm brings square metres and years to one scale,
with statistics that are saved with the model. The best epoch on a fifth of the rows, which are not
trained on, is kept.

Exits with 1 if the mean error of held-out prices is above 8 %.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy
import pandas  # type: ignore[import-untyped]

import anydevice
from anydevice import nn

DISTRICTS = {"harbor": 1.3, "old town": 1.5, "station": 0.9, "hills": 1.1}
WANTED = 0.08


def main() -> int:
    """Train, evaluate and report; the exit code is 0 if the errors are small enough."""
    options = arguments()
    where = options.device
    if options.engine is not None:
        where = anydevice.device(options.device, engine=options.engine)
    flats = table(1200, seed=1)
    test = table(300, seed=2)
    print(f"{flats.head(3).round(2).to_string(index=False)}\n… {len(flats):,} flats\n")

    x, y = columns(flats)
    model = nn.build(
        nn.BatchNorm(x.shape[1]),
        nn.Dense(None, 32),
        "relu",
        nn.Dense(32, 32),
        "relu",
        nn.Dense(32, 1),
        input_shape=x.shape[1],
        seed=options.seed,
        device="cpu",
    )
    data = nn.Batches(x, y, 32)
    done = nn.train(
        model,
        data,
        nn.AdamW(nn.CosineRate(1e-2, steps=options.epochs * len(data))),
        "mean_squared_error",
        epochs=options.epochs,
        validation=0.2,
        metrics="mean_absolute_error",
        patience=10,
        device=where,
        seed=options.seed,
        optimize="none",
    )
    if done.stopped == "Ctrl-C":
        sys.exit(130)
    trained = done.model
    print(f"\n{trained}\n")

    guesses = numpy.exp(nn.predict(trained, columns(test)[0], optimize="none")[:, 0])
    report = test.assign(guess=guesses, error=abs(guesses / test.price - 1))
    by_district = report.groupby("district").agg(
        flats=("price", "size"), price=("price", "mean"), guess=("guess", "mean"),
        error=("error", "mean"),
    )  # fmt: skip
    percent = {"error": "{:.1%}".format, "price": "{:.0f}".format, "guess": "{:.0f}".format}
    print(by_district.to_string(formatters=percent))
    error = float(report.error.mean())
    print(f"\nmean error of {len(test)} flats that were held out: {error:.1%}")
    return 0 if error <= WANTED else 1


def table(count: int, seed: int) -> pandas.DataFrame:
    """Flats with their prices, in thousands."""
    drawn = numpy.random.default_rng(seed)
    flats = pandas.DataFrame(
        {
            "area": drawn.uniform(25, 160, count),
            "age": drawn.integers(0, 90, count),
            "distance": drawn.exponential(4, count),
            "floor": drawn.integers(0, 8, count),
            "district": drawn.choice(list(DISTRICTS), count),
        }
    )
    factor = flats.district.map(DISTRICTS) * numpy.exp(drawn.normal(0, 0.03, count))
    each = 4 - 0.015 * flats.age - 0.12 * flats.distance.clip(upper=10) + 0.05 * flats.floor
    return flats.assign(price=flats.area * each * factor)


def columns(flats: pandas.DataFrame) -> tuple[pandas.DataFrame, Any]:
    """The table as numbers, with a column for each district; and the logarithms of the prices."""
    kinds = pandas.CategoricalDtype(list(DISTRICTS))
    x = pandas.get_dummies(flats.drop(columns="price").astype({"district": kinds}))
    return x.astype("float32"), numpy.log(flats[["price"]]).astype("float32")


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="such as cpu, cuda:1 or metal")
    parser.add_argument("--engine", help="the array library: torch, jax or mlx")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
