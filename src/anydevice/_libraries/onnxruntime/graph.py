"""Graphs of onnxruntime, written operator by operator, with weights that stay quantized.

A quantized matrix becomes `MatMulNBits` with integer codes as they are stored: 2, 3 and 4 bits as
4, all others as 8. Its minimums are multiplied with the sums of the blocks of x, in float32, so the
numbers of a matrix are exact, and only x is rounded, to 8 bits in each block (as Q8_1 in ggml).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from anydevice._core.quantized import QuantizedWeight
from anydevice._core.record import Record
from anydevice._formats.quantized import block_scales, unpack_codes
from anydevice.errors import UnsupportedError

if TYPE_CHECKING:
    from anydevice._core.array import HostArray

OWN = "com.microsoft"
"""The domain of onnxruntime's own operators."""
OUTSIDE = "weights"
"""The file in which large constants are said to be; nothing is read from it."""
LARGE = 1024
"""Bytes above which a constant is kept outside of the serialized graph."""
LEVELS = frozenset(range(-128, 128))
"""The levels of a table that MatMulNBits multiplies."""

Rows = QuantizedWeight | Any
"""Rows of a matrix in host memory, quantized or float32."""
Write = Callable[[Any, Rows], None]
"""Writes rows of a matrix: their numbers, or a slice, and the rows."""


class GraphMatrix(Record):
    """A matrix (rows, columns) that is read when a session takes it.

    `like` is one of its rows, which tells its scheme; `read` calls a function with all its rows.
    """

    rows: int
    columns: int
    like: Rows
    read: Callable[[Write], None]


class GraphConstant(Record):
    """Arrays of one session that are filled together: their names, shapes and dtypes.

    Those that are `packed` are weights of products, of which onnxruntime makes its own copies.
    """

    arrays: tuple[tuple[str, tuple[int, ...], str], ...]
    fill: Callable[..., None]
    packed: bool = False


