"""Programs for OpenCL devices, and how OpenCL C computes with each dtype.

A program is built when it is first needed, and kept by its context and text. Drivers, or PyOpenCL
for them, keep the binary for later processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
from pyopencl.array import Array

from anydevice._core.dtypes import DTYPES, DType
from anydevice._core.engine import Absent
from anydevice._core.locks import ForkSafeLock
from anydevice._core.record import Record
from anydevice._engines.host import known_dtype, no_dtype
from anydevice._engines.opencl import buffers
from anydevice._machine.hardware.opencl.diagnosis import float64_defect


class Assumed(Record):
    """Limits that tests assume of a device, so that a CPU runs code for GPUs; caches ignore it."""

    work_group: int | None = None
    is_cpu: bool | None = None


assumed = Assumed()


class Limits(Record):
    """The limits of a device; `local_memory` is bytes, `processors` how many groups run at once.

    `no_doubles` says why nothing is computed in float64 there; `None` if it is.
    """

    is_cpu: bool
    work_group: int
    local_memory: int
    processors: int
    no_doubles: Absent | None


@lru_cache(maxsize=64)
def limits(context: cl.Context) -> Limits:
    """Return the limits of the device of a context."""
    device = context.devices[0]
    is_cpu = bool(device.type & cl.device_type.CPU)
    allowed = min(device.max_work_group_size, device.max_work_item_sizes[0])
    return Limits(
        is_cpu=is_cpu if assumed.is_cpu is None else assumed.is_cpu,
        work_group=min(allowed, assumed.work_group or allowed),
        local_memory=device.local_mem_size,
        processors=device.max_compute_units,
        no_doubles=_no_doubles(device),
    )


def _no_doubles(device: cl.Device) -> Absent | None:
    defect = float64_defect(device.platform.name, device.driver_version)
    if defect is not None:
        return Absent(defect.text, defect.fix or "use float32", defect.code)
    if "cl_khr_fp64" in device.extensions.split():
        return None
    what = f"the OpenCL device {device.name.strip()} has no float64"
    return Absent(what, "convert the array to float32", "no_dtype")


class Kernel:
    """A kernel of a built program, ready to be started with groups of `group` work items."""

    def __init__(
        self, kernel: cl.Kernel, context: cl.Context, scalars: Sequence[Any], group: int
    ) -> None:
        kernel.set_scalar_arg_dtypes(list(scalars))
        self._kernel, self._queue = kernel, buffers.queue_of_context(context)
        self._context = context
        self._lock = ForkSafeLock()  # the arguments of a kernel are set one after the other
        self.group = group

    def __call__(self, groups: int, *arguments: Any, reads: Sequence[Array] = ()) -> None:
        """Start it and return at once; the device waits for work on the arrays that it reads."""
        # A driver need not notice: NVIDIA's waits for ever for memory of another context.
        if any(x.context != self._context for x in reads):
            raise ValueError("the arrays that a kernel reads are on several devices")
        size, events = self.group, buffers.events_of(*reads)
        with self._lock.native:
            self._kernel(self._queue, (groups * size,), (size,), *arguments, wait_for=events)

    def over(self, items: int, *arguments: Any, reads: Sequence[Array] = ()) -> None:
        """Start at least this many items; the kernel itself leaves the surplus ones out."""
        self(-(-items // self.group), *arguments, reads=reads)


def kernel(
    context: cl.Context,
    files: str | tuple[str, ...],
    name: str,
    defines: Mapping[str, object],
    scalars: Sequence[Any],
    group: int,
) -> Kernel:
    """Return a kernel of our files, with `GROUP` defined as the work items of a group.

    `defines` are put before the text. `scalars` are the NumPy types of the arguments, `None` for
    buffers. The group is a power of two, halved until the device takes the built kernel.
    """
    group = 1 << (min(group, limits(context).work_group).bit_length() - 1)
    while (made := exact_kernel(context, files, name, defines, scalars, group)) is None:
        group //= 2
    return made


def exact_kernel(
    context: cl.Context,
    files: str | tuple[str, ...],
    name: str,
    defines: Mapping[str, object],
    scalars: Sequence[Any],
    group: int,
) -> Kernel | None:
    """Return the same with groups of just this size; `None` if the device does not take them."""
    if group > limits(context).work_group:
        return None
    lines = [f"#define {key} {value}" for key, value in {**defines, "GROUP": group}.items()]
    texts = [text(file) for file in ((files,) if isinstance(files, str) else files)]
    source = "\n".join((*lines, text("numbers.cl"), *texts))
    built = cl.Kernel(program(context, source), name)
    most = cl.kernel_work_group_info.WORK_GROUP_SIZE
    if group > max(1, built.get_work_group_info(most, context.devices[0])):
        return None
    return Kernel(built, context, scalars, group)


@cache
def text(file: str) -> str:
    """Return the text of one of the files in `kernels/`."""
    return Path(__file__).with_name(file).read_text("utf-8")


@lru_cache(maxsize=4096)
def program(context: cl.Context, source: str) -> Any:
    """Return a built program. Warnings of the compiler are not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cl.CompilerWarning)
        return cl.Program(context, source).build(["-w"])


