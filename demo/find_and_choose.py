"""What anydevice does, on this machine, in about twenty seconds: `make demo` runs it.

Finds the devices, chooses one, has it compute something in a child process and compares the
answer, moves a nested model there and back, loads it from a file straight onto the device, runs a
decoder there whose logits are compared with those of the CPU, and trains a model there that reads
handwritten digits. Exits with 1 if anything is wrong.
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
from anydevice.check import decoder

Model = dict[str, Any]
SHAPE = decoder.DecoderShape(
    vocabulary=1000, hidden=256, layers=2, heads=8, kv_heads=2, size=32, intermediate=688
)
TOLERANCE = 1e-4


def main() -> int:
    """Run every step; the exit code is 0 only where all of them went well."""
    with step("Find the devices of this machine"):
        report = anydevice.discover()
    print(indented(str(report)))

    with step("Choose one"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        device = anydevice.device()
    print(f"  {device}, served by {device.engine}, chosen by the {device.chosen_by}")
    for warning in said:
        print(f"  said on the way: {warning.message}")

    with step("Let it compute in a child process, and compare the answer"):
        verdict = device.check()
    if not verdict:
        print(f"  ✗ {device} through {verdict.engine}: {verdict.reason}")
        print("  anydevice doctor says more.")
        return 1
    print(f"  ✓ the product of two matrices was right, through {verdict.engine}")
    if verdict.first_call and verdict.second_call:
        first, second = verdict.first_call * 1000, verdict.second_call * 1000
        print(f"    the first one took {first:.1f} ms, the second {second:.1f} ms")

    model = make_model()
    count, size = len(arrays_of(model)), sum(array.nbytes for array in arrays_of(model).values())
    placed: Model = {}
    with step(f"Move a nested model there, {count} arrays of {size / 1e6:.0f} MB"):
        placed = moved(model, device)
    print(f"  the weights are now a {kind_of(placed)}; the name is still {placed['name']!r}")
    copied = placed["layers"][0]["weight"] is not model["layers"][0]["weight"]
    if copied:
        print(f"  {speed(size, lambda: moved(model, device))} on the way there")
    else:
        print("  they were where they should be already, so nothing was copied")

    with step("Bring it back, and compare"):
        wrong = differences(model, anydevice.to_numpy(placed))
    if wrong:
        print(f"  ✗ these came back changed: {', '.join(wrong)}")
        return 1
    if copied:
        print(f"  {speed(size, lambda: anydevice.to_numpy(placed))} on the way back")
    print("  ✓ every number came back as it was sent")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        save(arrays_of(model), path)
        with step("Load it from a file, straight onto the device"):
            loaded = anydevice.load_weights(path, device)
        print(f"  {speed(size, lambda: anydevice.load_weights(path, device))} from the file")
    wrong = differences(arrays_of(model), anydevice.to_numpy(loaded), "file")
    if wrong:
        print(f"  ✗ these were loaded wrongly: {', '.join(wrong)}")
        return 1
    print("  ✓ every number is that of the file")

    with step("Run a decoder on the device, written in ops alone"):
        there = decode(device(decoder.random_parameters(SHAPE)), device)
    exact = decode(in_float64(decoder.random_parameters(SHAPE)), None)
    off = float(numpy.abs(there - exact).max() / numpy.abs(exact).max())
    if not off <= TOLERANCE:
        print(f"  ✗ the logits are off by {off:.1e} of the largest, more than {TOLERANCE:.0e}")
        return 1
    print(
        f"  ✓ its {there.size:,} logits are those of float64 on the CPU, off by {off:.1e} at most"
    )
    if not reads_digits(device):
        return 1
    print("\nAll went well. Next: .venv/bin/anydevice doctor, or README.md")
    return 0


def reads_digits(device: anydevice.Device) -> bool:
    """Train `examples/digits.py` on the device, check it there, and say how well it reads."""
    digits = runpy.run_path(str(Path(__file__).parents[1] / "examples/digits.py"))
    where = anydevice.Device(str(device))  # whoever trains finds an engine with gradients for it
    with step("Train a model there that reads handwritten digits"):
        try:
            trained, losses = digits["fitted"](digits["network"](), where)
        except anydevice.UnsupportedError as error:
            print(f"\n  – left out: {error}")
            print('    pip install "anydevice[torch]", or [jax], or [mlx], and run this again')
            return True
    print(f"  its loss went from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} epochs")
    pictures, labels = digits["held_out"]()
    with step("Compare it there, layer by layer, with float64 on the CPU"):
        checked = anydevice.compile(trained, where, optimize="none", verify=pictures)
    print(f"  ✓ {checked.report.checked}")
    right = digits["accuracy"](checked, pictures, labels)
    good = bool(right >= digits["WANTED"])
    print(f"  {'✓' if good else '✗'} it reads {right:.1%} of {len(labels)} digits it never saw")
    print(digits["drawn"](pictures[0, 0]))
    print(f"  is taken for a {digits['guesses'](checked, pictures[:1])[0]}")
    return good


@contextmanager
def step(title: str) -> Iterator[None]:
    """Say what is done, and after it how long it took."""
    print(f"\n{title} … ", end="", flush=True)
    began = time.perf_counter()
    yield
    print(f"{(time.perf_counter() - began) * 1000:.0f} ms")


def make_model() -> Model:
    """A nest of arrays as any library might keep one, with leaves that are no arrays."""
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


def decode(parameters: Any, device: anydevice.Device | None) -> Any:
    """The logits for a text of 32 tokens, read at once and then one more from the cache."""
    ids = numpy.random.default_rng(7).integers(0, SHAPE.vocabulary, (1, 33)).astype("int32")
    places = numpy.arange(33, dtype="int32")

    def placed(array: Any) -> Any:
        return array if device is None else device(array)

    cache = decoder.empty_cache(SHAPE, 1, 64, parameters["embedding"])
    parts = []
    for start, stop in ((0, 32), (32, 33)):
        some = (
            placed(numpy.ascontiguousarray(ids[:, start:stop])),
            placed(places[start:stop].copy()),
        )
        logits, kept = decoder.forward(parameters, SHAPE, *some, cache)
        assert kept is not None
        cache = kept
        parts.append(anydevice.to_numpy(logits))
    return numpy.concatenate(parts, 1)


def in_float64(parameters: Any) -> Any:
    """The same numbers as float64, in the same nest."""
    if isinstance(parameters, dict):
        return {name: in_float64(part) for name, part in parameters.items()}
    if isinstance(parameters, list):
        return [in_float64(part) for part in parameters]
    return parameters.astype("float64")


def moved(model: Model, device: anydevice.Device) -> Model:
    """The model on the device, when all of it has arrived."""
    placed: Model = anydevice.to_device(model, device)
    anydevice.synchronize(device)
    return placed


def speed(size: int, work: Callable[[], object]) -> str:
    """How many bytes a second that is, the best of three: the first one still sets things up."""
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
    """The paths of everything that is not what it was: type, shape or a single number."""
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
    """The text, two columns to the right."""
    return "\n".join(f"  {line}" if line else "" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
