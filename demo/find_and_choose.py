"""What anydevice does, on this machine, in about twenty seconds: `make demo` runs it.

Finds the devices, chooses one, and checks a computation on it in a child process. Then moves a tree
of arrays there and back, loads it from a file, runs a decoder and compares its logits with float64
on the CPU, and trains a classifier of handwritten digits. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy

import anydevice
from anydevice.llm import decoder
from anydevice.llm.description import describe
from anydevice.llm.weights import random_parameters
from anydevice.planning.config import as_config

Model = dict[str, Any]
DECODER = describe(
    as_config(
        {"model_type": "llama", "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 2}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 688}
    )
)
TOLERANCE = 1e-4


def main() -> int:
    """Run every step; the exit code is 0 only if all of them succeed."""
    with step("Find the devices of this machine"):
        report = anydevice.discover()
    print(indented(str(report)))

    with step("Choose one"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        device = anydevice.device()
    print(f"  {device} with {device.engine}, chosen by the {device.chosen_by}")
    for warning in said:
        print(f"  warning: {warning.message}")

    with step("Check a computation in a child process"):
        verdict = device.check()
    if not verdict:
        print(f"  ✗ {device} with {verdict.engine}: {verdict.reason}")
        print("  Run anydevice doctor for details.")
        return 1
    print(f"  ✓ a matrix product with {verdict.engine} was right")
    if verdict.first_call and verdict.second_call:
        first, second = verdict.first_call * 1000, verdict.second_call * 1000
        print(f"    the first call took {first:.1f} ms, the second {second:.1f} ms")

    model = make_model()
    count, size = len(arrays_of(model)), sum(array.nbytes for array in arrays_of(model).values())
    placed: Model = {}
    with step(f"Move a tree of {count} arrays there, {size / 1e6:.0f} MB"):
        placed = moved(model, device)
    print(f"  the weights are now a {kind_of(placed)}; the name is still {placed['name']!r}")
    copied = placed["layers"][0]["weight"] is not model["layers"][0]["weight"]
    if copied:
        print(f"  {speed(size, lambda: moved(model, device))} to the device")
    else:
        print("  they were there already, so nothing was copied")

    with step("Move it back and compare"):
        wrong = differences(model, anydevice.to_numpy(placed))
    if wrong:
        print(f"  ✗ changed on the way: {', '.join(wrong)}")
        return 1
    if copied:
        print(f"  {speed(size, lambda: anydevice.to_numpy(placed))} from the device")
    print("  ✓ every number came back unchanged")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        save(arrays_of(model), path)
        with step("Load it from a file straight onto the device"):
            loaded = anydevice.load_weights(path, device)
        print(f"  {speed(size, lambda: anydevice.load_weights(path, device))} from the file")
    wrong = differences(arrays_of(model), anydevice.to_numpy(loaded), "file")
    if wrong:
        print(f"  ✗ loaded wrongly: {', '.join(wrong)}")
        return 1
    print("  ✓ every number matches the file")

    with step("Run a decoder made of ops on the device"):
        there = decode(random_parameters(DECODER, 0, device), device)
    host = anydevice.device("cpu", engine="numpy")
    exact = decode(in_float64(random_parameters(DECODER, 0, host)), host)
    off = float(numpy.abs(there - exact).max() / numpy.abs(exact).max())
    if not off <= TOLERANCE:
        print(f"  ✗ the relative error of the logits is {off:.1e}, above {TOLERANCE:.0e}")
        return 1
    print(f"  ✓ its {there.size:,} logits match float64 on the CPU, error at most {off:.1e}")
    if not reads_digits(device):
        return 1
    print("\nEverything works. Next: .venv/bin/anydevice doctor, or README.md")
    return 0


def reads_digits(device: anydevice.Device) -> bool:
    """Train `examples/digits.py` on the device, verify it there, and print its accuracy."""
    digits = runpy.run_path(str(Path(__file__).parents[1] / "examples/digits.py"))
    where = anydevice.Device(str(device))  # training finds an engine with gradients
    with step("Train a classifier of handwritten digits there"):
        try:
            trained, losses = digits["fitted"](digits["network"](), where)
        except anydevice.UnsupportedError as error:
            print(f"\n  – skipped: {error}")
            print('    pip install "anydevice[torch]", or [jax], or [mlx], and run this again')
            return True
    print(f"  its loss went from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} epochs")
    pictures, labels = digits["held_out"]()
    with step("Compare it layer by layer with float64 on the CPU"):
        checked = anydevice.compile(trained, where, optimize="none", verify=pictures)
    print(f"  ✓ {checked.report.checked}")
    right = digits["accuracy"](checked, pictures, labels)
    good = bool(right >= digits["WANTED"])
    print(f"  {'✓' if good else '✗'} it reads {right:.1%} of {len(labels)} new digits correctly")
    print(digits["drawn"](pictures[0, 0]))
    print(f"  is read as a {digits['guesses'](checked, pictures[:1])[0]}")
    return good


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print the title of a step, and its duration at the end."""
    print(f"\n{title} … ", end="", flush=True)
    began = time.perf_counter()
    yield
    print(f"{(time.perf_counter() - began) * 1000:.0f} ms")