class Number(Record):
    """A dtype in a kernel: kept in memory as `element`, computed with as `number`.

    `name` says which of the functions of `kernels/numbers.cl` read and write it.
    """

    name: str
    element: str
    number: str
    scalar: Any
    """The NumPy type that a single number is passed to a kernel as."""

    @property
    def floating(self) -> bool:
        return self.number in ("float", "double")

    def defines(self, prefix: str = "") -> dict[str, object]:
        """Return the definitions of the dtype in kernels: NAME, ELEMENT, NUMBER, LOAD and STORE."""
        return {
            f"{prefix}NAME": self.name,
            f"{prefix}ELEMENT": self.element,
            f"{prefix}NUMBER": self.number,
            f"{prefix}LOAD": f"load_{self.name}",
            f"{prefix}STORE": f"store_{self.name}",
        }


_NUMBERS: dict[str, Number] = {
    row.name: row
    for row in (
        Number("bool", "uchar", "uchar", np.uint8),
        Number("int8", "char", "char", np.int8),
        Number("int16", "short", "short", np.int16),
        Number("int32", "int", "int", np.int32),
        Number("int64", "long", "long", np.int64),
        Number("uint8", "uchar", "uchar", np.uint8),
        Number("uint16", "ushort", "ushort", np.uint16),
        Number("uint32", "uint", "uint", np.uint32),
        Number("uint64", "ulong", "ulong", np.uint64),
        Number("float16", "ushort", "float", np.float32),
        Number("bfloat16", "ushort", "float", np.float32),
        Number("float32", "float", "float", np.float32),
        Number("float64", "double", "double", np.float64),
    )
}

_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def number_of(dtype: DType, context: cl.Context) -> Number:
    """Return how the device of a context computes with a dtype.

    Raises `UnsupportedError` for complex and 8-bit floating dtypes, and for `float64` where the
    device has none or its driver fails with it.
    """
    number = _NUMBERS.get(dtype.name)
    if number is None:
        raise no_dtype(f"OpenCL computes with no {dtype}", "convert the array before it is placed")
    absent = limits(context).no_doubles if number.number == "double" else None
    if absent is not None:
        raise absent.error()
    return number


def accumulator_of(number: Number) -> Number:
    """Return the dtype in which sums are kept until they are complete."""
    return _NUMBERS["float32"] if number.number == "float" else number


def bits_of(dtype: DType) -> Number:
    """Return the integers to copy elements as, whatever they are."""
    if dtype.itemsize not in _BITS:
        raise no_dtype(f"OpenCL rearranges no {dtype}", "convert the array before it is placed")
    return _NUMBERS[_BITS[dtype.itemsize]]


def scalar(value: float | int | bool, dtype: DType, number: Number) -> Any:
    """Return a Python number as an argument of a kernel, rounded to the arrays' dtype."""
    return np.array(value).astype(dtype.numpy()).astype(number.scalar)[()]


def scalar_bits(value: float | int | bool, dtype: DType) -> Any:
    """Return the bits of a Python number in a dtype, as an argument of a kernel that copies."""
    return np.array(value).astype(dtype.numpy()).view(bits_of(dtype).scalar)[()]


def dtype_of(x: Array) -> DType:
    """Return the dtype of an array."""
    return known_dtype(x.dtype)


BOOL = DTYPES["bool"]
INT32 = DTYPES["int32"]
FLOAT32 = DTYPES["float32"]
