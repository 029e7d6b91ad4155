"""Calls that every run draws anew from a described space, beside the fixed cases of the table.

A line of `SPACES` describes calls of some ops: `ops: arguments; option=values | kinds`, with the
kinds of numbers and, after another `|`, of integers; a `:` gives one argument its own. An argument
lists the sizes of an array. A letter is drawn once for the call. X is any shape, Y has axes, L is Y
without its last axis, l; I is a shape of indices, B broadcasts. `~` lets an array broadcast, `#` be
a number, `?` be left out; with `!` no axis is empty. `&` are booleans, `@n` integers up to n, `[X]`
is a list of arrays, `[A]` of one shape, `=n` a size, `$name` in `VALUES`. Of `a/b` one is picked.

Each value of a choice comes once before any comes again, so that a run meets all ranks, axes,
options and lengths around powers of two. Calls outside of an op's contract are not drawn.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, permutations
from math import copysign, inf, nan, prod
from typing import Any, TypeVar

import numpy as np

from anydevice._check import reference
from anydevice._check.cases.case import (
    EVERYTHING,
    LARGEST,
    LAYOUTS,
    Call,
    Case,
    Draw,
    Row,
    call,
)
from anydevice._check.cases.decoding import DYNAMIC, LLAMA3, LONGROPE, YARN
from anydevice._check.cases.elementwise import FLUSHED
from anydevice._check.cases.quantized import draw_weight, fitting_schemes
from anydevice._core.dtypes import DTYPES
from anydevice._core.quantized import QuantizedWeight

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
Value = TypeVar("Value")

SPACES = """
negative abs sign relu logical_not bitwise_invert positive tanh sigmoid erf atan asinh: X
isnan isfinite isinf signbit: X | odd limits nans huge
exp expm1 sinh cosh: X | plain wide full past zeros limits denormal
floor round ceil trunc: X | any halves
log sqrt rsqrt log1p log2 log10 acosh reciprocal: X | sizes positive sizes tiny odd denormal
acos asin atanh: X | unit odd zeros
bitwise_left_shift bitwise_right_shift: X~, X~ | any | spans
floor_divide remainder: X~#, X~# | normal repeats odd | digits extremes repeats
sin cos tan: X | plain wide beyond zeros odd denormal
silu: X | plain wide past zeros odd
gelu: X, False | plain wide past zeros nans
gelu: X, True | plain wide zeros nans
leaky_relu: X, 0.01/0.3/-0.2/1.5/0.0/1
add subtract bitwise_and bitwise_or bitwise_xor: X~#, X~# | any | digits normal
multiply: X~#, X~# | any | short repeats
square: X | any | short repeats
divide: X~#, X~#:positive signs beyond | normal large huge zeros beyond tiny repeats
divide: X, X | huge
power: X~#:base, X~#:exponent
power: X, 0.5/2/3/-1/-0.5/1/0 | normal repeats
maximum minimum equal not_equal greater greater_equal less less_equal atan2 copysign hypot
  logaddexp: X~#, X~# | order