def make_model() -> Model:
    """A tree of arrays, with some leaves that are not arrays."""
    numbers = numpy.random.default_rng(2024)
    layers = [
        {"weight": numbers.random((1024, 1024), "float32"), "bias": numpy.zeros(1024, "float32")}
        for _ in range(4)
    ]
    return {"name": "four layers", "layers": layers, "steps": (numpy.arange(4, dtype="int32"), 7)}


def arrays_of(model: Model) -> dict[str, Any]:
    """The arrays of the model by name, in the order of a file."""
    layers = enumerate(model["layers"])
    named = {f"layers.{i}.{name}": array for i, each in layers for name, array in each.items()}
    return {**named, "steps": model["steps"][0]}


def decode(parameters: Any, device: anydevice.Device) -> Any:
    """The logits of a prompt of 32 tokens, and of one more token with the cache."""
    ids = numpy.random.default_rng(7).integers(0, DECODER.vocabulary, (1, 33)).astype("int32")
    cache: Any = decoder.new_cache(DECODER, 1, 64, parameters["embedding"])
    parts = []
    for start, stop in ((0, 32), (32, 33)):
        numbers = [start], [stop - start]
        piece, at, count = (
            device(numpy.array(each, "int32")) for each in (ids[:, start:stop], *numbers)
        )
        hidden, cache = decoder.forward(DECODER, parameters, piece, at, count, cache)
        parts.append(anydevice.to_numpy(decoder.logits(DECODER, parameters, hidden)))
    return numpy.concatenate(parts, 1)


def in_float64(parameters: Any) -> Any:
    """The same tree in float64."""
    if isinstance(parameters, dict):
        return {name: in_float64(part) for name, part in parameters.items()}
    if isinstance(parameters, list):
        return [in_float64(part) for part in parameters]
    return parameters.astype("float64")


def moved(model: Model, device: anydevice.Device) -> Model:
    """The model on the device, synchronized."""
    placed: Model = anydevice.to_device(model, device)
    anydevice.synchronize(device)
    return placed


def speed(size: int, work: Callable[[], object]) -> str:
    """The best rate of three runs; the first one includes setup."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    rate = size / min(times)
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


def save(arrays: dict[str, Any], path: Path) -> None:
    """Write a safetensors file: the length of its header, the header, and the arrays' bytes."""
    codes = {"float32": "F32", "int32": "I32"}
    entries, stop = {}, 0
    for name, array in arrays.items():
        start, stop = stop, stop + array.nbytes
        entries[name] = {
            "dtype": codes[array.dtype.name],
            "shape": array.shape,
            "data_offsets": (start, stop),
        }
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for array in arrays.values():
            file.write(array)


def kind_of(placed: Model) -> str:
    """The full name of the type that the first weight has now."""
    kind = type(placed["layers"][0]["weight"])
    return f"{kind.__module__}.{kind.__qualname__}"


def differences(sent: object, back: object, path: str = "model") -> list[str]:
    """The paths of all leaves that differ in type, shape or value."""
    if isinstance(sent, dict) and isinstance(back, dict) and sent.keys() == back.keys():
        return [p for key in sent for p in differences(sent[key], back[key], f"{path}[{key!r}]")]
    if isinstance(sent, list | tuple) and type(sent) is type(back) and len(sent) == len(back):
        pairs = enumerate(zip(sent, back, strict=True))
        return [p for i, (a, b) in pairs for p in differences(a, b, f"{path}[{i}]")]
    if isinstance(sent, numpy.ndarray):
        same = isinstance(back, numpy.ndarray) and sent.dtype == back.dtype
        return [] if same and numpy.array_equal(sent, numpy.asarray(back)) else [path]
    return [] if type(sent) is type(back) and sent == back else [path]


def indented(text: str) -> str:
    """The text, indented by two columns."""
    return "\n".join(f"  {line}" if line else "" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
