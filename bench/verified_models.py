"""Right models that `compile(verify=)` refuses on a card, and wrong ones that it misses.

    PYTHONPATH=src python bench/verified_models.py [--device cuda] [group …]

Float32 products of a card have fewer digits where TF32 is allowed, as JAX and PyTorch's
convolutions do unless told otherwise. The groups run at once, each in a process of its own; those
that say "TF32" allow it for all of PyTorch. Prints how many of each were right, and the largest
error as a share of the allowed one; for wrong models, those that were missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

import anydevice  # noqa: E402
from anydevice import nn, ops  # noqa: E402
from anydevice.errors import VerificationError  # noqa: E402

Case = tuple[str, Any, Any, str]
"""A name, a model, an example of its inputs, and a precision."""


def numbers(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def families(*precisions: str) -> Iterator[Case]:
    from tests.compile.test_mutants import FAMILIES, example_of, tiny

    for family in FAMILIES:
        for precision in precisions:
            yield f"{family} {precision}", tiny(family), example_of(family, 2), precision


def torch_models() -> Iterator[Case]:
    """Larger ones than the families, and convolutions."""
    import torch

    torch.manual_seed(0)
    t = torch.nn
    wide = [part for _ in range(8) for part in (t.Linear(1024, 1024), t.GELU())]
    yield "8 dense layers of 1024", t.Sequential(*wide).eval(), numbers(32, 1024), "float32"
    block = t.TransformerEncoderLayer(256, 8, 1024, batch_first=True, norm_first=True)
    encoder = t.TransformerEncoder(block, 6, enable_nested_tensor=False)
    yield "6 blocks of 256", encoder.eval(), numbers(4, 64, 256), "float32"
    sizes = [(3, 32), (32, 64), (64, 128), (128, 128)]
    stages = [
        part
        for few, many in sizes
        for part in (t.Conv2d(few, many, 3, padding=1), t.BatchNorm2d(many), t.ReLU())
    ]
    image = t.Sequential(*stages, t.AdaptiveAvgPool2d(1), t.Flatten(), t.Linear(128, 10))
    yield "4 convolutions", image.eval(), numbers(8, 3, 32, 32), "float32"
    yield (
        "an LSTM of 128",
        t.LSTM(64, 128, 2, batch_first=True).eval(),
        numbers(4, 32, 64),
        "float32",
    )


def our_models() -> Iterator[Case]:
    dense = [part for _ in range(8) for part in (nn.Dense(1024, 1024), "gelu")]
    yield "nn: 8 dense layers of 1024", nn.build(*dense, device="cpu"), numbers(32, 1024), "float32"
    blocks = [nn.TransformerBlock(256, 8, causal=True, rope=True)] * 6
    model = nn.build(*blocks, input_shape=(64, 256), device="cpu")
    yield "nn: 6 blocks of 256", model, numbers(4, 64, 256), "float32"
    images = [part for a, b in ((3, 32), (32, 64)) for part in (nn.Conv2d(a, b, 3), "relu")]
    model = nn.build(*images, input_shape=(3, 32, 32), device="cpu")
    yield "nn: 2 convolutions", model, numbers(4, 3, 32, 32), "float32"


def functions(numpy: Any) -> Iterator[Case]:
    """In JAX's own words, whose products have fewer digits on a card."""
    weights = [0.03 * numbers(512, 512) * (place + 1) ** 0.5 for place in range(4)]

    def dense(x: Any, layers: int = 1) -> Any:
        for place in range(layers):
            x = numpy.tanh(x @ numpy.asarray(weights[place % 4], x.dtype))
        return x

    def attention(x: Any) -> Any:
        scores = x @ x.swapaxes(-1, -2) / x.shape[-1] ** 0.5
        scores = numpy.exp(scores - scores.max(-1, keepdims=True))
        return scores / scores.sum(-1, keepdims=True) @ x

    yield "function: 1 dense layer", dense, numbers(32, 512), "float32"
    yield "function: 12 dense layers", lambda x: dense(x, 12), numbers(32, 512), "float32"
    yield "function: attention", attention, numbers(4, 128, 64), "float32"
    yield "function: a product", lambda x: x @ x.T, numbers(256, 512), "float32"
    yield (
        "function: differences",
        lambda x: (x @ x.T) - (x @ x.T).mean(),
        numbers(64, 512),
        "float32",
    )
    yield "function: ops", lambda x: ops.softmax(ops.matmul(x, x)), numbers(64, 64), "float32"