class GraphWriter:
    """The nodes, inputs, outputs and constants of a graph."""

    def __init__(self, accuracy: int = 4) -> None:
        self._accuracy = accuracy
        self._nodes: list[Any] = []
        self.inputs: dict[str, Any] = {}
        self._outputs: list[Any] = []
        self._small: list[Any] = []
        self._named: dict[Any, str] = {}
        self.constants: list[GraphConstant] = []
        self.products: set[tuple[int, int, int]] = set()
        """The kinds of products: bits, block and accuracy level; float32 has 32 bits."""

    def input(self, name: str, shape: Sequence[int | str], dtype: str = "float32") -> str:
        """Declare an input; a text in its shape is a size that varies."""
        self.inputs[name] = _value(name, shape, dtype)
        return name

    def output(self, name: str, shape: Sequence[int | str], value: str | None = None) -> str:
        """Declare an output of float32, which is `value` or has its name."""
        self._outputs.append(_value(name, shape, "float32"))
        if value is not None:
            self._nodes.append(helper.make_node("Identity", [value], [name]))
        return name

    def node(
        self, kind: str, *inputs: str, domain: str = "", outputs: Any = 1, **attributes: Any
    ) -> Any:
        """Add a node, and return the name of its output, or of `outputs` as a list."""
        number = len(self._nodes)
        names = [f"{kind}{number}"] if outputs == 1 else outputs
        if isinstance(names, int):
            names = [f"{kind}{number}_{place}" for place in range(names)]
        self._nodes.append(helper.make_node(kind, inputs, names, domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, array: HostArray) -> str:
        """Return the name of a constant."""
        array = np.ascontiguousarray(array)
        key = (
            (array.dtype.str, array.shape, array.tobytes()) if array.nbytes <= LARGE else id(array)
        )
        if key not in self._named:
            name = self._named[key] = f"constant{len(self._named)}"
            if array.nbytes <= LARGE:
                self._small.append(onnx.numpy_helper.from_array(array, name))
            else:
                copy = lambda views: np.copyto(views[0], array)  # noqa: E731
                self.constants.append(GraphConstant(((name, array.shape, array.dtype.name),), copy))
        return self._named[key]

    def product(
        self, x: str, matrices: Sequence[GraphMatrix], bias: HostArray | None = None
    ) -> str:
        """Multiply x (…, columns) with stacked matrices, and add a bias."""
        results, start = [], 0
        for group in (list(same) for _, same in groupby(matrices, _layout)):
            rows = sum(matrix.rows for matrix in group)
            own = None if bias is None else bias[start : start + rows]
            quantized = isinstance(group[0].like, QuantizedWeight)
            results.append(
                (self._multiply_quantized if quantized else self._multiply)(x, group, rows, own)
            )
            start += rows
        return results[0] if len(results) == 1 else self.node("Concat", *results, axis=-1)

    def _multiply(self, x: str, group: list[GraphMatrix], rows: int, bias: Any) -> str:
        columns = group[0].columns
        name = self._weights(group, (((rows, columns), "float32"),), lambda rows: (rows,))[0]
        self.products.add((32, 16, 0))
        y = self.node("FusedMatMul", x, name, domain=OWN, transB=1)
        return y if bias is None else self.node("Add", y, self.constant(bias))

    def _multiply_quantized(self, x: str, group: list[GraphMatrix], rows: int, bias: Any) -> str:
        like, columns = group[0].like, group[0].columns
        if not LEVELS.issuperset(like.table or ()):
            raise UnsupportedError(f"onnxruntime does not multiply the levels of {like.scheme}")
        bits = 4 if like.bits <= 4 and like.table is None else 8
        blocks = columns // like.block
        shapes = [
            ((rows, blocks, like.block * bits // 8), "uint8"),
            ((rows, blocks), "float32"),
        ]
        self.products.add((bits, like.block, self._accuracy))
        if like.minimums is not None:
            shapes.append(((rows, blocks), "float32"))
            self.products.add((32, 16, 0))
        names = self._weights(group, shapes, lambda weight: multiplied(weight, bits))
        inputs = [x, *names[:2], "", "", *([] if bias is None else [self.constant(bias)])]
        y = self.node(
            "MatMulNBits", *inputs, domain=OWN, K=columns, N=rows, bits=bits, block_size=like.block,
            accuracy_level=self._accuracy,
        )  # fmt: skip
        if len(names) == 2:
            return y
        sums = self._block_sums(x, blocks, like.block)
        return self.node("Add", y, self.node("FusedMatMul", sums, names[2], domain=OWN, transB=1))

    def _block_sums(self, x: str, blocks: int, block: int) -> str:
        """Return the sums of the blocks of x, once for each x."""
        key = ("sums", x, block)
        if key not in self._named:
            shape = self.constant(np.array([0, 0, blocks, block], np.int64))
            axis = self.constant(np.array([3], np.int64))
            apart = self.node("Reshape", x, shape)
            self._named[key] = self.node("ReduceSum", apart, axis, keepdims=0)
        return self._named[key]

    def _weights(
        self,
        group: list[GraphMatrix],
        shapes: Sequence[Any],
        convert: Callable[[Rows], Sequence[Any]],
    ) -> list[str]:
        """Add the constants of stacked matrices; `convert` makes them from rows."""
        number = len(self.constants)
        names = [f"weight{number}_{place}" for place in range(len(shapes))]

        def fill(views: Sequence[Any]) -> None:
            start = 0
            for matrix in group:
                own = [view[start : start + matrix.rows] for view in views]

                def write(rows: Any, weight: Rows, own: Any = own) -> None:
                    for view, values in zip(own, convert(weight), strict=True):
                        view[rows] = values.reshape(-1, *view.shape[1:])

                matrix.read(write)
                start += matrix.rows

        arrays = tuple((name, *spec) for name, spec in zip(names, shapes, strict=True))
        self.constants.append(GraphConstant(arrays, fill, packed=True))
        return names

    def serialize(self) -> bytes:
        """Return the graph as bytes of a model, with large constants declared only."""
        outside = [_external(*array) for constant in self.constants for array in constant.arrays]
        graph = helper.make_graph(
            self._nodes,
            "decoder",
            list(self.inputs.values()),
            self._outputs,
            [*self._small, *outside],
        )
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(OWN, 1)]
        model = helper.make_model(graph, opset_imports=opsets)
        model.ir_version = 10
        return bytes(model.SerializeToString())


def multiplied(weight: QuantizedWeight, bits: int) -> tuple[Any, ...]:
    """Return codes, scales and maybe minimums, as MatMulNBits multiplies them.

    It subtracts half the range from codes: 8 from those of 4 bits, 128 from those of 8.
    """
    scales, minimums = block_scales(weight)
    half = 1 << (bits - 1)
    if weight.bits == bits == 4:
        codes = weight.codes
        if minimums is None and weight.zero != half:
            minimums = scales * np.float32(-weight.zero)
        if minimums is not None:
            minimums = minimums + scales * np.float32(half)
        return (codes, scales) if minimums is None else (codes, scales, minimums)
    codes, shift = unpack_codes(weight), half - weight.zero
    if weight.table is not None:
        codes = (np.array(weight.table) + half).astype(np.uint8)[codes]
    elif minimums is not None and int(codes.max(initial=0)) + shift > 255:
        minimums = minimums + scales * np.float32(shift)
    else:
        codes += np.uint8(shift)
    if bits == 4:
        codes = codes[..., ::2] | (codes[..., 1::2] << 4)
    return (codes, scales) if minimums is None else (codes, scales, minimums)


def _layout(matrix: GraphMatrix) -> Any:
    """Return a key that is equal for matrices that can be multiplied at once."""
    x = matrix.like
    if not isinstance(x, QuantizedWeight):
        return None
    return x.scheme, x.bits, x.block, x.zero, x.table, x.minimums is None


def _value(name: str, shape: Sequence[int | str], dtype: str) -> Any:
    return helper.make_tensor_value_info(name, _kind(dtype), list(shape))


def _kind(dtype: str) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _external(name: str, shape: tuple[int, ...], dtype: str) -> Any:
    """Return a constant whose bytes the session is given."""
    tensor = TensorProto(name=name, dims=shape, data_type=_kind(dtype))
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=OUTSIDE)
    return tensor
