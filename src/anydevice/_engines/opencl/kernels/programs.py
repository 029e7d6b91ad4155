"""Programs for OpenCL devices, and how OpenCL C computes with each dtype."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

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
    """The limits of a device; `local_memory` is bytes, `processors` how many groups run at once."""

    is_cpu: bool
    work_group: int
    local_memory: int
    processors: int
    no_doubles: Absent | None


@lru_cache(maxsize=64)
def limits(context: cl.Context) -> Limits:
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


@runtime_checkable
class Definitions(Protocol):
    """A value that stands for several definitions of a kernel's text."""

    def defines(self, prefix: str) -> dict[str, object]: ...


class Kernel:
    """A kernel of a built program, started with groups of `group` items; integers are `index`."""

    def __init__(self, kernel: cl.Kernel, context: cl.Context, index: type, group: int) -> None:
        self._kernel, self._queue = kernel, buffers.queue_of_context(context)
        self._context, self._index = context, index
        self._lock = ForkSafeLock()  # the arguments of a kernel are set one after the other
        self._has_types = False
        self.group = group

    def __call__(self, groups: int, *arguments: Any, reads: Sequence[Array] = ()) -> None:
        """Start it and return at once; the device waits for work on the arrays that it reads."""
        # A driver need not notice: NVIDIA's waits for ever for memory of another context.
        if any(x.context != self._context for x in reads):
            raise ValueError("the arrays that a kernel reads are on several devices")
        size = self.group
        events = [event for x in reads for event in x.events or ()] or None  # of other queues
        with self._lock.native:
            if not self._has_types:
                self._kernel.set_scalar_arg_dtypes([self._type_of(x) for x in arguments])
            self._kernel(self._queue, (groups * size,), (size,), *arguments, wait_for=events)
            self._has_types = True

    def over(self, items: int, *arguments: Any, reads: Sequence[Array] = ()) -> None:
        """Start at least this many items; the kernel itself leaves the surplus ones out."""
        self(-(-items // self.group), *arguments, reads=reads)

    def _type_of(self, argument: Any) -> type | None:
        if isinstance(argument, int | np.integer):  # a size: users' arrays may have NumPy's
            return self._index
        is_number = isinstance(argument, np.generic | np.ndarray)
        return argument.dtype.type if is_number else None  # a buffer


@lru_cache(maxsize=4096)
def kernel(
    context: cl.Context, files: str | tuple[str, ...], name: str, number: Number, wide: bool,
    group: int, **defines: object,
) -> Kernel:  # fmt: skip
    """Return a kernel of our files, with `GROUP` defined as the work items of a group.

    `wide` gives indices 64 bits. `defines` are put before the text; a `Number` or a `Walk` defines
    several names, with its key as their prefix. The group is a power of two, halved until the
    device takes the built kernel.
    """
    group = 1 << (min(group, limits(context).work_group).bit_length() - 1)
    while (made := exact_kernel(context, files, name, number, wide, defines, group)) is None:
        group //= 2
    return made


@lru_cache(maxsize=512)
def kernel_in_one_size(
    context: cl.Context, files: str | tuple[str, ...], name: str, number: Number, wide: bool,
    group: int, **defines: object,
) -> Kernel | None:  # fmt: skip
    """Return the same with groups of just this size; `None` if the device does not take them."""
    return exact_kernel(context, files, name, number, wide, defines, group)


def exact_kernel(
    context: cl.Context, files: str | tuple[str, ...], name: str, number: Number, wide: bool,
    defines: Mapping[str, object], group: int,
) -> Kernel | None:  # fmt: skip
    """Build a kernel with groups of just this size; `None` if the device does not take them."""
    if group > limits(context).work_group:
        return None
    types = {"INDEX": "long", "UNSIGNED": "ulong"} if wide else {"INDEX": "int", "UNSIGNED": "uint"}
    words: dict[str, object] = {**types, **number.defines(), "GROUP": group}
    for key, value in defines.items():
        words |= value.defines(key) if isinstance(value, Definitions) else {key: value}
    lines = [
        f"#define {key} {int(value) if isinstance(value, bool) else value}"
        for key, value in words.items()
    ]
    texts = [text(file) for file in ((files,) if isinstance(files, str) else files)]
    source = "\n".join((*lines, text("numbers.cl"), *texts))
    native = cl.Kernel(program(context, source), name)
    max_size = cl.kernel_work_group_info.WORK_GROUP_SIZE
    if group > max(1, native.get_work_group_info(max_size, context.devices[0])):
        return None
    return Kernel(native, context, np.int64 if wide else np.int32, group)


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
    """A dtype in a kernel: kept as `element`, computed with as `number`."""

    name: str
    element: str
    number: str
    scalar: Any
    """The NumPy type that a single number is passed to a kernel as."""

    @property
    def floating(self) -> bool:
        return self.number in ("float", "double")

    def defines(self, prefix: str = "") -> dict[str, object]:
        """Return the definitions of the dtype in kernels: NAME, ELEMENT, NUMBER, LOAD, STORE."""
        return {
            f"{prefix}NAME": self.name,
            f"{prefix}ELEMENT": self.element,
            f"{prefix}NUMBER": self.number,
            f"{prefix}LOAD": f"load_{self.name}",
            f"{prefix}STORE": f"store_{self.name}",
            f"{prefix}FLOATING": int(self.floating),
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
    """Return how the device computes with a dtype; raises `UnsupportedError` if it does not."""
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
    return np.array(value).astype(dtype.numpy()).astype(number.scalar)


def scalar_bits(value: float | int | bool, dtype: DType) -> Any:
    """Return the bits of a Python number in a dtype, as an argument of a kernel that copies."""
    return np.array(value).astype(dtype.numpy()).view(bits_of(dtype).scalar)


def dtype_of(x: Array) -> DType:
    return known_dtype(x.dtype)


BOOL = DTYPES["bool"]
INT32 = DTYPES["int32"]
FLOAT32 = DTYPES["float32"]