logical_and logical_or logical_xor: X~, X~
where: X~&, X~#, X~# | moved
clip: X, X~#?:plain, X~#?:plain
swiglu: X, X | plain wide nans zeros
sum mean: X!; axis=$axes; keepdims=/True | plain heavy large odd zeros rising | short repeats
var std: X; axis=$axes; keepdims=/True; correction=/0/1/0.5/2 | normal positive offset odd
max min: X!; axis=$axes; keepdims=/True | order
prod: X; axis=$axes; keepdims=/True | near near zeros signs steady | signs few
any all count_nonzero: X; axis=$axes; keepdims=/True | few most zeros odd constant | few most normal
logsumexp: X; axis=$axes; keepdims=/True | soft
vector_norm: X!; axis=$axes; keepdims=/True; ord=/1/2/3/1e999/-1e999/0/4 | plain heavy zeros odd
cumulative_sum: Y; axis=$axis; include_initial=/False/True | plain heavy odd zeros | short repeats
cumulative_prod: Y; axis=$axis; include_initial=/False/True | near signs | signs few
searchsorted: $sorted, X; side=/'left'/'right' | order
nonzero: Y | few most zeros odd | few most normal
unique_values: X | order | digits repeats
diff: Y; axis=$axis; n=/1/2/3/0 | plain heavy odd zeros rising | normal repeats
argmax argmin: Y!; axis=$axis | order
sort argsort: Y; axis=$axis; descending=/False/True | order | digits lowest repeats
softmax log_softmax: Y, $axis | soft
top_k: Y!, $k | order
reshape: X, $regroup | moved
permute: X, $order | moved
expand_dims: X, $new | moved
squeeze: 1 m n, 0/(0,)/-3 | moved
moveaxis: Y, $axis, $place | moved
matrix_transpose: B m n | moved
tril triu: B m n, 0/1/-2/60/-60 | moved
repeat: Y, 1/2/3/0; axis=/$axis | moved
roll: Y, 1/-1/7/100/0; axis=/$axis | moved
tile: X, 1/3/(2,1)/(1,2,1)/0 | moved
unstack: h m b, 0/-1/-3 | moved
broadcast_arrays: X~, X~, X~ | moved
meshgrid: m, b, c; indexing=/'xy'/'ij' | moved
linspace: -3/0/2.5, 7/-2/0.125, 1/2/0/513/1000; like=a
split: Y, $cuts, $axis | moved
pad: X, $widths, $value | moved
slice_axis: Y, $axis, $start, $stop, 1/2/3/4/5/7 | moved
flip: X, $axes | moved
broadcast_to: X~, =X | moved
take: Y, I@z, $axis | moved
take_along_axis: Y, $ids, $axis | moved
concat: $pieces, $axis | moved
stack: [A], $new | moved
embedding: m n, I@m | moved
cache_write: b h t d, b h q d, $places | moved
astype: X, $dtype | normal halves past zeros tiny | short repeats
one_hot: I@n, =n, $own
zeros ones: =X; like=a; dtype=///$dtype
full: =X, $value; like=a
zeros_like ones_like: X; dtype=///$dtype
full_like: X, $value
full_like: X, 0.375; dtype='float32'
arange: 0/3/-40, 9/100/513/1025/-77, 1/2/3/-1/-7; like=a
eye: =m, =n; k=/0/1/-1/2/-3/60; like=a
matmul: B m k, B k n | product
linear: B k, n k, n? | product
vecdot: B m k, B m k; axis=/-1/-2 | product | repeats
tensordot: b c k, c k h; axes=/([1, 2], [0, 1])/([-1], [1]) | product | repeats
outer: m, n | any | short
einsum: 'ij,jk->ik'/'ij,jk->ki'/'ij,jk->i'/'ij,jk->'/'kj,ji', i m, m f | plain | repeats
einsum: 'ijkl->lijk'/'ijkl->kj'/'ijkl->jl'/'ijkl->'/'ijkl->kjil'/'ljki', c n i b | plain | repeats
einsum: 'abij,abjk->abik'/'abij,abjk->bki'/'abij,abjk->ia', b c f m, b c m h | plain | repeats
einsum: 'ij,jk,kl->il'/'ij,jk,kl->lki'/'ij,jk,kl->j', i m, m f, f c | plain | repeats
quantized_linear: B m K, $weight, o? | plain heavy zeros nans
dequantize: $matrix; dtype=$own; rows=//I@o
rmsnorm: Y!, l:normal positive, 1e-5/1e-3/1e-6 | plain heavy odd zeros large
layernorm: Y!, l?:normal, l?:normal, 1e-6/1e-3/1e-5 | plain heavy odd zeros offset
layernorm: Y!, l?:normal, l?:normal, 0.0 | normal
rmsnorm: Y!, l:normal, 0.0 | normal
cross_entropy: Y!, L@l | soft
mean_squared_error: X!, X! | plain heavy odd
conv2d: b c y x, f c i j:plain, f?; stride=/2/3/4/(1, 3)/(3, 2); padding=/0/1/2/(2, 0) | image
conv_transpose2d: b c v w, c f i j:plain, f?; padding=/0/1/(1, 0); stride=/1/2/3/4/(2, 3) | image
conv_transpose2d: b c v w, c f i j:plain, f?; stride=2/3/(2, 4); output_padding=0/1/(1, 0) | image
max_pool2d avg_pool2d: b c y x, 1/2/3/5/(2,3)/(4,1), None/1/2/3/(3,1) | image odd beyond
rope: b h t d, t@r/b t@r; theta=/1e4/5e5/1e6; interleaved=/False/True; scaling=$scaling;
  length=//$length | plain beyond nans
