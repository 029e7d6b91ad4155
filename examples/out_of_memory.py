"""Running out of memory, and four ways to continue.

    python examples/out_of_memory.py [--device cuda:0] [--engine torch]

The process gets little memory, so that it runs out on any machine: on an accelerator through
`anydevice.configure(memory=…)`, on the CPU through a limit of the operating system.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import numpy
import psutil

import anydevice
from anydevice import ops

ROOM = 128 * 2**20
START = 64
HEADS, TOKENS, SIZE = 4, 512, 16


def main() -> int:
    """Run out of memory; the exit code is 0 if every case is handled."""
    device = chosen()
    first = scores(1, device)  # the library has started, and has what it needs for itself
    limit_memory(device)
    print(f"{device} with {device.engine}; this process may use {ROOM // 2**20} MiB more.")

    print("\n1. The error says what to try, and the process continues:")
    try:
        scores(START, device)
    except anydevice.OutOfMemoryError as error:
        print(f"   {START} texts at once: {str(error).splitlines()[0]}")
        for advice in error.advice[:2]:
            print(f"   advice: {advice}")
    else:
        print(f"   {START} texts fit, although they should not")
        return 1

    print("\n2. anydevice.release() returns cached memory:")
    anydevice.release(device)
    same = numpy.allclose(anydevice.to_numpy(scores(1, device)), anydevice.to_numpy(first))
    print(f"   one text still gives {'the same result' if same else 'ANOTHER RESULT'}")

    print("\n3. anydevice.find_batch_size() finds how many fit:")
    batch = anydevice.find_batch_size(lambda size: scores(size, device), START)
    print(f"   {batch} texts at once, of {START}")

    print("\n4. anydevice.cpu_fallback() falls back to the CPU:")
    if device.kind == "cpu" and device.backend == "cpu":
        print("   this is the CPU already; try it with --device")
    else:
        with warnings.catch_warnings(record=True, action="always") as said:
            large = anydevice.cpu_fallback(attended)(*texts(START, device))
        print(f"   {said[-1].message}")
        print(f"   the result of {len(large)} texts is on {anydevice.device_of(large)}")
    return 0 if same and 1 <= batch < START else 1


def texts(count: int, device: anydevice.Device) -> tuple[Any, Any]:
    """Queries and keys of `count` texts, on the device."""
    numbers = numpy.random.default_rng(0)
    shape = (count, HEADS, TOKENS, SIZE)
    queries = numbers.standard_normal(shape, "float32")
    keys = numbers.standard_normal(shape, "float32")
    both: tuple[Any, Any] = device((queries, keys))
    return both


def attended(queries: Any, keys: Any) -> Any:
    """The largest share of its attention that each token gives to another.

    All shares are made at once: 4 MiB a text, and several times that on the way.
    """
    products = ops.matmul(queries, ops.permute(keys, (0, 1, 3, 2)))
    return ops.max(ops.softmax(ops.multiply(products, SIZE**-0.5)), axis=-1)


def scores(count: int, device: anydevice.Device) -> Any:
    """The synchronized result of `attended` for `count` texts."""
    result = attended(*texts(count, device))
    anydevice.to_numpy(result)
    return result


def limit_memory(device: anydevice.Device) -> None:
    """Limit this process to `ROOM` more bytes of the device's memory."""
    if device.engine == "mlx":
        sys.exit("MLX is held to no limit while it computes; take another --engine or --device")
    if device.backend != "cpu":
        anydevice.configure(memory=ROOM)
        return
    try:
        import resource
    except ImportError:
        sys.exit("Windows has no limit for the memory of one process; name an accelerator")
    if sys.platform == "darwin":
        sys.exit("macOS does not hold a process to its limit; name an accelerator: --device metal")
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))


def chosen() -> anydevice.Device:
    """The device of the command line, else the best one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="such as cpu, cuda:1 or opencl")
    parser.add_argument("--engine", help="the array library: torch, jax, mlx, …")
    options = parser.parse_args()
    return anydevice.device(options.device, engine=options.engine)


if __name__ == "__main__":
    sys.exit(main())
