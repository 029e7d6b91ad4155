"""How long a warm call of `anydevice.device` takes.

    python bench/device_call.py [--rounds 200]

The first call looks at the machine and reads the settings; later ones only make sure that no file,
variable or scope has changed. To compare two versions, run it with each on `PYTHONPATH`.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import anydevice

BAR = 20e-6

CALLS: dict[str, Callable[[], anydevice.Device]] = {
    'device("cpu")': lambda: anydevice.device("cpu"),
    "device()": lambda: anydevice.device(),
    'device("cpu", engine="numpy")': lambda: anydevice.device("cpu", engine="numpy"),
    'device("cpu", engine="torch")': lambda: anydevice.device("cpu", engine="torch"),
}


def seconds(call: Callable[[], anydevice.Device], rounds: int) -> tuple[float, float]:
    """The median and the least of the mean time of a call, over all rounds of 20 calls."""
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(20):
            call()
        times.append((time.thread_time() - began) / 20)
    return statistics.median(times), min(times)


def main() -> None:
    """Measure every call and print a line for each."""
    parser = argparse.ArgumentParser(description="How long a warm call of anydevice.device takes.")
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    print(f"{'call':32}{'median':>12}{'least':>12}")
    for name, call in CALLS.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call()
        except anydevice.AnyDeviceError as error:
            print(f"{name:32}  {str(error).splitlines()[0]}")
            continue
        median, least = seconds(call, rounds)
        print(f"{name:32}{1e6 * median:9.1f} µs{1e6 * least:9.1f} µs")
        if name == 'device("cpu")':
            print(f"{'':32}{'within' if median <= BAR else 'over'} the bar of {1e6 * BAR:.0f} µs")


if __name__ == "__main__":
    main()
