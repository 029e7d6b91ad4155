"""Optimizers and schedules as frozen settings, and gradient clipping.

`init` returns the state of an optimizer, and `update` returns new parameters and a new state. Steps
count from 1; `step` and `rate` may be 0-d arrays, so that one compiled step works for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import compress
from typing import Annotated, Any

from anydevice import _ops as ops
from anydevice._core.array import Array
from anydevice._core.checks import is_number
from anydevice._core.record import replace
from anydevice._core.trees import Tree, leaf_names, leaves, mapped, matches, refilled, unmatched
from anydevice._nn.layer import Check, Flag, Number, Positive, Settings, Share, Size, setting_error
from anydevice._ops.arguments import wide
from anydevice._ops.dispatch import primitives
from anydevice._ops.training import WideParameter
from anydevice.errors import ConfigurationError

Arrays = list[Array]
State = dict[str, Tree]
Options = Mapping[str, Any]
"""Settings of a group of parameters, in place of the optimizer's."""
Rate = Annotated["float | Schedule", Check("a finite number of 0 or more", lambda x: _is_rate(x))]


def _is_rate(value: object) -> bool:
    return isinstance(value, Schedule) or (is_number(value) and 0 <= value < math.inf)


class Optimizer(Settings):
    """The base class of optimizers; `rate` is a number or a schedule.

    Your own optimizer defines `init` and `update`; `settings_fit` can check its fields.
    """

    rate: Rate = 1e-3

    def rate_at(self, step: int) -> float:
        """Return the rate of a step, which counts from 1.

        Raises `ConfigurationError` if a schedule returns an invalid rate.
        """
        return rate_of(self.rate, step) if isinstance(self.rate, Schedule) else float(self.rate)

    def init(self, parameters: Tree) -> State:
        """Return the state before the first step: trees like the parameters, on the same device."""
        raise NotImplementedError(f"{type(self).__name__} has no init")

    def update(
        self,
        parameters: Tree,
        gradients: Tree,
        state: State,
        step: int | Array,
        rate: float | Array | None = None,
    ) -> tuple[Tree, State]:
        """Return the parameters and the state after one step.

        The default `rate` is `rate_at(step)`; the step must then be a number.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update")


class _Groups(dict[str, dict[str, Any]]):
    """Options by pattern, which do not change."""

    def __init__(self, given: Mapping[str, Options]) -> None:
        super().__init__({pattern: dict(options) for pattern, options in given.items()})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple((name, tuple(options.items())) for name, options in self.items()))


class BuiltIn(Optimizer):
    """An optimizer whose step is one op over lists of arrays, or one op for each group."""

    is_elementwise = True
    """Whether it can update shards of arrays, since no element depends on another."""

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        groups = getattr(self, "groups", None)
        if groups is not None:
            object.__setattr__(self, "groups", _checked_groups(self, groups))

    @property
    def _groups(self) -> _Groups:
        # The field comes last in each subclass, so that the other fields keep their positions.
        return getattr(self, "groups", None) or _Groups({})

    @property
    def is_uniform(self) -> bool:
        """Whether it treats all parameters alike, whatever their names."""
        return not self._groups

    def _state_names(self) -> tuple[str, ...]:
        """Return the names of the trees of its state."""
        raise NotImplementedError

    def _step(self, arrays: list[Arrays], step: int | Array, rate: float | Array) -> Any:
        """Return the new parameters and trees of the state, from the old ones and the gradients."""
        raise NotImplementedError

    def init(self, parameters: Tree) -> State:
        names = leaf_names(parameters)
        for pattern in self._groups:
            if not any(matches(pattern, name) for name in names):
                raise unmatched(pattern, names, "groups")
        return {n: mapped(partial(self._zeros, n), parameters) for n in self._state_names()}

    def _zeros(self, name: str, parameter: Array) -> Array:
        """Return the first state of a parameter; a single number if it has none of this name."""
        xp = primitives(parameter)
        shape = tuple(parameter.shape) if self._has_state(name, parameter) else ()
        return xp.full(shape, 0, wide(xp.dtype(parameter)), parameter)

    def _has_state(self, name: str, parameter: Array) -> bool:
        return name in self._state_names()

    def update(
        self, parameters: Tree, gradients: Tree, state: State, step: Any, rate: Any = None
    ) -> tuple[Tree, State]:
        names = self._state_names()
        trees = [parameters, gradients, *[state[name] for name in names]]
        rate = self.rate_at(step) if rate is None else rate
        arrays = [leaves(tree) for tree in trees]
        new = (
            self._moved_by_group(leaf_names(parameters), arrays, step, rate)
            if self._groups
            else self._step(arrays, step, rate)
        )
        moved, *states = [refilled(parameters, arrays) for arrays in new if arrays is not None]
        return moved, dict(zip(names, states, strict=True))

    def _moved_by_group(
        self, names: list[str], arrays: list[Arrays], step: int | Array, rate: float | Array
    ) -> list[Arrays]:
        for options, places in _group_by_options(self._groups, tuple(names)):
            options = dict(options)
            own_rate, scaled = options.pop("rate", None), rate
            if own_rate is not None:
                scaled = _scale_rate(rate, own_rate / base_rate(self.rate))
            own = replace(self, groups=None, **options)
            _step_at(places, own, arrays, range(len(arrays)), step, scaled)
        return [arrays[0], *arrays[2:]]


def _scale_rate(rate: Any, factor: float) -> Any:
    return rate * factor if is_number(rate) else ops.multiply(rate, factor)


def _step_at(places: Any, own: BuiltIn, arrays: list[Arrays], rows: Any, *how: Any) -> None:
    """Replace the arrays at these places; rows are the parameters, the gradients and the state."""
    moved = own._step([[arrays[row][at] for at in places] for row in rows], *how)
    for row, new in zip((0, *rows[2:]), moved, strict=False):
        for at, array in zip(places, new or (), strict=False):
            arrays[row][at] = array


def _checked_groups(optimizer: BuiltIn, groups: Any) -> _Groups:
    kind = type(optimizer).__name__
    known = [name for name in optimizer._fields if name != "groups"]
    if not isinstance(groups, Mapping) or not all(
        isinstance(name, str) and isinstance(options, Mapping) for name, options in groups.items()
    ):
        raise setting_error(
            optimizer, "groups", "a dict such as {'*.bias': {'decay': 0.0}}", groups
        )
    for pattern, options in groups.items():
        for name in options:
            if name not in known:
                raise ConfigurationError(
                    f"{kind}: groups[{pattern!r}] has {name!r}; a group of {kind} may have "
                    f"{', '.join(known)}",
                    source=f"{kind}.groups",
                )
        try:
            replace(optimizer, groups=None, **options)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{kind}: groups[{pattern!r}]: {error}", source=error.source
            ) from None
        if "rate" in options:
            _check_group_rate(optimizer, f"{kind}: groups[{pattern!r}]", options["rate"])
    return _Groups(groups)


def _check_group_rate(optimizer: Optimizer, where: str, rate: Any) -> None:
    kind = "the last optimizer" if isinstance(optimizer, ByName) else type(optimizer).__name__
    if not is_number(rate) or not base_rate(optimizer.rate):
        raise ConfigurationError(
            f"{where}: a group's rate must be a number, and the rate of {kind} a number above 0 "
            f"or a schedule with a rate; they are {rate!r} and {optimizer.rate!r}. To scale both, "
            "give a schedule to nn.train",
            source=where,
        )


def base_rate(rate: float | Schedule) -> float:
    """Return the rate that a schedule begins to decay from; 0 if it does not say.

    >>> base_rate(0.1), base_rate(WarmUp(10, then=CosineRate(0.2, steps=100)))
    (0.1, 0.2)
    """
    if isinstance(rate, WarmUp):
        return base_rate(rate.then)
    base = getattr(rate, "rate", 0.0) if isinstance(rate, Schedule) else rate
    return float(base) if is_number(base) else 0.0


@lru_cache(maxsize=32)
def _group_by_options(
    groups: _Groups, names: tuple[str, ...]
) -> list[tuple[dict[str, Any], tuple[int, ...]]]:
    """Group the indices of parameters by their options; later patterns win."""
    parts: dict[_Groups, list[int]] = {}
    for at, name in enumerate(names):
        options: dict[str, Any] = {}
        for pattern, own in groups.items():
            if matches(pattern, name):
                options.update(own)
        parts.setdefault(_Groups({"": dict(sorted(options.items()))}), []).append(at)
    return [(key[""], tuple(places)) for key, places in parts.items()]


class SGD(BuiltIn):
    """Stochastic gradient descent, with momentum if it is not 0.

    >>> sgd, parameters = SGD(0.25), {"x": numpy.array([1.0])}
    >>> sgd.update(parameters, {"x": numpy.array([2.0])}, sgd.init(parameters), 1)[0]
    {'x': array([0.5])}
    """

    rate: Rate = 1e-2
    momentum: Share = 0.0
    decay: Number = 0.0
    nesterov: Flag = False
    groups: Mapping[str, Options] | None = None

    def settings_fit(self) -> None:
        if self.nesterov and not self.momentum:
            raise setting_error(self, "nesterov", "used with momentum, such as 0.9", True)

    def _state_names(self) -> tuple[str, ...]:
        moments = [options.get("momentum", 0.0) for options in self._groups.values()]
        return ("velocities",) if self.momentum or any(moments) else ()

    def _step(self, arrays: list[Arrays], step: int | Array, rate: float | Array) -> Any:
        parameters, gradients, *velocities = arrays
        return ops.update_sgd(
            parameters,
            gradients,
            velocities[0] if velocities else None,
            rate=rate,
            momentum=self.momentum,
            decay=self.decay,
            nesterov=self.nesterov,
        )


class Adam(BuiltIn):
    """Adam (Kingma and Ba 2015); `decay` is L2 regularization: it is added to the gradients."""

    rate: Rate = 1e-3
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: Number = 1e-8
    decay: Number = 0.0
    groups: Mapping[str, Options] | None = None

    _decoupled = False

    def _state_names(self) -> tuple[str, ...]:
        return "means", "squares"

    def _step(self, arrays: list[Arrays], step: int | Array, rate: float | Array) -> Any:
        parameters, gradients, means, squares = arrays
        return ops.update_adam(
            parameters,
            gradients,
            means,
            squares,
            step,
            rate=rate,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            decay=self.decay,
            decoupled=self._decoupled,
        )


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    `groups`, which `SGD`, `Adam` and `Lion` have too, gives some parameters settings of their own.
    A key is a name as in `Model.freeze`; if several match a parameter, the later one wins. A
    schedule scales the rates of groups too: it halves them when it halves the optimizer's rate.

    >>> AdamW(1e-3, groups={"*.bias": {"decay": 0.0}, "[0]": {"rate": 1e-4}}).groups["[0]"]
    {'rate': 0.0001}
    """

    rate: Rate = 1e-3
    decay: Number = 1e-2

    _decoupled = True