def jax_models() -> Iterator[Case]:
    import jax
    import jax.numpy as jnp

    yield from functions(jnp)
    yield from our_models()
    try:
        import equinox
    except ImportError:
        return
    key = jax.random.PRNGKey(0)
    mlp = equinox.nn.MLP(256, 64, 512, 6, key=key)
    yield "Equinox: MLP", jax.vmap(mlp), numbers(32, 256), "float32"
    attention = equinox.nn.inference_mode(equinox.nn.MultiheadAttention(8, 128, key=key))
    yield "Equinox: MLP of one", mlp, numbers(256), "float32"
    yield "Equinox: attention", attention, (numbers(32, 128),) * 3, "float32"
    image = equinox.nn.Sequential(
        [equinox.nn.Conv2d(3, 32, 3, key=key), equinox.nn.Lambda(jax.nn.relu)]
    )
    yield "Equinox: convolution", image, numbers(3, 32, 32), "float32"


def mutants() -> Iterator[Case]:
    from tests.compile.mutants import MUTANTS, Mutant, X

    class There(Mutant):
        def forward(self, x: Any) -> Any:
            with x.device:  # what a mutant makes on the way
                return super().forward(x)

    for name, precision, right, wrong in MUTANTS:
        yield name, There(right, wrong).eval(), X, precision


def wrong_functions() -> Iterator[Case]:
    """Right in float64, and in float32 so wrong that it shows with products of fewer digits."""
    import jax.numpy as jnp

    weight, bias = 0.05 * numbers(256, 64), 0.3 * numbers(64)

    def net(x: Any, bias: Any = bias) -> Any:
        return jnp.tanh(x @ jnp.asarray(weight, x.dtype) + bias.astype(x.dtype))

    def unless_exact(wrong: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: net(x) if x.dtype == jnp.float64 else wrong(x)

    faults: dict[str, Callable[[Any], Any]] = {
        "3 % too large": lambda x: net(x) * 1.03,
        "a column 10 % too large": lambda x: net(x).at[:, 3].multiply(1.1),
        "a row of another": lambda x: net(x).at[1].set(net(x)[0]),
        "a bias dropped": lambda x: net(x, 0 * bias),
        "an element NaN": lambda x: net(x).at[2, 2].set(jnp.nan),
    }
    for name, fault in faults.items():
        yield name, unless_exact(fault), numbers(32, 256), "float32"


GROUPS: dict[str, tuple[str, Callable[[], Iterable[Case]]]] = {
    "families": ("torch", lambda: families("float32", "mixed")),
    "families, 16 bits": ("torch", lambda: families("bfloat16", "float16")),
    "families, TF32": ("torch", lambda: families("float32")),
    "models": ("torch", lambda: (*torch_models(), *our_models())),
    "models, TF32": ("torch", lambda: (*torch_models(), *our_models())),
    "jax": ("jax", jax_models),
    "wrong": ("torch", mutants),
    "wrong, jax": ("jax", wrong_functions),
}


def run(group: str, place: str) -> None:
    engine, cases = GROUPS[group]
    device = anydevice.device(place, engine=engine)
    if engine == "torch":
        import torch

        if "TF32" in group:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    accepted, refused, shares = [], [], []
    for name, model, example, precision in cases():
        try:
            optimize = "none" if engine == "torch" else "default"
            compiled = anydevice.compile(
                model, device, optimize=optimize, precision=precision, verify=example
            )
            checked = compiled.report.checked
            assert checked is not None
            shares.append((checked.largest, name))
            accepted.append(name)
        except VerificationError as error:
            refused.append(f"{name}: {error}")
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {error}"[:300])
            refused.append(name) if not group.startswith("wrong") else accepted.append(name)
    total = len(accepted) + len(refused)
    if group.startswith("wrong"):
        print(f"{'✗' if accepted else '✓'} {group:<20} {len(refused)} of {total} caught")
        print(*(f"    missed: {name}" for name in accepted), sep="\n")
        return
    worst = ", ".join(f"{share:.2f} {name}" for share, name in sorted(shares)[:-4:-1])
    print(f"{'✗' if refused else '✓'} {group:<20} {len(accepted)} of {total} right; of what is")
    print(f"    allowed, at most {worst}")
    print(*(f"    refused: {text[:400]}" for text in refused), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="group", help=", ".join(GROUPS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        warnings.simplefilter("ignore")
        run(given.groups[0], given.device)
        return
    command = [sys.executable, __file__, "--child", "--device", given.device]
    running = [
        subprocess.Popen(
            [*command, group], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for group in given.groups or GROUPS
    ]
    for process in running:
        print(process.communicate()[0], end="", flush=True)


if __name__ == "__main__":
    main()
