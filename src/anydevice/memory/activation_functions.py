"""How many tensors the functions between two matrices of a network hold at once.

Most are one operation: its input and its output. Some are formulas, written out operation by
operation in `transformers`, and hold what they have in hand as well. (GELU by "gelu_pytorch_tanh"
is one operation; by "gelu_new", the same formula, it is eight.)
"""

from __future__ import annotations

_FORMULAS = {
    "gelu_new": 4,
    "gelu_accurate": 4,
    "gelu_python": 4,
    "gelu_python_tanh": 4,
    "gelu_fast": 5,
    "gelu_10": 3,
    "quick_gelu": 3,
    "relu2": 3,
}


def tensors_of(activation: str) -> int:
    """The tensors of its input's size that are alive at its peak, input and output included.

    >>> tensors_of("silu"), tensors_of("gelu_new")
    (2, 4)
    """
    return _FORMULAS.get(activation, 2)