class Lion(BuiltIn):
    """Lion (Chen et al. 2023): steps by the sign of the averaged gradient; decoupled decay."""

    rate: Rate = 1e-4
    beta1: Share = 0.9
    beta2: Share = 0.99
    decay: Number = 0.0
    groups: Mapping[str, Options] | None = None

    def _state_names(self) -> tuple[str, ...]:
        return ("means",)

    def _step(self, arrays: list[Arrays], step: int | Array, rate: float | Array) -> Any:
        return ops.update_lion(
            *arrays, rate=rate, beta1=self.beta1, beta2=self.beta2, decay=self.decay
        )


class RMSprop(BuiltIn):
    """RMSprop (Hinton 2012) as in PyTorch; `decay` is added to the gradients."""

    rate: Rate = 1e-3
    beta: Share = 0.99
    eps: Number = 1e-8
    momentum: Share = 0.0
    decay: Number = 0.0
    groups: Mapping[str, Options] | None = None

    def _state_names(self) -> tuple[str, ...]:
        moments = [options.get("momentum", 0.0) for options in self._groups.values()]
        return ("squares", "velocities") if self.momentum or any(moments) else ("squares",)

    def _step(self, arrays: list[Arrays], step: int | Array, rate: float | Array) -> Any:
        new: list[Arrays] = [[] for _ in arrays[1:]]
        for parameter, slope, *state in zip(*arrays, strict=True):
            wider = WideParameter(parameter)
            xp, gradient = wider.xp, wider.decayed(slope, self.decay)
            square = wider.blend(wider.of(state[0]), xp.multiply(gradient, gradient), self.beta)
            change = xp.divide(gradient, xp.add(xp.sqrt(square), self.eps))
            if state[1:]:
                change = xp.add(xp.multiply(wider.of(state[1]), self.momentum), change)
            row = [wider.moved(change, rate), *map(wider.back, [square, change], state)]
            for column, array in zip(new, row, strict=True):
                column.append(array)
        return new


