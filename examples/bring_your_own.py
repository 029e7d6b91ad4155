"""Your own PyTorch or Flax module, compiled and verified without a rewrite.

    python examples/bring_your_own.py [--device cuda:0] [--engine torch|jax]

`anydevice.compile` keeps a model in its own library. With `verify=` it is compared, layer by layer,
with a float64 copy of itself on the CPU. `--engine` selects the model of one library.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy

import anydevice

DIGITS = Path(__file__).parent / "data/digits.npz"


def main() -> int:
    """Compile and verify each model; the exit code is 0 if all of them are right."""
    options = arguments()
    pictures = numpy.load(DIGITS)["images"][:32].astype("float32") / 16
    brought = 0
    for engine, package, make in (("torch", "torch", of_torch), ("jax", "flax", of_flax)):
        if options.engine not in (None, engine):
            continue
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed, so its model is skipped.\n")
            continue
        bring(f"A module of {package}", make(), pictures, options)
        brought += 1
    if not brought:
        print("Neither PyTorch nor Flax is installed: pip install torch, or pip install flax")
    return 0 if brought else 1


def bring(title: str, model: Any, pictures: Any, options: argparse.Namespace) -> None:
    """Compile, verify and use a model, and show a property that fails."""
    print(f"{title}:")
    fast = anydevice.compile(
        model,
        options.device,
        optimize=options.optimize,
        verify=pictures,
        properties=[shares_add_up],
    )
    print(indented(str(fast.report)))
    shares = anydevice.to_numpy(fast(pictures))
    print(f"  it gives {shares.shape[1]} probabilities for each of {shares.shape[0]} images")
    try:
        fast.verify(pictures, properties=[is_certain])
    except anydevice.VerificationError as error:
        print(f"  a property that does not hold is caught: {str(error).splitlines()[0]}\n")
    else:
        sys.exit("a property that does not hold was not caught")


def shares_add_up(shares: Any) -> bool:
    """Whether the probabilities of every image add up to 1."""
    return bool(numpy.allclose(shares.sum(axis=1), 1, atol=1e-5))


def is_certain(shares: Any) -> bool:
    """Whether the model is certain about every image, which an untrained one is not."""
    return bool((shares.max(axis=1) > 0.99).all())


def of_torch() -> Any:
    """A small network in PyTorch."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(64, 32),
        torch.nn.GELU(),
        torch.nn.Linear(32, 10),
        torch.nn.Softmax(dim=1),
    ).eval()


def of_flax() -> Any:
    """The same network in Flax NNX."""
    import jax
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.inner = nnx.Linear(64, 32, rngs=rngs)
            self.outer = nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            rows = x.reshape(x.shape[0], -1)
            return jax.nn.softmax(self.outer(jax.nn.gelu(self.inner(rows))))

    return Network(nnx.Rngs(0))


def indented(text: str) -> str:
    """The text, indented by two columns."""
    return "\n".join(f"  {line}" for line in text.splitlines())


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="such as cpu or cuda:1")
    parser.add_argument("--engine", choices=("torch", "jax"), help="only the model of this library")
    parser.add_argument("--optimize", choices=("none", "default", "aggressive"), default="default")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
