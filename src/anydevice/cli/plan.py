"""`anydevice plan`: whether a model fits, on which cards, and what would fit if it does not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Thread
from typing import TYPE_CHECKING, Any

from anydevice._core.locks import started
from anydevice._plan.cards import cluster_of
from anydevice._plan.config import is_gguf_path, locate
from anydevice._plan.plan import Plan, look_ahead, plan_inference, plan_loading
from anydevice._plan.quantization import WEIGHTS
from anydevice.cli.options import add_filters, add_options, add_removed_page, add_switches, count
from anydevice.cli.printing import Output
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._plan.training_plan import TrainingPlan

EXAMPLE = "anydevice plan meta-llama/Llama-3.1-8B --context 8192 --batch 4 --dtype bfloat16"

_MODEL = (
    "a config.json, its folder, a folder of safetensors, a GGUF file, "
    "or the name of a model in the Hugging Face cache"
)
_CONTEXT = (
    "tokens of prompt and answer together, such as 8192, 32k or 1m "
    "(4096, or the model's longest where that is less; of a GGUF file 8192, as chat has it)"
)
_DTYPE = (
    "of the weights, such as bfloat16, fp8 or int4 "
    "(the model's own; of a GGUF file on a CPU float32, as chat has it)"
)
_WEIGHTS = f"how quantized weights are kept, or others quantized: {', '.join(WEIGHTS)} (stored)"
_CARDS = "cards that need not be here, such as 2xH100, 16xH100-80GB or 4x8xA100-40GB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    batch = "sequences at a time (1), or of a training step on all cards"
    add_options(
        parser,
        ("--context", "TOKENS", count, _CONTEXT),
        ("--batch", "COUNT", count, batch),
        ("--dtype", "DTYPE", str, _DTYPE),
        ("--weights", "NAME", str, _WEIGHTS),
        ("--kv-dtype", "DTYPE", str, "of the key/value cache (that of the weights)"),
        ("--on", "CARDS", str, _CARDS),
    )
    add_filters(parser, "device")
    add_removed_page(parser)
    group = parser.add_argument_group("training")
    add_switches(group, train="plan a training, on the cards of --on")
    add_options(
        group,
        ("--tokens", "COUNT", str, "tokens to train on, such as 2T or 300B"),
        ("--strategy", "NAME", str, "replicate, shard_gradients or shard"),
        ("--recompute", "NAME", str, "none, selective or full"),
        ("--micro-batch", "COUNT", count, "sequences of a card at a time"),
        ("--optimizer", "NAME", str, "such as adamw or sgd (adamw)"),
    )


_ONLY_TRAINING = ("tokens", "strategy", "recompute", "micro_batch", "optimizer")
_NOT_TRAINING = ("dtype", "weights", "kv_dtype", "device")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the plan; the code is 0 where it fits, 1 where it does not."""
    _check(arguments)
    # The machine is not looked at for a model that is nowhere.
    locate(arguments.model, planning=True)
    plan, lines = _training(arguments) if arguments.train else _inference(arguments)
    if arguments.json:
        output.json(plan.to_dict())
    else:
        output.say(*lines(plan, output.width, output.paint))
    return 0 if plan.fits else 1


def _check(arguments: argparse.Namespace) -> None:
    """Raise `ConfigurationError` for options that do not go together."""

    def given(names: tuple[str, ...]) -> str:
        return ", ".join(
            f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None
        )

    if arguments.train and not arguments.on:
        raise ConfigurationError("--train needs cards: add --on, such as --on 16xH100-80GB", "--on")
    if arguments.train and given(_NOT_TRAINING):
        raise ConfigurationError(f"{given(_NOT_TRAINING)} is not for --train", "--train")
    if not arguments.train and given(_ONLY_TRAINING):
        raise ConfigurationError(
            f"{given(_ONLY_TRAINING)} is for trainings: add --train", "--train"
        )
    if arguments.on and arguments.device:
        raise ConfigurationError("give either --on or --device, not both", "--on")


def _training(arguments: argparse.Namespace) -> tuple[TrainingPlan, Any]:
    from anydevice._plan.training_plan import plan_training
    from anydevice._report.plan import training_lines

    names = (*_ONLY_TRAINING, "context", "batch")
    options = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return plan_training(arguments.model, arguments.on, **options), training_lines


def _inference(arguments: argparse.Namespace) -> tuple[Plan, Any]:
    with _looking_ahead() if not arguments.on else nullcontext():
        from anydevice._report.plan import plan_lines

        # On this machine llm.load runs a GGUF file; on other cards the program is unknown.
        loaded = is_gguf_path(locate(arguments.model)) and not arguments.on
        plan = (plan_loading if loaded else plan_inference)(
            arguments.model,
            cluster_of(arguments.on) if arguments.on else arguments.device,
            context=arguments.context,
            batch=arguments.batch or 1,
            dtype=arguments.dtype,
            kv_dtype=arguments.kv_dtype,
            weights=arguments.weights or "stored",
        )
    return plan, plan_lines


@contextmanager
def _looking_ahead() -> Iterator[None]:
    """Discover the machine in a thread, while the model's files are read."""
    looking = Thread(target=look_ahead, name="anydevice plan")
    is_looking = started(looking)
    try:
        yield
    finally:
        if is_looking:
            looking.join()