class Muon(BuiltIn):
    """Muon (Jordan et al. 2024): matrices step by orthogonalized momentum, the others by AdamW.

    The steps of a matrix have the root mean square `rms`, so that the rates and decays usual for
    AdamW suit both (Liu et al. 2025). Leave embeddings and the last layer to AdamW: `nn.train`
    takes `{"[0]": nn.AdamW(1e-3), "*": nn.Muon(1e-3)}`.

    >>> muon, parameters = Muon(1.0, decay=0.0), {"x": numpy.eye(2)}
    >>> muon.update(parameters, parameters, muon.init(parameters), 1)[0]["x"].round(2).tolist()
    [[0.69, 0.0], [0.0, 0.69]]
    """

    rate: Rate = 1e-3
    momentum: Share = 0.95
    decay: Number = 0.1
    nesterov: Flag = True
    rms: Positive = 0.2
    beta1: Share = 0.9
    beta2: Share = 0.999
    eps: Number = 1e-8
    groups: Mapping[str, Options] | None = None

    is_elementwise = False

    def _state_names(self) -> tuple[str, ...]:
        return "means", "squares"

    def _has_state(self, name: str, parameter: Array) -> bool:
        return name == "means" or (name == "squares" and parameter.ndim != 2)

    def _step(self, arrays: list[Arrays], step: int | Array, rate: float | Array) -> Any:
        is_other = [parameter.ndim != 2 for parameter in arrays[0]]
        own: Any = {name: getattr(self, name) for name in ("beta1", "beta2", "eps", "decay")}
        p, g, m, v = [list(compress(column, is_other)) for column in arrays]
        by_adam = zip(*ops.update_adam(p, g, m, v, step, rate=rate, **own), strict=True)
        new: list[Arrays] = [[] for _ in arrays[1:]]
        for other, *row in zip(is_other, *arrays, strict=True):
            moved = next(by_adam) if other else self._turn(row, rate)
            for column, array in zip(new, moved, strict=True):
                column.append(array)
        return new

    def _turn(self, row: list[Array], rate: Any) -> Any:
        """Return a matrix after its step, and its state."""
        parameter, slope, mean, square = row
        wider = WideParameter(parameter)
        xp, gradient = wider.xp, wider.of(slope)
        average = wider.blend(wider.of(mean), gradient, self.momentum)
        change = wider.blend(average, gradient, self.momentum) if self.nesterov else average
        scale = self.rms * math.sqrt(max(parameter.shape))
        change = xp.multiply(_orthogonalize(change), scale)
        return wider.moved(change, rate, self.decay), wider.back(average, mean), square


