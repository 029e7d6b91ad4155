"""What anydevice does, on this machine, in about ten seconds: `make demo` runs it.

Finds the devices, chooses one, has it compute something in a child process and compares the
answer, and places a small nested model there and back. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy

import anydevice

Model = dict[str, object]


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
    with step("Place a small nested model there"):
        placed = device(model)
        anydevice.synchronize(device)
    print(f"  the weights are now a {kind_of(placed)}; the name is still {placed['name']!r}")

    with step("Bring it back, and compare"):
        wrong = differences(model, anydevice.to_numpy(placed))
    if wrong:
        print(f"  ✗ these came back changed: {', '.join(wrong)}")
        return 1
    print("  ✓ every number came back as it was sent")
    print("\nAll went well. Next: .venv/bin/anydevice doctor, or README.md")
    return 0


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
        {"weight": numbers.random((64, 64), numpy.float32), "bias": numpy.zeros(64, numpy.float32)}
        for _ in range(3)
    ]
    return {"name": "three layers", "layers": layers, "steps": (numpy.arange(4, dtype="int32"), 7)}


def kind_of(placed: Model) -> str:
    """The full name of the type that the first weight has now."""
    layers = placed["layers"]
    assert isinstance(layers, list)
    kind = type(layers[0]["weight"])
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
