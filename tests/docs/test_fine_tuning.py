"""A fine-tune of a transformer: the programs with Accelerate and Fabric on the page, and ours.

One session runs all blocks of the two sections, and then our programs again, stopped in the middle.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.docs.sessions import Sessions
from tests.docs.test_coming_from import BLOCK, SECTIONS
from tests.docs.test_examples import matches

BLOCKS = BLOCK.findall(SECTIONS["Accelerate"] + SECTIONS["Fabric"])
_, ACCELERATE, TRAINING, TRAIN, _, FABRIC = [source for source, _ in BLOCKS]
AT = (7, 18, 33)
"""Examples at which a training stops: with gradients that wait, in each epoch."""

STOPPED = """
import json
from pathlib import Path

class Stops(list):
    left = 10**9

    def __getitem__(self, at):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return super().__getitem__(at)

rows = Stops(rows)

def stopped(program, file, at):
    whole = {name: x.clone() for name, x in model.state_dict().items()}
    Path(file).unlink()
    rows.left, names = at, dict(globals())
    try:
        exec(program, names)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("it did not stop")
    rows.left = 10**9
    exec(program, names)
    same = [torch.equal(x, whole[name]) for name, x in names["model"].state_dict().items()]
    return all(same), names
"""


def stops(program: str, file: str, shown: str) -> str:
    """A block that stops a program at several examples, starts it again, and prints how it ends."""
    return f"""
exec({program!r})
print(json.dumps([(same, {shown}) for same, names in
    [stopped({program!r}, {file!r}, at) for at in {AT!r}]]))
"""


@pytest.fixture(scope="module")
def printed(sessions: Sessions, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each block printed."""
    for library in ("torch", "transformers", "accelerate", "lightning_fabric"):
        pytest.importorskip(library)
    sources = [source for source, _ in BLOCKS]
    sources.append(STOPPED + "whole = losses\n")
    losses = "names['losses'] == whole[-len(names['losses']):], len(names['losses'])"
    sources.append("Path('run.safetensors').unlink()" + stops(TRAINING, "run.safetensors", losses))
    ended = "names['done'].history.losses == done.history.losses, len(done.history)"
    sources.append("Path('done.safetensors').unlink()" + stops(TRAIN, "done.safetensors", ended))
    ours = {k: v for k, v in os.environ.items() if not k.startswith("ANYDEVICE_")}
    code, said, errors = sessions.run(
        [(f"example {number}", 0, source) for number, source in enumerate(sources, 1)],
        cwd=tmp_path_factory.mktemp("work"),
        env={**ours, "ANYDEVICE_HOME": str(tmp_path_factory.mktemp("home"))},
        filters=(),
    )
    assert code == 0, errors
    return said


def test_the_programs_print_what_they_show(printed: list[str]) -> None:
    for (source, shown), said in zip(BLOCKS, printed, strict=False):
        assert matches(shown, said), f"{source}\nprints:\n{said}"


def test_ours_are_no_longer() -> None:
    lengths = [
        sum(bool(line.strip()) for line in program.splitlines())
        for program in (TRAINING, TRAIN, ACCELERATE, FABRIC)
    ]
    assert lengths[0] <= min(24, *lengths[2:])
    assert lengths[1] <= 15
    for program in (TRAINING, TRAIN):
        assert "accelerat" not in program
        assert max(map(len, program.splitlines())) <= 100


def test_a_stopped_loop_goes_on_to_the_same_losses_and_weights(printed: list[str]) -> None:
    # Of 24 batches of two examples, those after the last file: it follows every third of eight.
    assert json.loads(printed[-2]) == [[True, True, 24 - saved] for saved in (3, 6, 8 + 6)]


def test_a_stopped_training_goes_on_to_the_same_losses_and_weights(printed: list[str]) -> None:
    assert json.loads(printed[-1]) == [[True, True, 3]] * len(AT)
