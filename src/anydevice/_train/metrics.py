"""Metrics of a model's outputs, added up over batches on the device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from anydevice import _ops as ops
from anydevice._arrays.move import to_numpy
from anydevice._core import checks
from anydevice._core.array import Array
from anydevice._core.dtypes import DTYPES
from anydevice._core.names import find_name
from anydevice._core.record import Record, replace
from anydevice._nn.losses import split_weights
from anydevice._ops.dispatch import primitives
from anydevice.errors import ConfigurationError

MetricFunction = Callable[[Array, Array], Any]
Spec = str | MetricFunction
Specs = Spec | Sequence[Spec] | Mapping[str, Spec]
"""Names and functions: one, several, or several under your own names."""

IGNORED = -100
"""The class id of targets that are ignored, as in PyTorch."""


class Metric(Record):
    """A number about outputs and targets: `add` for each batch, then `result`.

    The state before the first batch is `None`.

    >>> metric = metric_of("accuracy")
    >>> state = metric.add(None, numpy.array([[0.0, 1.0]]), numpy.array([1]))
    >>> state = metric.add(state, numpy.array([[0.0, 1.0]]), numpy.array([0]))
    >>> metric.name, metric.result(state)
    ('accuracy', 0.5)
    """

    name: str

    def add(self, state: Any, output: Array, target: Array) -> Any:
        """Return the state with one more batch; it may stay on the device."""
        if isinstance(output, Mapping):
            text = f"metrics: {self.name} is for a model with one output; give a function of "
            text += "(output, y) that selects the head it measures from both dicts"
            raise ConfigurationError(text, source="metrics")
        new = self._of_batch(output, split_weights(target)[0])
        if state is None:
            return new
        pairs = zip(state, new, strict=True)
        return [
            one + other if isinstance(one, int) else ops.add(one, other) for one, other in pairs
        ]

    def result(self, state: Any) -> float:
        """Return the number; NaN if nothing was added."""
        if state is None:
            return math.nan
        return self._number(*[x if isinstance(x, int) else to_numpy(x) for x in state])

    def _of_batch(self, output: Array, target: Array) -> list[Any]:
        """Return the parts of the state for one batch, which are added up."""
        raise NotImplementedError

    def _number(self, *state: Any) -> float:
        """Return the number of the whole state, which is on the host."""
        part, whole = state
        return float(part) / float(whole) if whole else math.nan


class _Accuracy(Metric):
    threshold: float = 0.0

    def _of_batch(self, output: Array, target: Array) -> list[Any]:
        output = _squeeze(output, target)
        targets, predicted, counts = _classes(self.name, output, target, self.threshold)
        return [ops.sum(ops.logical_and(ops.equal(targets, predicted), counts)), ops.sum(counts)]


class _TopK(Metric):
    k: int

    def _of_batch(self, output: Array, target: Array) -> list[Any]:
        _check_classes(self.name, output, target)
        wanted = ops.astype(target, "int32")
        _, best = ops.top_k(output, min(self.k, output.shape[-1]))
        right = ops.equal(ops.astype(best, "int32"), _column(wanted))
        hits = ops.logical_and(right, _column(_known_of(output)))
        return [ops.sum(hits), ops.sum(ops.logical_not(ops.equal(wanted, IGNORED)))]


class _AbsoluteError(Metric):
    def _of_batch(self, output: Array, target: Array) -> list[Any]:
        output, target = _alike(self.name, output, target)
        apart = ops.abs(ops.subtract(ops.astype(output, "float32"), ops.astype(target, "float32")))
        return [ops.sum(apart), math.prod(output.shape)]


class _F1(Metric):
    """F1 from three counts per class: true positives, predictions, and targets."""

    threshold: float = 0.0
    macro: bool = False

    def _of_batch(self, output: Array, target: Array) -> list[Any]:
        output = _squeeze(output, target)
        targets, predicted, counts = _classes(self.name, output, target, self.threshold)
        binary = tuple(output.shape) == tuple(target.shape) or output.shape[-1] <= 2
        if not binary and not self.macro:
            raise ConfigurationError(
                f"f1 is for two classes, and this output has {output.shape[-1]}; "
                'use "macro_f1", the mean over the classes',
                source="metrics",
            )
        classes = 2 if binary else int(output.shape[-1])
        ids = primitives(output).arange(classes, DTYPES["int32"], output)
        is_target, is_predicted = (
            ops.logical_and(ops.equal(_column(x), ids), _column(counts))
            for x in (targets, predicted)
        )
        hits, rows = ops.logical_and(is_target, is_predicted), (-1, classes)
        return [ops.sum(ops.reshape(x, rows), 0) for x in (hits, is_predicted, is_target)]

    def _number(self, *state: Any) -> float:
        hits, predicted, targets = (np.asarray(counts, np.float64) for counts in state)
        total = predicted + targets
        scores = np.divide(2 * hits, total, out=np.zeros_like(total), where=total > 0)
        if not self.macro:
            return float(scores[1])
        return float(scores[total > 0].mean()) if total.any() else math.nan


class _AreaUnderCurve(Metric):
    """The probability that a positive example outscores a negative one; ties count half."""

    def add(self, state: Any, output: Array, target: Array) -> Any:
        if len(output.shape) == len(target.shape) + 1 and output.shape[-1] == 2:
            last = len(output.shape) - 1
            yes, no = ops.slice_axis(output, last, 1, 2), ops.slice_axis(output, last, 0, 1)
            output = ops.reshape(ops.subtract(yes, no), tuple(target.shape))
        output, target = _alike(self.name, output, target)
        return [*(state or ()), (output, target)]

    def result(self, state: Any) -> float:
        if state is None:
            return math.nan
        pairs = to_numpy(state)
        scores = np.concatenate([np.ravel(score) for score, _ in pairs])
        targets = np.concatenate([np.ravel(target) for _, target in pairs])
        if np.isnan(scores).any():  # NaN has no rank
            return math.nan
        return _area(scores.astype(np.float64), targets > 0)


class _Own(Metric):
    """The mean of a user's function, weighted by rows."""

    function: Any

    def add(self, state: Any, output: Array, target: Array) -> Any:
        shape: Any = getattr(output, "shape", ())
        return [*(state or ()), (self.function(output, target), int(shape[0]) if len(shape) else 1)]

    def result(self, state: Any) -> float:
        if state is None:
            return math.nan
        try:
            numbers = [(float(to_numpy(value)), rows) for value, rows in state]
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the metric {self.name} must return a number, and returned "
                f"{type(state[0][0]).__name__}: {error}",
                source="metrics",
            ) from error
        weighted = sum(value * rows for value, rows in numbers)
        return float(weighted / sum(rows for _, rows in numbers))