def _orthogonalize(x: Array) -> Array:
    """Return approximately U·Vᵀ of the SVD; its singular values are 0.7 to 1.2.

    Newton–Schulz iteration of degree 5, with the coefficients of Jordan et al. 2024.
    """
    xp, wide_first = primitives(x), x.shape[0] > x.shape[1]
    x = xp.permute_dims(x, (1, 0)) if wide_first else x
    norm = xp.sqrt(xp.sum(xp.multiply(x, x), (0, 1), True))
    x = xp.divide(x, xp.maximum(norm, 1e-7))
    for _ in range(5):
        square = xp.matmul(x, xp.permute_dims(x, (1, 0)))
        fourth = xp.multiply(xp.matmul(square, square), 2.0315)
        change = xp.add(xp.multiply(square, -4.775), fourth)
        x = xp.add(xp.multiply(x, 3.4445), xp.matmul(change, x))
    return xp.permute_dims(x, (1, 0)) if wide_first else x


class ByName(BuiltIn):
    """Several optimizers: each parameter gets the first whose pattern matches its name.

    `nn.train` makes one of a dict. `rate` is that of the last; a change scales those of the others.
    """

    parts: tuple[tuple[str, BuiltIn], ...] = ()

    is_elementwise = False
    is_uniform = False

    def __init__(self, parts: Any, rate: Any = None) -> None:
        parts = tuple(parts.items() if isinstance(parts, Mapping) else parts)
        for pattern, own in parts or [("*", None)]:
            if not isinstance(own, BuiltIn) or isinstance(own, ByName) or own._groups:
                text = f"must be one of nn without groups, such as nn.AdamW(1e-3), not {own!r}"
                raise ConfigurationError(f"optimizer[{pattern!r}] {text}", source="optimizer")
        super().__init__(parts[-1][1].rate, parts)
        for pattern, own in parts[:-1]:
            _check_group_rate(self, f"optimizer[{pattern!r}]", own.rate)

    def _state_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([name for _, own in self.parts for name in own._state_names()]))

    def init(self, parameters: Tree) -> State:
        names = leaf_names(parameters)
        first = _first_matches(tuple(dict(self.parts)), tuple(names))
        for at, (pattern, _) in enumerate(self.parts):
            if not any(matches(pattern, name) for name in names):
                raise unmatched(pattern, names, "optimizer")
            if at not in first:
                text = f"optimizer: {pattern!r} matches only parameters of earlier patterns"
                raise ConfigurationError(f"{text}; put it first", source="optimizer")
        if -1 in first:
            text = f"optimizer: no pattern matches {names[first.index(-1)].removeprefix('.')!r}"
            raise ConfigurationError(f"{text}; add a last pattern '*'", source="optimizer")
        pairs = [(self.parts[at][1], x) for at, x in zip(first, leaves(parameters), strict=True)]
        return {
            name: refilled(parameters, [own._zeros(name, x) for own, x in pairs])
            for name in self._state_names()
        }

    def update(
        self, parameters: Tree, gradients: Tree, state: State, step: Any, rate: Any = None
    ) -> tuple[Tree, State]:
        names, rate = self._state_names(), self.rate_at(step) if rate is None else rate
        arrays = [leaves(x) for x in (parameters, gradients, *[state[name] for name in names])]
        first = _first_matches(tuple(dict(self.parts)), tuple(leaf_names(parameters)))
        for number, (_, own) in enumerate(self.parts):
            places = [at for at, part in enumerate(first) if part == number]
            rows = [0, 1, *[2 + names.index(name) for name in own._state_names()]]
            if places:  # the others may be on another device
                scaled = rate  # that of the last pattern
                if number < len(self.parts) - 1:
                    scaled = _scale_rate(rate, base_rate(own.rate) / base_rate(self.rate))
                _step_at(places, own, arrays, rows, step, scaled)
        moved, _, *states = [refilled(parameters, row) for row in arrays]
        return moved, dict(zip(names, states, strict=True))


