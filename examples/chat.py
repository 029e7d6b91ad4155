"""A program that talks: a conversation, several prompts at once, and how likely a text is.

    python examples/chat.py [path/to/model] [--device cuda:0] [--engine torch]

The model is a folder of a known architecture or a GGUF file; without a path, the small one that
`make chat` fetches. A model without a chat template completes the questions instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import anydevice
from anydevice import llm

SMOLLM2 = ".cache/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ("What is the capital of France?", "And of Italy?")
SENTENCES = ("The sun rises in the east.", "East the in rises sun the.")


def main() -> int:
    """Talk; the exit code is 0 if the model finds the sentence likelier than its words shuffled."""
    model = loaded()
    print(f"{model.name} on {model.device} with {model.device.engine}")
    print(f"memory: {model.plan.estimate.total / 2**30:.2f} GiB planned\n")
    converse(model)
    complete_several(model)
    return compare(model)


def converse(model: llm.LanguageModel) -> None:
    """Ask the questions one after the other; the model sees what was said before."""
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        stream = model.stream(messages if model.tokenizer.templates else question, max_tokens=40)
        for piece in stream:
            print(piece, end="", flush=True)
        reply = stream.reply
        print(f"\n[{len(reply.tokens)} tokens, {reply.speed.decode:.0f} tokens/s]\n")
        messages.append({"role": "assistant", "content": reply.text})


def complete_several(model: llm.LanguageModel) -> None:
    """Complete two beginnings in one batch, drawn with a seed: the same text every time."""
    beginnings = ["Once upon a time", "The best way to learn is"]
    replies = model.generate(beginnings, max_tokens=16, temperature=0.7, top_p=0.9, seed=1)
    for beginning, reply in zip(beginnings, replies, strict=True):
        print(f"{beginning} …{reply.text!r}")


def compare(model: llm.LanguageModel) -> int:
    """Score two texts."""
    scores = [model.score(sentence) for sentence in SENTENCES]
    for sentence, score in zip(SENTENCES, scores, strict=True):
        print(f"perplexity {score.perplexity:8.1f}  {sentence}")
    return 0 if scores[0].perplexity < scores[1].perplexity else 1


def loaded() -> llm.LanguageModel:
    """The model of the command line, on its device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=Path(__file__).parents[1] / SMOLLM2)
    parser.add_argument("--device")
    parser.add_argument("--engine")
    options = parser.parse_args()
    return llm.load(options.model, anydevice.device(options.device, engine=options.engine))


if __name__ == "__main__":
    sys.exit(main())