def accuracy(output: Array, target: Array, *, threshold: float = 0.0) -> float:
    """Return the share of targets that are predicted correctly.

    The output is (…, classes) for targets (…) of class ids; -100 is ignored. If the output has the
    target's shape, numbers above `threshold` mean yes: 0 is for logits, 0.5 for probabilities.

    >>> accuracy(numpy.array([[0.1, 0.9], [0.8, 0.2]]), numpy.array([1, 1]))
    0.5
    """
    return _of_one(_Accuracy("accuracy", threshold), output, target)


def top_k(output: Array, target: Array, k: int = 5) -> float:
    """Return the share of targets that are among the `k` classes with the highest scores.

    Its name as a metric is `"top_5"`, or with another number.

    >>> top_k(numpy.array([[0.1, 0.2, 0.7], [0.3, 0.6, 0.1]]), numpy.array([1, 2]), k=2)
    0.5
    """
    return _of_one(_top(k), output, target)


def mean_absolute_error(output: Array, target: Array) -> float:
    """Return the mean of |output - target| over two arrays of one shape.

    >>> mean_absolute_error(numpy.array([1.0, 2.0]), numpy.array([1.0, 4.0]))
    1.0
    """
    return _of_one(_AbsoluteError("mean_absolute_error"), output, target)


def f1(output: Array, target: Array, *, threshold: float = 0.0) -> float:
    """Return the F1 score of class 1: the harmonic mean of precision and recall.

    Output and target are as in `accuracy`, with two classes. It is 0 if class 1 is neither
    predicted nor in the target.

    >>> f1(numpy.array([2.0, 1.0, -1.0]), numpy.array([1, 0, 0]))
    0.6666666666666666
    """
    return _of_one(_F1("f1", threshold), output, target)


def macro_f1(output: Array, target: Array, *, threshold: float = 0.0) -> float:
    """Return the mean F1 over all classes that are predicted or in the target.

    >>> macro_f1(numpy.eye(3), numpy.array([0, 1, 1]))
    0.5555555555555555
    """
    return _of_one(_F1("macro_f1", threshold, macro=True), output, target)


def auc(output: Array, target: Array) -> float:
    """Return the area under the ROC curve, from ranks (Mann and Whitney 1947); ties count half.

    Targets above 0 are positive. NaN if all are of one class, or a score is NaN.

    >>> auc(numpy.array([0.1, 0.4, 0.35, 0.8]), numpy.array([0, 0, 1, 1]))
    0.75
    """
    return _of_one(_AreaUnderCurve("auc"), output, target)


_FUNCTIONS: dict[Any, Metric] = {
    accuracy: _Accuracy("accuracy"),
    top_k: _TopK("top_5", 5),
    mean_absolute_error: _AbsoluteError("mean_absolute_error"),
    f1: _F1("f1"),
    macro_f1: _F1("macro_f1", macro=True),
    auc: _AreaUnderCurve("auc"),
}
METRICS: dict[str, Metric] = {
    **{metric.name: metric for metric in _FUNCTIONS.values()},
    "mae": _AbsoluteError("mae"),
}
"""The metrics by name; `top_` also takes other numbers."""


