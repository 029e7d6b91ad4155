"""Which layer made a loss infinite or no number: the batch is run again, and every part watched."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from anydevice.core.engine import Absent
from anydevice.core.record import Record
from anydevice.engines import registry
from anydevice.errors import VerificationError
from anydevice.nn.layer import Layer, Run
from anydevice.nn.trees import leaves
from anydevice.run.own_models import paths_of
from anydevice.run.steps import Recipe
from anydevice.transfer.moving import to_numpy

_ADVICE = "try a smaller rate, clip=1.0, or look at the data"
_OF_FLOAT16 = (
    'float16 ends at 65504: give smaller inputs, or take precision="bfloat16" or "mixed", or '
)
ON_DATA = "look at the data: numpy.isfinite says which numbers they are"


class Taken(Record):
    """A batch that was trained on, its number (from 1), and the step that it belongs to."""

    x: Any
    y: Any
    batch: int
    step: int


def failure(
    recipe: Recipe, engine: str, parameters: Any, batches: Iterable[Taken], since: int, seed: int
) -> VerificationError:
    """The error for a training that came to `since`, a step of no use, naming the layer.

    `parameters` are those from before that step, and `batches` those that it took. Where they tell
    nothing, all went wrong in the step before: its update made the parameters what they are.
    """
    wrong = _wrong_leaf(parameters)
    if wrong is not None:
        layer = f"{type(recipe.layer).__name__}{wrong}"
        kind = _kind(paths_of(parameters)[wrong])
        return VerificationError(
            f"training stopped after step {since - 1}: the parameters {layer} became {kind} by "
            f"its update, or that of a step shortly before; nothing of it was saved. {_ADVICE}",
            where=layer,
        )
    for taken in batches:
        spoiled = spoiled_batch(taken.x, taken.y)
        if spoiled is not None:
            return _error(taken.step, spoiled, "", ON_DATA)
        found = _found(recipe, engine, parameters, taken, seed)
        if found is not None:
            return _error(taken.step, *found, _advice(recipe))
    what = "and it was finite when the batches were run again"
    return _error(since, what, "", _advice(recipe))


def spoiled_batch(x: Any, y: Any) -> str | None:
    """What is wrong with a batch that holds NaN or what is infinite; `None` where it does not."""
    for name, part in (("x", x), ("y", y)):
        if not _is_finite(part):
            return f"the batch itself holds {_kind(part)} in {name}"
    return None


def _found(
    recipe: Recipe, engine: str, parameters: Any, taken: Taken, seed: int
) -> tuple[str, str] | None:
    seen: list[tuple[str, Any]] = []
    is_traced = registry.load(engine).is_traced

    def watch(path: str, layer: Layer, y: Any) -> None:
        # What a transformation of the library's own goes through has no numbers yet.
        if not seen and not any(map(is_traced, leaves(y))) and not _is_finite(y):
            seen.append((f"{type(recipe.layer).__name__}{path} {layer.label}", y))

    run = Run(training=True, seed=seed, step=taken.batch, watch=watch)
    value = recipe.value(parameters, taken.x, taken.y, run)
    if seen:
        name, y = seen[0]
        return f"{name} gave {_kind(y)}", name
    if not _is_finite(value):
        last = recipe.layer.label
        return f"the loss is {_kind(value)}, and what {last} gave is finite", last
    return _in_gradients(recipe, engine, parameters, taken, seed)


def _in_gradients(
    recipe: Recipe, engine: str, parameters: Any, taken: Taken, seed: int
) -> tuple[str, str] | None:
    autodiff = registry.load(engine).autodiff
    assert not isinstance(autodiff, Absent), "what trained has gradients"
    run = Run(training=True, seed=seed, step=taken.batch)

    def value_of(parameters: Any) -> Any:
        return recipe.value(parameters, taken.x, taken.y, run)

    gradients = autodiff.value_and_grad(value_of)(parameters)[1]
    wrong = _wrong_leaf(gradients)
    if wrong is None:
        return None
    name = f"{type(recipe.layer).__name__}{wrong}"
    return f"the gradient of {name} is {_kind(paths_of(gradients)[wrong])}", name


def _advice(recipe: Recipe) -> str:
    return (_OF_FLOAT16 if recipe.policy.needs_loss_scale else "") + _ADVICE


def _error(step: int, what: str, where: str, advice: str) -> VerificationError:
    return VerificationError(
        f"training stopped at step {step}: {what}; no parameter was changed by it. {advice}",
        where=where,
    )


def _wrong_leaf(tree: Any) -> str | None:
    return next((path for path, x in paths_of(tree).items() if not _is_finite(x)), None)


def _is_finite(x: Any) -> bool:
    return all(bool(np.isfinite(np.asarray(leaf, np.float64)).all()) for leaf in _hosts(x))


def _kind(x: Any) -> str:
    nan = any(np.isnan(np.asarray(leaf, np.float64)).any() for leaf in _hosts(x))
    return "NaN" if nan else "infinite"


def _hosts(x: Any) -> list[Any]:
    return [to_numpy(leaf) for leaf in leaves(x)]