attention: b h*g q d:normal, b h t d:normal, b h t d/b h t u; causal=/True/False;
  scale=///0.3/-0.2; window=//1/3/16/200; soft_cap=///2.0/30.0; sinks=///h*g; lengths=//b@t;
  mask=///b t&/b 1 q t&/b h*g q t&/h*g q t&/1 q t& | normal beyond
experts: s n, e 2*i n:weights, e n i:weights, s p@e, s p; gate_up_bias=/e 2*i; down_bias=/e n;
  activation=/'swiglu'/'clipped_swiglu'/'geglu'/'geglu_tanh'; alpha=/1.3; limit=/2/0.5/7.0 | gates
update_sgd: [X], [X], [X]; rate=0.1/0.01; momentum=/0.9/0.5; decay=/0.1; nesterov=/True | steps
update_adam: [X], [X], [X], [X]:positive, 1/2/7/100/10000; rate=0.1/0.01; beta1=/0.8; beta2=/0.95;
  eps=/1e-6/1e-3; decay=/0.1; decoupled=/True/False | steps
update_lion: [X], [X], [X]; rate=0.1/0.01; beta1=/0.95; beta2=/0.98; decay=/0.1 | apart
"""

KINDS = {
    "plain": "normal tiny positive repeats",
    "any": "normal tiny positive repeats digits beyond large huge zeros limits denormal",
    "soft": "normal repeats wide beyond large far sparse odd constant rising heavy",
    "order": "normal repeats limits rising falling constant zeros huge digits",
    "moved": "normal limits zeros huge",
    "product": "normal tiny positive repeats beyond zeros nans heavy",
    "image": "normal tiny positive zeros",
    "gates": "normal positive repeats wide",
    "steps": "normal normal tiny zeros",
}
POWERS = [2**power + step for power in range(3, 13) for step in (-1, 0, 1)]
LENGTHS = (*POWERS, 1, 2, 3, 5, 6, 10, 13, 20, 48, 77, 100, 200, 384, 500, 1000, 1536, 3001, 0, 0)
"""Sizes of one axis; 0 is any up to 65,536."""
SHORT = (1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 33, 64, 65)
"""Sizes of the other axes."""
SIZES: Mapping[str, Sequence[int]] = {
    **dict.fromkeys("bhgp", (1, 2, 3)),
    **dict.fromkeys("cfije", (1, 2, 3, 4, 5)),
    **dict.fromkeys("yxvw", (5, 6, 7, 9, 12, 16, 33)),
    "d": (2, 4, 8, 16, 32, 36, 64, 64, 80, 100, 128),
    "u": (1, 8, 16, 33, 40, 64, 77),
    "K": (32, 64, 96, 256, 512, 1024),
    "o": (1, 2, 7, 33, 64, 257),
    "q": (1, 1, 2, 3, 5, 9, 17, 33),
    "r": (50, 3000, 200000),
}
"""The same for some letters."""
LARGE = {"y": 1031, "x": 1033, "v": 515, "w": 517, "d": 8, "r": 99, "K": 32} | dict.fromkeys(
    "bhgcfpqij", 1
)
"""The same in a large call, where one axis is longer than 2¹⁸; all others are 5."""
EQUAL = "bhmknctf"
"""Sizes that may be equal."""
INDICES = ((), (1,), (7,), (2, 3), (0,), (65,), (1, 2, 3))
BATCHES = ((), (), (2,), (7,), (3, 2), (1, 3), (2, 1, 2))
INEXACT = ("layernorm", "cross_entropy", "mean_squared_error")
MOST = 2**12
"""Elements of an array, unless one axis alone has more."""


class Space(Draw):
    """The calls of one op in one dtype; with `large`, arrays have more than 2¹⁸ elements.

    >>> space = Space("sum", "float32", 7)
    >>> sorted(space.pick("axis", (-1, 0, 1)) for _ in range(3))
    [-1, 0, 1]
    """

    def __init__(self, op: str, dtype: str, seed: int, *, large: bool = False) -> None:
        super().__init__(DTYPES[dtype], f"{op} {dtype} {large}", seed)
        lines = (line.split(": ", 1) for line in SPACES.strip().replace("\n ", "").splitlines())
        self.lines = [line for ops, line in lines if op in ops.split()]
        self.op, self.vast, self.denormals = op, large, False
        self.decks: dict[tuple[str, int], list[int]] = {}

    def pick(self, choice: str, values: Sequence[Value]) -> Value:
        """Return a value; each comes once before any comes again."""
        deck = self.decks.setdefault((choice, len(values)), [])
        if not deck:
            deck += self._random.permutation(len(values)).tolist()
        return values[deck.pop()]

    def whole(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, both included."""
        return int(self._random.integers(low, high + 1))

    def call(self) -> Call:
        line, *kinds = self.pick("line", self.lines).split(" | ")
        self.kinds = [*kinds, *("any", "digits extremes repeats")[len(kinds) :]]
        texts, *choices = line.split("; ")
        names = texts.translate(str.maketrans("=@?,/", "     ")).split()
        self.long = self.pick("long", [one for one in "mknt" if one in names] or [""])
        self.sizes: dict[str, Any] = {}
        # Equal sizes show axes that are mixed up.
        self.equal = 0 if self.vast else self.pick("equal", (0, 0, 0, 2, 3, 5))
        self.axis, self.denormals = 0, False
        arguments = [self.value(text) for text in texts.split(", ")]
        values = {name: self.value(text) for name, text in (one.split("=", 1) for one in choices)}
        made = call(
            *arguments, **{name: one for name, one in values.items() if one is not LEFT_OUT}
        )
        return _attend(self, made) if self.op == "attention" else made

    def value(self, text: str) -> Any:
        """Return the argument that a text describes."""
        text = self.pick(text, text.split("/"))
        if text[:1] == "$":
            return VALUES[text[1:]](self, self.sizes.get("X", ()))
        try:
            return literal_eval(text) if text else LEFT_OUT
        except (SyntaxError, ValueError):
            return self.array(*text.partition(":")[::2])

    def array(self, text: str, kinds: str) -> Any:
        if "?" in text and self.chance(of=0.3):
            return None
        if "#" in text and self.chance(of=0.2) and not self.sizes.get("#"):
            self.sizes["#"] = 1  # the other one must be an array
            numbers = {"bool": (0, 1, 1), "int": (3, -2, 0)}.get(
                self.dtype.kind, (3, -2, 0.375, 0.0)
            )
            return self.pick("number", numbers)
        name, _, most = text.strip("~#?!&[]=").partition("@")
        if text[0] == "[":
            draw = self.any_shape if name == "X" else partial(self.size, name)
            shapes = [draw() for _ in range(1 if self.vast else self.whole(1, 4))]
            shapes = shapes[:1] * len(shapes) if self.equal else shapes
            return [self.numbers(shape, kinds) for shape in self.sizes.setdefault("[", shapes)]
        parts = [self.size(part, empty="!" not in text) for part in name.split()]
        shape = sum(parts, ())
        if text[0] == "=":
            return shape if name == "X" else shape[0]
        if most:
            size, beyond = self.size(most)[0], self.pick("beyond", (0, 0, 2, 100, -1))
            beyond = 0 if most == "r" else beyond
            ids = self.integers(min(0, -beyond), size + max(0, beyond), *shape)
            if beyond < 0 and ids.size:  # one alone is out of range
                ids.reshape(-1)[self.whole(0, ids.size - 1)] = self.pick("id", (-1, -100, size))
            return ids
        others = not self.vast or "~" in self.sizes or self.op == "broadcast_to"
        if "~" in text and others and self.chance():
            shape = self.thin(shape)
        elif "~" in text:
            self.sizes["~"] = shape
        if "&" in text:
            return self.chance(*shape, of=self.pick("true", (0.3, 0.8, 0.97)))
        return self.numbers(shape, kinds)

    def size(self, name: str, *, empty: bool = True) -> Shape:
        """Return the sizes that a name stands for in this call."""
        if name == "I":
            return self.pick("indices", INDICES)
        if name in "XYA":
            if "X" not in self.sizes:
                self.sizes["X"] = self.any_shape(name == "Y", empty=empty)
            return self.sizes["X"]
        if name in "Llz":
            x = self.sizes["X"]
            return {"L": x[:-1], "l": x[-1:], "z": (max(1, x[self.axis]),)}[name]
        if name == "B":
            batch = () if self.vast else self.pick("batch", BATCHES)
            batch = tuple(self.equal or size for size in batch)
            return self.thin(self.sizes.setdefault("B", batch))
        if name.isdigit() or "*" in name:
            factors = [part if part.isdigit() else self.size(part)[0] for part in name.split("*")]
            return (prod(map(int, factors)),)
        if name not in self.sizes:
            usual = LARGE.get(name, 5) if self.vast else self.pick(name, SIZES.get(name, SHORT))
            most = 1100 if name == "t" else 4200
            size = self.length(most) if name == self.long else usual
            self.sizes[name] = (self.equal if self.equal and name in EQUAL else size,)
        return self.sizes[name]

    def length(self, most: int = 2**16) -> int:
        """Return the length of a long axis."""
        if self.vast:
            return 2**18 + 2 * self.whole(1, 999) + 1
        length = self.pick("length", LENGTHS) or int(2 ** self._random.uniform(1, 16))
        return length if length <= most else self.whole(1, most)

    def any_shape(self, low: int = 0, *, empty: bool = True) -> Shape:
        """Return sizes of up to five axes: one has a drawn length, others are short."""
        rank = self.pick("rank", (2, 3) if self.vast else range(low, 6))
        if not rank:
            return ()
        at = self.pick(f"long axis of {rank}", range(rank))
        self.axis = self.pick(f"axis of {rank}", (*range(-rank, rank), *[at, at - rank] * rank))
        if self.equal:
            return (self.equal,) * rank
        sizes = [1] * rank
        sizes[at] = self.length()
        for other in range(at + 1, at + rank):
            sizes[other % rank] = min(self.pick("size", SHORT), max(1, MOST // prod(sizes)))
        if self.vast:
            self.axis, sizes[at - 1] = at, 4
        elif empty and self.pick("empty", range(16)) == 0:
            sizes[self.whole(0, rank - 1)] = 0
        return tuple(sizes)

    def thin(self, shape: Shape) -> Shape:
        """Return a shape that broadcasts to this one: some sizes are 1, some axes missing."""
        half = len(shape) // 2
        some = tuple(1 if self.chance(of=0.4) else size for size in shape)
        left, right = (*shape[:half], *[1] * (len(shape) - half)), (*[1] * half, *shape[half:])
        at = self.whole(0, len(shape))
        if self.equal:  # a missing axis is mixed up with another
            return self.pick("thin", (some, shape[1:], shape[at:]))
        return self.pick("thin", (some, some[at:], shape[at:], left, right))

    def numbers(self, shape: Shape, kinds: str = "") -> Array:
        """Draw numbers of one of the kinds; each is in `NUMBERS` or a method."""
        if self.dtype.kind == "bool":
            return self.chance(*shape, of=self.pick("chance", (0.5, 0.03, 0.97)))
        texts = self.kinds[1] if self.dtype.kind == "int" else kinds or self.kinds[0]
        choices = " ".join(KINDS.get(one, one) for one in texts.split())
        kind = self.pick(texts, choices.split())
        if self.vast and "sparse" in choices:  # where errors of long sums are small
            kind = self.pick("sparse", ("sparse", kind))
        if self.vast and not kinds and kind in ("positive", "rising"):  # all are rounded one way
            kind = "normal"
        if self.vast and self.op in ("sum", "mean"):
            kind = "few"  # exact in any order
        self.denormals |= kind == "denormal"
        drawn = NUMBERS[kind](self, shape) if kind in NUMBERS else getattr(self, kind)(*shape)
        return np.asarray(drawn).astype(self.dtype.numpy(), copy=False)

    def normal(self, *shape: int, spread: float = 1.0, middle: float = 0.0) -> Array:
        """Draw as any draw does, but nothing so close to 0 that its fourth power underflows."""
        x, least = super().normal(*shape, spread=spread, middle=middle), spread * 2.0**-16
        if self.dtype.kind != "float":
            return x
        near = np.abs(x) < least
        return np.where(near, np.copysign(x.dtype.type(least), x), x)

    def choose(self, values: Any, shape: Shape) -> Array:
        return np.asarray(self._random.choice(self.listed(values), shape))

    def plant(self, shape: Shape, *values: float, among: str = "") -> Array:
        """Draw numbers of a kind, else normal ones, with a few of these among them."""
        x = np.array(NUMBERS[among](self, shape), float) if among else self.normal(*shape)
        for _ in range(min(x.size, 1 + x.size // 50, 99)):
            x.reshape(-1)[self.whole(0, x.size - 1)] = self.pick("special", values)
        return x

    def shuffle(self, values: Any) -> list[Any]:
        return list(self._random.permutation(values).tolist())


LEFT_OUT: Any = object()
"""An option that a call does not have."""


SPREADS = ((1, 1), (1, 1), (4, 2), (300, 0.01), (0.01, 300), (1e-3, 1))
"""The spreads of queries and keys."""


def _attend(s: Space, made: Call) -> Call:
    """Change the spread of scores; hide NaN, or let every query attend to infinity."""
    (q, k, v), options = made.arguments, dict(made.options)
    if s.chance(of=0.25) and "mask" not in options and "lengths" not in options:
        k, v = k[:, :, : q.shape[2]].copy(), v[:, :, : q.shape[2]].copy()
    for x, spread in zip((q, k), s.pick("spread", SPREADS), strict=True):
        x *= x.dtype.type(spread)
    if not options.get("causal"):
        options.pop("window", None)
    excluding = {name: options[name] for name in ("mask", "lengths") if name in options}
    if excluding and s.chance():
        visible = reference.seen_keys(q, k, **excluding).any(2)
        hidden = ~visible.reshape(*k.shape[:2], -1, k.shape[2]).any(2)
        k[hidden], v[hidden] = nan, nan
    elif options.keys() <= {"causal", "scale"} and k.shape[2] >= q.shape[2] and s.dtype.bits > 16:
        q[..., 0], k[:, :, 0, 0] = 1, copysign(inf, options.get("scale") or 1)
    return call(q, k, v, **options)


def _weight(s: Space, *shape: int) -> QuantizedWeight:
    columns = shape[-1]
    return draw_weight(s, s.pick(f"scheme of {columns}", fitting_schemes(columns)), *shape)


def _axes(s: Space, x: Shape) -> Any:
    sets = [axes for size in range(1, len(x) + 1) for axes in combinations(range(len(x)), size)]
    some = s.pick(f"axes of {len(x)}", (None, (), *sets, *sets[: len(x)] * 2))
    if some is None or s.vast:
        return s.axis if s.vast else None
    axes = tuple(at - len(x) * s.whole(0, 1) for at in s.shuffle(some))
    return axes[0] if len(axes) == 1 else axes


def _places(s: Space, x: Shape) -> Array:
    """Draw a place in the cache for each token, no place twice."""
    (batch,), (keys,), (tokens,) = (s.size(name) for name in "btq")
    rows = [s.shuffle(max(keys, tokens) + 2)[:tokens] for _ in range(batch)]
    return np.array(rows[0] if s.chance() else rows, np.int32) - 1


def _pieces(s: Space, x: Shape) -> Any:
    shape = s.size("Y")
    sizes = [*s.integers(0, 6, s.pick("arrays", (0, 1, 2, 4, 8, 16))).tolist(), shape[s.axis]]
    axis = s.axis % len(shape)
    return [s.numbers((*shape[:axis], size, *shape[axis + 1 :])) for size in sizes]


def _scaling(s: Space, x: Shape) -> Any:
    (size,) = s.size("d")
    known = [
        None,
        None,
        {"rope_type": "linear", "factor": 4.0},
        *[LLAMA3, YARN, DYNAMIC] * (size > 8),
    ]
    return s.pick(f"scaling of {size}", [*known, *[LONGROPE] * (size == 64)])


def _ids(s: Space, x: Shape) -> Array:
    sizes = [1 if s.chance(of=0.2) else size for size in x]
    sizes[s.axis] = s.pick("ids", (1, 2, 3, 5, 9, 0, x[s.axis]))
    return s.integers(-1, x[s.axis] + 1, *sizes)


def _regroup(s: Space, x: Shape) -> Shape:
    count, first = prod(x), prod(x[:2])
    sizes = s.pick("regroup", (s.shuffle(x), [*s.shuffle(x), 1], [first, *x[2:]]))[:5]
    if s.chance() and count and sizes:
        sizes[s.whole(0, len(sizes) - 1)] = -1
    return tuple(sizes) if -1 in sizes or prod(sizes) == count else x


def _cuts(s: Space, x: Shape) -> Any:
    size = x[s.axis]
    even = [count for count in (8, 7, 5, 4, 3, 2, 1) if size % count == 0]
    return s.pick("cuts", (even[0], even[-1], sorted(s.integers(0, size + 1, 3).tolist())))


VALUES: Mapping[str, Callable[[Space, Shape], Any]] = {
    "axis": lambda s, x: s.axis,
    "weight": lambda s, x: _weight(s, *s.size("o"), *s.size("K")),
    "matrix": lambda s, x: (
        _weight(s, 2**14, 64) if s.vast else _weight(s, *s.size("o"), *s.size("K"))
    ),
    "axes": _axes,
    "place": lambda s, x: s.whole(-len(x), len(x) - 1),
    "sorted": lambda s, x: np.sort(s.numbers((s.length(),))),
    "new": lambda s, x: s.pick(f"new axis of {len(x)}", range(-len(x) - 1, len(x) + 1)),
    "k": lambda s, x: s.pick("k", (1, x[-1], s.whole(1, x[-1]), min(5, x[-1]))),
    "regroup": _regroup,
    "order": lambda s, x: tuple(
        at - len(x) * (s.whole(0, 9) == 0)
        for at in s.pick(f"order of {len(x)}", [*permutations(range(len(x)))])
    ),
    "cuts": _cuts,
    "widths": lambda s, x: s.pick(
        "widths", ([(s.whole(0, 1), s.whole(0, 1 + (size > 4))) for size in x], s.whole(0, 1))
    ),
    "value": lambda s, x: s.pick(
        "value",
        {"int": (0, 1, 2**24 + 1), "bool": (0, 1)}.get(
            s.dtype.kind, (0, -7, 0.375, nan, inf, -inf)
        ),
    ),
    "start": lambda s, x: s.whole(0, x[s.axis] // 2),
    "stop": lambda s, x: s.whole((x[s.axis] + 1) // 2, x[s.axis]),
    "ids": _ids,
    "pieces": _pieces,
    "places": _places,
    "dtype": lambda s, x: s.pick("dtype", EVERYTHING),
    "own": lambda s, x: s.dtype.name,
    "scaling": _scaling,
    "length": lambda s, x: s.pick("texts", (s.whole(1, 9000), s.integers(1, 9000, *s.size("b")))),
}

NUMBERS: Mapping[str, Callable[[Space, Shape], Any]] = {
    "tiny": lambda s, shape: s.normal(*shape, spread=s.pick("tiny", (1e-2, 1e-3, 1e-4))),
    "wide": lambda s, shape: s.normal(*shape, spread=6.0),
    "weights": lambda s, shape: s.normal(*shape, spread=max(1, shape[-1]) ** -0.5),
    "offset": lambda s, shape: s.normal(*shape, middle=s.pick("middle", (30.0, -100.0))),
    # Not all alike along other axes: long sums of equal numbers are all rounded one way.
    "heavy": lambda s, shape: s.heavy(*shape) * s.uniform(0.5, 1, *shape) if shape else s.normal(),
    # At most about 300 are other than 1: no order of multiplying overflows or underflows.
    "near": lambda s, shape: np.where(
        s.chance(*shape, of=300 / max(300, prod(shape))), s.uniform(0.9, 1.1, *shape), 1
    ),
    "unit": lambda s, shape: s.uniform(-1, 1, *shape),
    "spans": lambda s, shape: s.integers(-3, 40, *shape),
    "base": lambda s, shape: s.uniform(0.01, 30, *shape),
    "exponent": lambda s, shape: s.uniform(-3, 3, *shape),
    "sizes": lambda s, shape: np.abs(s.large(*shape)),
    "past": lambda s, shape: s.uniform(100, 600, *shape) * s.choose([-1, 1], shape),
    "beyond": lambda s, shape: 10 ** s.uniform(2, 4, *shape) * s.choose([-1, 1], shape),
    "full": lambda s, shape: s.uniform(-87, 87, *shape),
    "far": lambda s, shape: s.uniform(-2000, -1000, *shape),
    "huge": lambda s, shape: s.uniform(-1, 1, *shape) * LARGEST[s.dtype.name],
    "zeros": lambda s, shape: s.choose([0.0, -0.0, 0.0, -0.0, 1.0, -0.5], shape),
    "few": lambda s, shape: s.choose([0] * 60 + [1], shape),
    "most": lambda s, shape: s.choose([1] * 60 + [0], shape),
    "signs": lambda s, shape: s.choose([1, -1], shape),
    "apart": lambda s, shape: s.choose([-20, -3, -1, -0.25, 0.25, 1, 3, 20], shape),
    "repeats": lambda s, shape: s.choose([-3, -2, -1, 0, 1, 2, 3], shape),
    "halves": lambda s, shape: s.uniform(-1000, 1000, *shape).round() / 2,
    "lowest": lambda s, shape: s.choose([2**31 - 1, -(2**31), 0, 1], shape),
    "extremes": lambda s, shape: s.choose([2**31 - 1, 1 - 2**31, 2**24 + 1, 0, 1], shape),
    "short": lambda s, shape: s.integers(-46340, 46341, *shape),
    "nans": lambda s, shape: s.plant(shape, nan),
    "odd": lambda s, shape: s.plant(shape, nan, inf, -inf, 0.0, -0.0),
    # A product that underflows and then meets infinity is NaN or not, by the order.
    "steady": lambda s, shape: s.plant(shape, nan, inf, -inf, 0.0, -0.0, among="signs"),
    "limits": lambda s, shape: s.plant(shape, LARGEST[s.dtype.name], nan, inf, -inf, 0.0, -0.0),
    "rising": lambda s, shape: np.sort(s.normal(*shape), None).reshape(shape),
    "falling": lambda s, shape: -np.sort(s.normal(*shape), None).reshape(shape),
    "constant": lambda s, shape: np.full(shape, s.normal() if prod(shape) < 256 else 0),
    "sparse": lambda s, shape: np.where(
        s.chance(*shape, of=40 / max(40, *shape, 40)), s.normal(*shape), s.pick("low", (-inf, -300))
    ),
}


def as_drawn(made: Call, draw: Draw) -> Call:
    """Return a call that was drawn before, as the `make` of a case does."""
    return made


def draw_cases(
    row: Row, dtype: str, seed: int, count: int, *, large: bool = False
) -> Iterator[Case]:
    """Yield `count` cases that the seed decides; a kernel that is no op has fixed shapes."""
    space = Space(row.op, dtype, seed, large=large)
    # Long sums of these round more than their budgets allow, if MLX adds them up one by one.
    for number in range(0 if large and row.op in INEXACT else count):
        made = space.call() if space.lines else space.pick("", row.cases_for(dtype)).make(space)
        layout = space.pick("layout", ("", "", "", "", "", *LAYOUTS))
        name = f"{'large draw' if large else 'draw'} {number + 1}: {made.describe(row.op)}"
        flushed = space.denormals and dtype in FLUSHED
        yield Case(name, partial(as_drawn, made), None, flushed, layout != "", layout)
