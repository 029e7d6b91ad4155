"""Programs whose processes fork from one that has imported PyTorch, which takes longest."""

from __future__ import annotations

from pathlib import Path

from tests.programs import output_of

SET_UP = """
import os, signal, sys, time, warnings
import numpy as np, torch, torch._dynamo, torch.distributed, torch.distributed.fsdp
import anydevice
from anydevice import nn, parallel
from anydevice._core.trees import leaves
from anydevice._train import data_parallel, strategy as strategies

nn.train, nn.AdamW, nn.Dense, nn.Batches  # loaded once, for all that fork from here

numbers = np.random.default_rng(0)
X = numbers.standard_normal((102, 64)).astype(np.float32)  # the last batch has two rows
Y = numbers.integers(0, 10, 102).astype(np.int32)
T = torch.nn
TORCH = anydevice.device("cpu", engine="torch")

def ours():
    return nn.build(nn.Dense(64, 256), "gelu", nn.Dropout(0.2), nn.Dense(256, 256), "gelu",
                    nn.Dropout(0.1), nn.Dense(256, 10), seed=1, device=TORCH)

def users():
    torch.manual_seed(torch.initial_seed() + parallel.initialize("cpu").rank)  # ranks differ
    torch.manual_seed(4)
    return T.Sequential(T.Linear(64, 256), T.GELU(), T.Dropout(0.2), T.Linear(256, 256), T.GELU(),
                        T.Dropout(0.1), T.Linear(256, 10))

def cross_entropy(output, y):
    return T.functional.cross_entropy(output, y.long())

def arguments(model, **options):
    own = isinstance(model, nn.Model)
    given = {"loss": "cross_entropy" if own else cross_entropy, "clip": 1.0, "seed": 3,
             "data": nn.Batches(X, Y, size=50), "optimize": "none",
             "optimizer": nn.AdamW(1e-3) if own else torch.optim.AdamW(model.parameters(), 1e-3)}
    given |= options
    return [given.pop(name) for name in ("optimizer", "data", "loss")], given

def result(make, epochs=2, **options):
    mesh = options.pop("devices", None) or parallel.initialize("cpu")
    model = make()
    (optimizer, data, loss), given = arguments(model, **options)
    done = nn.train(model, data, optimizer, loss, devices=mesh, epochs=epochs, progress=False,
                    **given)
    if mesh.size > 1:
        wanted = options.get("strategy", "replicate")
        assert done.report.spread.startswith(f"{mesh.size} processes, {wanted}"), done.report
    return done

def trained(make, epochs=2, **options):
    return [epoch.loss for epoch in result(make, epochs, **options).history]

def apart(one, several):
    return max(abs(p - q) for losses in several for p, q in zip(one, losses, strict=True))

def failing(function, *given, processes=2, **options):
    def called():
        function(*given, **options)
    began = time.monotonic()
    try:
        parallel.launch(called, processes=processes)
    except anydevice.AnyDeviceError as error:
        assert time.monotonic() - began < 20
        return str(error)
    raise SystemExit("nothing was raised")

def unweighted(self, batch, own=data_parallel.ProcessStrategy._own):
    part, rows, share = own(self, batch)
    return part, rows, (1 / self._group.size if share else 0.0)

def mask_per_shard(self, batch, own=data_parallel.ProcessStrategy._own):
    part, (first, count, every), share = own(self, batch)
    return part, (0, count, count), share

def mutants(**options):
    # What the bar of 1e-6 is for: these would be taken for right by a weaker test.
    found, rounding = {}, strategies.ROUNDING
    strategies.ROUNDING = 1.0
    for mutant in (unweighted, mask_per_shard):
        whole, data_parallel.ProcessStrategy._own = data_parallel.ProcessStrategy._own, mutant
        for make in (ours, users):
            found[make.__name__, mutant.__name__] = trained(make, 1, **options)
        data_parallel.ProcessStrategy._own = whole
    strategies.ROUNDING = rounding
    return found

def together(processes, **functions):
    # What each function returned in each process: one fork for all of them.
    def called():
        return {name: function() for name, function in functions.items()}
    found = parallel.launch(called, processes=processes)
    return {name: [each[name] for each in found] for name in functions}
"""


def held(program: str, folder: Path, **names: object) -> str:
    """What a program prints that begins with `SET_UP`, in which these names are set."""
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    return printed("-c", SET_UP + given + program, folder=folder)


def printed(*words: str, folder: Path) -> str:
    """What Python prints in a folder, with these arguments; it must end well."""
    return output_of(*words, env={"OMP_NUM_THREADS": "1"}, cwd=folder, limit=900).strip()