def metric_of(spec: Any, threshold: float = 0.0) -> Metric:
    """Return the metric of a name or a function; outputs above `threshold` mean yes."""
    metric = _named_metric(spec, threshold)
    if metric is not None:
        return metric
    if not callable(spec):
        names = ", ".join(name for name in METRICS if name != "mae")
        _, hint = find_name("metric", spec, METRICS)
        raise ConfigurationError(
            f"unknown metric {spec!r}{hint}; use one of {names} (or another number of classes, as "
            "in top_3), or a function of (output, target) that returns a number",
            source="metrics",
        )
    inner = spec.func if isinstance(spec, partial) else spec
    name = str(getattr(inner, "__name__", type(inner).__name__))
    return _Own("metric" if name == "<lambda>" else name, spec)


def metrics_of(specs: Any, threshold: float = 0.0) -> list[Metric]:
    """Return the metrics for names and functions: one, several, or several under your own names."""
    if isinstance(specs, Mapping):
        metrics = [replace(metric_of(spec, threshold), name=name) for name, spec in specs.items()]
    else:
        several = isinstance(specs, list | tuple)
        metrics = [metric_of(spec, threshold) for spec in (specs if several else [specs])]
    names = [metric.name for metric in metrics]
    twice = [name for name in names if names.count(name) > 1 or name == "loss"]
    if twice:
        raise ConfigurationError(
            f"there is more than one {twice[0]!r} among the metrics; name them with a dict, as in "
            f'metrics={{"mine": …}}',
            source="metrics",
        )
    return metrics


def _named_metric(spec: Any, threshold: float) -> Metric | None:
    if isinstance(spec, str):
        numbered = re.fullmatch(r"top_([1-9]\d*)", spec)
        name, _ = find_name("metric", spec, METRICS)
        metric = _top(int(numbered[1])) if numbered else METRICS[name] if name else None
    else:
        options: dict[str, Any] = {}
        while isinstance(spec, partial) and not spec.args:
            spec, options = spec.func, {**spec.keywords, **options}
        own = [metric for function, metric in _FUNCTIONS.items() if function is spec]
        if not own:
            return None
        metric, threshold = own[0], options.get("threshold", threshold)
        if "k" in options:
            metric = _top(options["k"])
    if isinstance(metric, _Accuracy | _F1):
        return replace(metric, threshold=threshold)
    return metric


def _top(k: Any) -> _TopK:
    k = checks.integer("k", k, 1, owner="top_k")
    return _TopK(f"top_{k}", k)


def _of_one(metric: Metric, output: Array, target: Array) -> float:
    return metric.result(metric.add(None, output, target))


def _classes(
    name: str, output: Array, target: Array, threshold: float
) -> tuple[Array, Array, Array]:
    """Return the target ids, the predicted ids, and whether each target counts."""
    if tuple(output.shape) == tuple(target.shape):
        targets = ops.less(0.0, ops.astype(target, "float32"))
        predicted = ops.astype(ops.less(threshold, ops.astype(output, "float32")), "int32")
        known = ops.logical_not(ops.isnan(output))
        every = ops.equal(targets, targets)
        return ops.astype(targets, "int32"), _or_none(predicted, known), every
    _check_classes(name, output, target)
    targets = ops.astype(target, "int32")
    predicted = _or_none(ops.astype(ops.argmax(output), "int32"), _known_of(output))
    return targets, predicted, ops.logical_not(ops.equal(targets, IGNORED))


def _known_of(output: Array) -> Array:
    """Whether each row predicts a class: none of its numbers is NaN."""
    return ops.logical_not(ops.any(ops.isnan(output), axis=-1))


def _or_none(ids: Array, known: Array) -> Array:
    """Return the ids of known predictions; the others become -1, which is no class."""
    return ops.subtract(ops.multiply(ops.add(ids, 1), ops.astype(known, "int32")), 1)


def _squeeze(output: Array, target: Array) -> Array:
    """Return the output in the shape of the target if one of the two has a last axis of 1."""
    shape, wanted = tuple(output.shape), tuple(target.shape)
    if shape == (*wanted, 1) or (*shape, 1) == wanted:
        return ops.reshape(output, wanted)
    return output


def _alike(name: str, output: Array, target: Array) -> tuple[Array, Array]:
    output = _squeeze(output, target)
    if tuple(output.shape) != tuple(target.shape):
        raise _misfit(name, output, target, "the same shape for both")
    return output, target


def _check_classes(name: str, output: Array, target: Array) -> None:
    if tuple(output.shape[:-1]) != tuple(target.shape):
        raise _misfit(name, output, target, "outputs (…, classes) for targets (…) of class ids")


def _misfit(name: str, output: Array, target: Array, wanted: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} takes {wanted}, and got an output of shape {tuple(output.shape)} and a target of "
        f"shape {tuple(target.shape)}",
        source="metrics",
    )


def _column(x: Array) -> Array:
    return ops.reshape(x, (*x.shape, 1))


def _area(scores: np.ndarray[Any, Any], positive: np.ndarray[Any, Any]) -> float:
    yes = int(positive.sum())
    no = len(positive) - yes
    if not yes or not no:
        return math.nan
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[places]  # equal scores share their mean rank
    return float((ranks[positive].sum() - yes * (yes + 1) / 2) / (yes * no))
