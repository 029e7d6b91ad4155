"""Programs for OpenCL devices: put together from our sources, built once, started safely.

A program is built when it is first needed. The process keeps it by its context and its text; the
drivers of PoCL and NVIDIA, and PyOpenCL for all others, keep the binary for later processes.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pyopencl as cl

from anydevice.core.record import Record


class Assumed(Record):
    """What is taken for granted of every device, against what it says itself.

    With it, tests run on a CPU what is written for GPUs and for devices with small groups.
    """

    work_group: int | None = None
    is_cpu: bool | None = None


assumed = Assumed()


class Limits(Record):
    """What a device can do; `local_memory` is bytes, `processors` how many groups run at once."""

    is_cpu: bool
    work_group: int
    local_memory: int
    processors: int
    has_doubles: bool


def limits(context: Any) -> Limits:
    """The limits of the device of a context."""
    return _limits(context, assumed)


@lru_cache(maxsize=64)
def _limits(context: Any, instead: Assumed) -> Limits:
    device = context.devices[0]
    allowed = min(device.max_work_group_size, device.max_work_item_sizes[0])
    return Limits(
        is_cpu=bool(device.type & cl.device_type.CPU) if instead.is_cpu is None else instead.is_cpu,
        work_group=min(allowed, instead.work_group or allowed),
        local_memory=device.local_mem_size,
        processors=device.max_compute_units,
        has_doubles="cl_khr_fp64" in device.extensions.split(),
    )


class Kernel:
    """A kernel of a built program, ready to be started with groups of `group` work items."""

    def __init__(self, kernel: Any, scalars: Sequence[Any], group: int) -> None:
        kernel.set_scalar_arg_dtypes(list(scalars))
        self._kernel = kernel
        self._lock = threading.Lock()  # the arguments of a kernel are set one after the other
        self.group = group

    def __call__(self, queue: Any, groups: int, *arguments: Any, wait_for: Any = None) -> None:
        """Start it and return at once; an array counts as its buffer."""
        group = self.group
        with self._lock:
            self._kernel(queue, (groups * group,), (group,), *arguments, wait_for=wait_for)

    def over(self, queue: Any, items: int, *arguments: Any, wait_for: Any = None) -> None:
        """Start at least this many items; the kernel itself leaves the surplus ones out."""
        self(queue, -(-items // self.group), *arguments, wait_for=wait_for)


def kernel(
    context: Any,
    files: str | tuple[str, ...],
    name: str,
    defines: Mapping[str, object],
    scalars: Sequence[Any],
    group: int,
) -> Kernel:
    """A kernel of our files, with `GROUP` defined as the work items of a group.

    `defines` are put before the text. `scalars` are the NumPy types of the arguments, `None` for
    buffers. The group is a power of two, and is halved until the device takes it: what a kernel
    needs of a processor is known only when it was built.
    """
    group = 1 << (min(group, limits(context).work_group).bit_length() - 1)
    while (found := exact_kernel(context, files, name, defines, scalars, group)) is None:
        group //= 2
    return found


def exact_kernel(
    context: Any,
    files: str | tuple[str, ...],
    name: str,
    defines: Mapping[str, object],
    scalars: Sequence[Any],
    group: int,
) -> Kernel | None:
    """The same with groups of just this size; `None` where the device does not take them."""
    if group > limits(context).work_group:
        return None
    lines = [f"#define {key} {value}" for key, value in {**defines, "GROUP": group}.items()]
    texts = [text(file) for file in ((files,) if isinstance(files, str) else files)]
    source = "\n".join((*lines, text("numbers.cl"), *texts))
    built = cl.Kernel(program(context, source), name)
    most = cl.kernel_work_group_info.WORK_GROUP_SIZE
    if group > max(1, built.get_work_group_info(most, context.devices[0])):
        return None
    return Kernel(built, scalars, group)


@cache
def text(file: str) -> str:
    """The text of one of the files in `kernels/`."""
    return (Path(__file__).parent / "kernels" / file).read_text("utf-8")


@lru_cache(maxsize=4096)
def program(context: Any, source: str) -> Any:
    """A built program. What the compiler has to say of a program that it builds is not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cl.CompilerWarning)
        return cl.Program(context, source).build(["-w"])
