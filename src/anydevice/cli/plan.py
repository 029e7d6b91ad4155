"""`anydevice plan`: whether a model fits here, where, and what would fit if it does not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from anydevice.cli.options import add_filters, count
from anydevice.cli.printing import Output, complain, error_in_json
from anydevice.core.threads import started
from anydevice.errors import AnyDeviceError
from anydevice.planning.available import look_ahead
from anydevice.planning.config import locate

EXAMPLE = "anydevice plan meta-llama/Llama-3.1-8B --context 8192 --batch 4 --dtype bfloat16"

_WRONG = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, how it is to run, and on which devices."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a config.json, its folder, a folder of safetensors, "
        "or the name of a model in the Hugging Face cache",
    )
    parser.add_argument(
        "--context",
        type=count,
        metavar="TOKENS",
        help="tokens of prompt and answer together, such as 8192, 32k or 1m "
        "(4096, or the model's longest where that is less)",
    )
    parser.add_argument(
        "--batch", type=count, default=1, metavar="COUNT", help="sequences at a time (1)"
    )
    parser.add_argument(
        "--dtype",
        metavar="DTYPE",
        help="of the weights, such as bfloat16, fp8 or int4 (the model's own)",
    )
    parser.add_argument(
        "--kv-dtype", metavar="DTYPE", help="of the key/value cache (that of the weights)"
    )
    add_filters(parser, "device")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the plan; the code is 0 where it fits, 1 where it does not, 2 for wrong options."""
    try:
        locate(arguments.model)  # the machine is not looked at for a model that is nowhere
        with _looking_ahead():
            from anydevice.planning.plan import plan_inference, plan_lines

            plan = plan_inference(
                arguments.model,
                arguments.device,
                context=arguments.context,
                batch=arguments.batch,
                dtype=arguments.dtype,
                kv_dtype=arguments.kv_dtype,
            )
    except AnyDeviceError as error:
        if arguments.json:
            output.json(error_in_json(error))
        else:
            complain(error)
        return _WRONG
    if arguments.json:
        output.json(plan.to_dict())
    else:
        output.say(*plan_lines(plan, output.width, output.paint))
    return 0 if plan.fits else 1


@contextmanager
def _looking_ahead() -> Iterator[None]:
    """A block during which a thread asks the drivers: loading the planner takes about as long."""
    looking = Thread(target=look_ahead, name="anydevice plan")
    is_looking = started(looking)
    try:
        yield
    finally:
        if is_looking:
            looking.join()