@lru_cache(maxsize=32)
def _first_matches(patterns: tuple[str, ...], names: tuple[str, ...]) -> list[int]:
    """Return the index of the first pattern that matches each name; -1 if none does."""
    return [next((at for at, p in enumerate(patterns) if matches(p, n)), -1) for n in names]


class EMA(Optimizer):
    """An optimizer that also keeps an exponential moving average of the parameters, in its state.

    After each step, the average keeps `share` of itself and takes the rest from the parameters; it
    begins as the first parameters. `averaged` of a training or its result is the model with it.
    """

    optimizer: Any = None
    share: Share = 0.999

    def __init__(
        self, optimizer: Optimizer, share: float = 0.999, rate: float | Schedule | None = None
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise setting_error(self, "optimizer", "one of nn, such as nn.AdamW(1e-3)", optimizer)
        Settings.__init__(self, optimizer.rate if rate is None else rate, optimizer, share)

    def init(self, parameters: Tree) -> State:
        def copied(x: Array) -> Array:
            return ops.multiply(ops.astype(x, wide(primitives(x).dtype(x))), 1.0)

        return {**self.optimizer.init(parameters), AVERAGE: mapped(copied, parameters)}

    def update(
        self, parameters: Tree, gradients: Tree, state: State, step: Any, rate: Any = None
    ) -> tuple[Tree, State]:
        rate = self.rate_at(step) if rate is None else rate
        own = {name: tree for name, tree in state.items() if name != AVERAGE}
        moved, new = self.optimizer.update(parameters, gradients, own, step, rate)
        average = []
        for mean, parameter in zip(leaves(state[AVERAGE]), leaves(moved), strict=True):
            wider = WideParameter(mean)
            average.append(wider.blend(mean, wider.of(parameter), self.share))
        return moved, {**new, AVERAGE: refilled(state[AVERAGE], average)}


AVERAGE = "average"
"""The name of the averaged parameters in the state of an `EMA`."""


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
"""Optimizers by their name alone, where libraries agree about the rate."""


class Schedule(Settings):
    """A rate for each step: called with the number of the step, which counts from 1.

    Your own schedule defines `__call__`; `settings_fit` can check its fields.
    """

    def __call__(self, step: int) -> float:
        """Return the rate of this step."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__")

    def factor_after(self, losses: Sequence[float]) -> float:
        """Return a factor of the rate after these losses of epochs; 1 unless overridden."""
        return 1.0


class ConstantRate(Schedule):
    """The same rate throughout."""

    rate: Number

    def __call__(self, step: int) -> float:
        return float(self.rate)


class WarmUp(Schedule):
    """A rate that grows linearly over `steps` steps, and then the rate of `then`.

    Step 1 of `then` is the first one after the warm-up. A number is a constant rate.

    >>> rate = WarmUp(4, then=0.8)
    >>> [rate(step) for step in (1, 2, 4, 5, 100)]
    [0.2, 0.4, 0.8, 0.8, 0.8]
    """

    steps: Size
    then: Rate

    def __call__(self, step: int) -> float:
        if step > self.steps:
            return self._then(step - self.steps)
        return self._then(1) * step / self.steps

    def factor_after(self, losses: Sequence[float]) -> float:
        return self.then.factor_after(losses) if isinstance(self.then, Schedule) else 1.0

    def _then(self, step: int) -> float:
        return self.then(step) if isinstance(self.then, Schedule) else float(self.then)


class CosineRate(Schedule):
    """Cosine decay from `rate` at step 1 to `floor` after `steps` steps.

    >>> rate = CosineRate(1.0, steps=4)
    >>> [round(rate(step), 3) for step in (1, 3, 5, 9)]
    [1.0, 0.5, 0.0, 0.0]
    """

    rate: Number
    steps: Size
    floor: Number = 0.0

    def __call__(self, step: int) -> float:
        share = min(max(step - 1, 0) / self.steps, 1.0)
        return self.floor + (self.rate - self.floor) * 0.5 * (1 + math.cos(math.pi * share))


class SteppedRate(Schedule):
    """A rate that is multiplied by `factor` every `every` steps.

    >>> rate = SteppedRate(1.0, every=10, factor=0.5)
    >>> [rate(step) for step in (1, 10, 11, 21)]
    [1.0, 1.0, 0.5, 0.25]
    """

    rate: Number
    every: Size
    factor: Number = 0.1

    def __call__(self, step: int) -> float:
        return float(self.rate * self.factor ** (max(step - 1, 0) // self.every))


class PlateauRate(Schedule):
    """A rate that is multiplied by `factor` after `patience` epochs without a smaller loss.

    `nn.train` takes the loss of the validation, if it is given; your own loop tells each loss with
    `training.judge(loss)`.

    >>> rate = PlateauRate(0.5, factor=0.25, patience=2)
    >>> [rate.factor_after([1.0, 0.9, 0.95, 0.9, 0.8][:epochs]) for epochs in (1, 3, 4, 5)]
    [1.0, 1.0, 0.25, 0.25]
    """

    rate: Number
    factor: Share = 0.1
    patience: Size = 5
    floor: Number = 0.0

    def __call__(self, step: int) -> float:
        return float(self.rate)

    def factor_after(self, losses: Sequence[float]) -> float:
        rate, best, waited = self.rate, math.inf, 0
        for loss in losses:
            best, waited = (loss, 0) if loss < best else (best, waited + 1)
            if waited == self.patience:
                rate, waited = max(rate * self.factor, min(rate, self.floor)), 0
        return rate / self.rate if self.rate else 1.0


def rate_of(schedule: Callable[[int], float], step: int) -> float:
    """Return the rate that a schedule gives for a step.

    >>> rate_of(lambda step: 1 / step, 4)
    0.25

    Raises `ConfigurationError`, with the step, for anything but a finite number of 0 or more.
    """
    given = schedule(step)
    try:
        rate = float(given)
    except (TypeError, ValueError):
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise ConfigurationError(
            f"the schedule returned {given!r} for step {step}; a rate must be a finite number of 0 "
            "or more",
            source="schedule",
        )
    return rate


def global_norm(gradients: Tree) -> Array:
    """Compute the square root of the sum of all squares in a tree, in float32.

    It is float64 if all gradients are. Raises `ConfigurationError` if there are none.

    >>> global_norm({"a": numpy.array([3.0]), "b": [numpy.array([[4.0]])]}).tolist()
    5.0
    """
    return ops.reshape(_norm(leaves(gradients)), ())


def clip_gradients(gradients: Tree, limit: float) -> tuple[Tree, Array]:
    """Scale gradients down together if their global norm is above `limit`; return that too.

    Smaller gradients are unchanged, bit for bit. If one is NaN, all become NaN, and so does the
    norm. Raises `ConfigurationError` for a limit that is not above 0.

    >>> clip_gradients({"a": numpy.array([3.0, 4.0])}, limit=1.0)[0]["a"].round(3).tolist()
    [0.6, 0.8]
    """
    if not is_number(limit) or not 0 < limit < math.inf:
        raise ConfigurationError(
            f"gradients are clipped to a finite norm above 0, not {limit!r}", source="limit"
        )
    arrays = leaves(gradients)
    norm = _norm(arrays)
    scale = ops.divide(float(limit), ops.maximum(norm, float(limit)))
    scaled = [_scale(array, scale) for array in arrays]
    return refilled(gradients, scaled), ops.reshape(norm, ())


def _norm(arrays: list[Array]) -> Array:
    """Return the global norm, of shape (1,)."""
    if not arrays:
        raise ConfigurationError("there are no gradients in this tree, so they have no norm")
    types = {wide(primitives(array).dtype(array)).name for array in arrays}
    dtype = "float64" if types == {"float64"} else "float32"
    rows = [ops.astype(ops.reshape(array, (-1,)), dtype) for array in arrays]
    squares = [ops.sum(ops.multiply(row, row), axis=0, keepdims=True) for row in rows]
    return ops.sqrt(ops.sum(ops.concat(squares, axis=0), axis=0, keepdims=True))


def _scale(array: Array, scale: Array) -> Array:
    dtype = primitives(array).dtype(array)
    wider = ops.multiply(ops.astype(array, wide(dtype)), ops.astype(scale, wide(dtype)))
    return ops.reshape(ops.astype(wider, dtype), tuple(array.shape))
