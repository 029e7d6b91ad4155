"""Hints for names of other libraries, such as `nn.Linear`."""

from __future__ import annotations

from collections.abc import Sequence

ACTIVATIONS = {"gelu", "gelu_tanh", "identity", "relu", "sigmoid", "silu", "softmax", "tanh"}
"""Activations, which have no class; listed here too, because importing them loads all ops."""

_ELSEWHERE = {
    "bce": "nn.binary_cross_entropy",
    "bceloss": "nn.binary_cross_entropy",
    "bcewithlogitsloss": "nn.binary_cross_entropy",
    "compile": "anydevice.compile",
    "crossentropy": "nn.cross_entropy",
    "crossentropyloss": "nn.cross_entropy",
    "dataloader": "nn.Batches",
    "fit": "nn.train",
    "linear": "nn.Dense",
    "mlp": "nn.GatedMLP",
    "mse": "nn.mean_squared_error",
    "mseloss": "nn.mean_squared_error",
    "multiheadattention": "nn.Attention",
    "sequential": "nn.build or nn.Chain",
    "transformer": "nn.TransformerBlock",
    "transformerencoderlayer": "nn.TransformerBlock",
}
"""Names of other libraries, in lower case without underscores, and ours for them."""


class NoSuchNameError(AttributeError):
    """A module has no such name; the text, made when it is read, suggests another.

    Python asks a package for each submodule that is imported from it, and drops the error unread.
    """

    def __init__(self, module: str, wanted: str, names: Sequence[str]) -> None:
        super().__init__(module, wanted)
        self._names = names

    def __str__(self) -> str:
        module, wanted = self.args
        return f"module {module!r} has no attribute {wanted!r}{hint(wanted, self._names)}"


def hint(name: str, names: Sequence[str]) -> str:
    """The end of a sentence that suggests one of `names`; empty where none is close.

    >>> hint("Linear", ["Dense"]), hint("Conv2D", ["Conv2d"]), hint("Quux", ["Dense"])
    ('; did you mean nn.Dense?', '; did you mean nn.Conv2d?', '')
    >>> hint("ReLU", [])
    '; activations are named, as in nn.build(nn.Dense(4, 2), "relu")'
    """
    from difflib import get_close_matches

    small = name.lower()
    if small in ACTIVATIONS:
        return f'; activations are named, as in nn.build(nn.Dense(4, 2), "{small}")'
    meant = _ELSEWHERE.get(small.replace("_", ""))
    if meant is None:
        # In lower case: Conv2D is closest to Conv2d.
        ours = {each.lower(): each for each in reversed(names)}
        near = get_close_matches(small, ours, 1, 0.75)
        meant = f"nn.{ours[near[0]]}" if near else None
    return "" if meant is None else f"; did you mean {meant}?"
