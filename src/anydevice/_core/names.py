"""Names of other libraries: ours where they mean the same, else "did you mean"."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from anydevice.errors import ConfigurationError

F = TypeVar("F", bound=Callable[..., Any])
Names = Mapping[str, str]

SAME: dict[str, Names] = {
    "loss": {
        "mean_squared_error": "mse mse_loss",
        "binary_cross_entropy": "bce bce_loss bce_with_logits bce_with_logits_loss",
        "cross_entropy": "cross_entropy_loss sparse_categorical_crossentropy",
    },
    "metric": {
        "accuracy": "acc binary_accuracy sparse_categorical_accuracy",
        "auc": "roc_auc",
        "f1": "f1_score",
    },
    "precision": {
        "float32": "32 32-true fp32 float single",
        "float16": "16-true half",
        "bfloat16": "bf16-true",
        "mixed_float16": "16-mixed",
        "mixed": "bf16-mixed mixed_bfloat16",
    },
    "activation": {"silu": "swish", "identity": "linear"},
    "training": {
        "epochs": "num_epochs n_epochs max_epochs num_train_epochs",
        "loss": "criterion loss_fn",
        "optimizer": "optim",
        "size": "batch_size",
        "validation": "validation_data val_data validation_split",
        "accumulate": "gradient_accumulation_steps accumulate_grad_batches",
        "clip": "max_grad_norm gradient_clip_val global_clipnorm",
        "schedule": "scheduler lr_scheduler",
        "seed": "random_seed random_state",
        "resume": "resume_from_checkpoint ckpt_path",
    },
    "evaluation": {"size": "batch_size", "loss": "loss_fn criterion"},
    "batches": {"size": "batch_size", "whole_only": "drop_last"},
    "generation": {
        "max_tokens": "max_new_tokens n_predict num_predict max_completion_tokens",
        "temperature": "temp",
        "stop": "stop_strings stop_sequences",
        "prompt": "messages prompts",
    },
    "loading": {
        "context": "n_ctx num_ctx ctx_size max_model_len max_seq_len",
        "dtype": "torch_dtype",
        "folder": "path model model_path pretrained_model_name_or_path",
    },
    "field": {
        "rate": "lr learning_rate",
        "decay": "weight_decay",
        "inputs": "in_features in_channels",
        "outputs": "out_features out_channels units filters",
        "size": "kernel_size",
        "bias": "use_bias",
    },
}
"""For each kind of name, ours, each with names of other libraries that mean the same."""

_CLASS_IDS = "with class ids as targets, as in y.argmax(-1)"
_NARROW = "which keeps parameters in float32, or"
INSTEAD: dict[str, Names] = {
    "loss": {
        f"'cross_entropy', {_CLASS_IDS}": "categorical_crossentropy",
        "'cross_entropy', which takes logits": "nll_loss",
    },
    "loss of a module": {
        "'cross_entropy', which takes logits": "sparse_categorical_crossentropy",
        "'binary_cross_entropy', which takes logits": "bce bce_loss binary_crossentropy",
    },
    "metric": {f"'accuracy', {_CLASS_IDS}": "categorical_accuracy"},
    "optimizer": {
        "nn.Lion(1e-4), whose rate differs between libraries": "lion",
        "nn.RMSprop(1e-3), whose rate differs between libraries": "rmsprop",
    },
    "precision": {
        f"'mixed', {_NARROW} 'bfloat16' throughout": "bf16",
        f"'mixed_float16', {_NARROW} 'float16' throughout": "fp16 16",
        "'mixed'": "amp",
    },
    "training": {
        "the rate of the optimizer, as in nn.Adam(1e-3)": "lr learning_rate",
        "the decay of the optimizer, as in nn.AdamW(1e-3, decay=1e-2)": "weight_decay",
        "a weight beside a loss, as in loss={'score': ('huber', 0.2)}": "loss_weights",
        "clip=, the largest norm of all gradients together": "clipnorm",
        "data=nn.Batches(x, y, size=32, shuffle=False)": "shuffle",
        "data=(x, y)": "y",
        "progress=True or False": "verbose",
        "patience=": "early_stopping",
        "callbacks=nn.Log(logger)": "logger",
        "precision='mixed' or 'mixed_float16'": "fp16 bf16 amp mixed_precision",
    },
    "generation": {
        "max_tokens=, which counts the reply without the prompt": "max_length",
        "repetition_penalty=, over all tokens; llama.cpp counts the last 64": "repeat_penalty",
        "temperature=: 0 takes the likeliest token, 1.0 samples": "do_sample",
        "model.stream(…) instead of model.generate(…)": "stream streamer",
    },
    "loading": {
        "device=, such as device='cuda:0'": "device_map n_gpu_layers",
        "weights=, such as weights='q4_k'": (
            "quantization quantization_config load_in_4bit load_in_8bit"
        ),
    },
    "field": {"beta1= and beta2=": "betas"},
}
"""Advice on names that mean something else, or several things."""


def find_name(kind: str, given: object, ours: Iterable[str]) -> tuple[str | None, str]:
    """Return the name of ours that means the same, or None and a "did you mean" for an error.

    >>> find_name("loss", "MSE", ["mean_squared_error"])
    ('mean_squared_error', '')
    >>> find_name("loss", "mean_sqared_error", ["mean_squared_error"])
    (None, " (did you mean 'mean_squared_error'?)")
    """
    names = {_normal(name): name for name in ours}
    if isinstance(given, str) and given in names.values():
        return given, ""
    key = _normal(given) if isinstance(given, str | int) else ""
    if advice := _row_of(INSTEAD, kind, key):
        return None, f" (did you mean {advice}?)"
    meant = names.get(key) or _row_of(SAME, kind, key)
    if meant in names.values():
        return meant, ""
    from difflib import get_close_matches  # only needed for an error

    near = get_close_matches(key, names, 1, 0.75)
    return None, f" (did you mean {names[near[0]]!r}?)" if near else ""


def _row_of(table: Mapping[str, Names], kind: str, key: str) -> str | None:
    kinds = dict.fromkeys((kind, kind.removesuffix(" of a module")))
    rows = [row for name in kinds for row in table.get(name, {}).items()]
    return next((row for row, others in rows if key in map(_normal, others.split())), None)


def _normal(name: object) -> str:
    return re.sub(r"[\W_]", "", str(name).lower())


class KeywordError(ConfigurationError, TypeError):
    """A keyword that a function does not take; also the TypeError that Python raises for one."""


def other_keywords(kind: str) -> Callable[[F], F]:
    """Make a function accept keywords of other libraries, and name the nearest of ours in errors.

    >>> @other_keywords("generation")
    ... def generate(prompt, max_tokens=200):
    ...     return max_tokens
    >>> generate("a", max_new_tokens=3)
    3
    """

    def decorate(function: F) -> F:
        code = function.__code__
        takes = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        known = frozenset(takes)

        @wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            if not known.issuperset(named):
                owner = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
                named = _our_keywords(owner, kind, takes, takes[: len(values)], named)
            return function(*values, **named)

        return cast("F", call)

    return decorate


def _our_keywords(
    owner: str, kind: str, takes: Sequence[str], by_place: Sequence[str], named: dict[str, Any]
) -> dict[str, Any]:
    """Return the keywords of a call by our names."""
    result = {name: named.pop(name) for name in takes if name in named}
    for name, value in named.items():
        ours, hint = find_name(kind, name, takes)
        text = f"{owner} got {name}= and {ours}=, which mean the same"
        if ours is None:
            names = ", ".join(name for name in takes if name != "self")
            text = f"{owner} has no {name}={hint}; it takes {names}"
        if ours is None or ours in result or ours in by_place:
            raise KeywordError(text, f"{name}=")
        result[ours] = value
    return result
