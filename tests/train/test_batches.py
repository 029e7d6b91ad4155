"""What people give to training: taken where it can be, and else said what to give, and where."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops
from anydevice._core.device import Device
from anydevice._machine.engines import registry
from anydevice._machine.engines.installed import Build
from anydevice._train.batches import as_numbers
from anydevice.errors import ConfigurationError, TransferError, UnsupportedError, VerificationError
from tests.comparing import SAME_PROGRAM, assert_same_values, rounding
from tests.train.conftest import on_step

X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
BATCHES = [(X[:6], Y[:6]), (X[6:], Y[6:])]
LAYER = nn.Chain(nn.Dense(2, 4), "relu", nn.Dense(4, 2))
TERMS = 2 * 3 * (2 + 4 + 2 + 6)
"""Two steps, there and back through its sums and that of six losses."""


def trained(
    device: Device | str | None, data: Any, loss: Any = "cross_entropy", **options: Any
) -> nn.Trained:
    given = {"epochs": 1, "optimize": "none", "layer": LAYER, **options}
    model = nn.Model(given.pop("layer"), (2,), device="cpu")
    return nn.train(model, data, nn.SGD(0.1), loss, device=device, progress=False, **given)


def losses(*arguments: Any, **options: Any) -> list[float]:
    return trained(*arguments, **options).history.losses


# What is taken


def test_wide_numbers_and_lists_train_as_the_same_float32(here: Device) -> None:
    exact = pytest.approx(losses(here, BATCHES), rel=rounding(np.float32, TERMS))
    wide = [(x.astype(np.float64), y.astype(np.int64)) for x, y in BATCHES]
    lists = [(x.tolist(), y.tolist()) for x, y in BATCHES]
    rows = nn.Batches(X.tolist(), Y.tolist(), 6, shuffle=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data in (wide, lists, rows):
            assert losses(here, data) == exact


def test_wide_targets_are_compared_with_float32(here: Device) -> None:
    exact = losses(here, [(X, X)], "mean_squared_error")
    near = pytest.approx(exact, rel=rounding(np.float32, 2 * TERMS))
    for wide in (X.astype(np.float64), X.tolist()):
        assert losses(here, [(wide, wide)], "mean_squared_error") == near


def test_wide_arrays_of_other_libraries_are_taken_too(jax: Device) -> None:
    torch = pytest.importorskip("torch")
    wide = [(torch.tensor(x).double(), torch.tensor(y).long()) for x, y in BATCHES]
    assert losses(jax, wide) == pytest.approx(losses(jax, BATCHES), rel=rounding(np.float32, TERMS))


def test_nests_are_looked_through() -> None:
    class Table:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.ones((2, 1))

    given = {"words": [[1, 2]], "parts": (np.ones(2), Table()), "rest": [np.ones(1), None]}
    found = as_numbers(given, "x")
    assert found["words"].dtype.kind == "i"
    assert [each.dtype for each in found["parts"]] == [np.float32, np.float32]
    assert found["rest"][1] is None
    with pytest.raises(ConfigurationError, match=r"x\['a'\]\[1\] holds text"):
        as_numbers({"a": [np.ones(1), "words"]}, "x")


# What is not


def test_batches_are_iterated_epoch_by_epoch() -> None:
    data = nn.Batches(np.arange(40), np.arange(40) * 2, size=16)
    first, second = ([y.tolist() for _, y in data] for _ in range(2))
    assert first != second
    for epoch in (first, second):
        assert sorted(row for batch in epoch for row in batch) == list(range(0, 80, 2))
    assert first == [y.tolist() for _, y in data(seed=0, epoch=1)]
    assert list(map(len, first)) == [16, 16, 8]
    in_order = nn.Batches(np.arange(4), np.arange(4), size=3, shuffle=False)
    for _ in range(2):
        assert [x.tolist() for x, _ in in_order] == [[0, 1, 2], [3]]
    assert [len(x) for x, _ in anydevice.prefetch(data, "cpu")] == [16, 16, 8]


def test_batches_say_what_they_are() -> None:
    data = nn.Batches(np.ones((2000, 28, 28), "float32"), np.ones(2000, "int32"), 64)
    assert repr(data) == (
        "<Batches: 2,000 examples in 32 batches of 64, shuffled; x: (28, 28) float32, y: () int32>"
    )


def test_the_order_of_a_training_does_not_depend_on_earlier_iterations(jax: Device) -> None:
    fresh, used = (nn.Batches(X, Y, size=5) for _ in range(2))
    for _ in range(3):
        list(used)
    curves = [losses(jax, data, epochs=2) for data in (used, fresh)]
    assert_same_values(*curves, because=SAME_PROGRAM)
    assert losses(jax, used, epochs=2) != losses(jax, used, epochs=2, seed=1)


def test_text_is_to_be_numbered(here: Device) -> None:
    names = np.array(["cat", "dog"])[Y]
    words = r"batch 1 of epoch 1: y holds text \(b?'(cat|dog)', …\); give numbers .*numpy\.unique"
    for given in (names, names.tolist(), names.astype(object), names.astype("S3")):
        with pytest.raises(ConfigurationError, match=words):
            trained(here, [(X, given)])


def test_batches_of_arrays_refuse_what_is_no_number() -> None:
    for x, y, words in (
        (X, np.array(["a"] * 12), "y holds text"),
        (np.array([None] * 12), Y, "x holds Python objects"),
        (np.zeros(12, "datetime64[s]"), Y, "x holds times"),
        ([[1, 2], [3]], [0, 1], "x is not an array: its rows have different lengths"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            nn.Batches(x, y, 2)


def test_whole_numbers_for_a_layer_of_floats_name_batch_and_layer(here: Device) -> None:
    pictures = [(X, Y), ((X * 10).astype(np.uint8), Y)]
    words = (
        r"^batch 2 of epoch 1: x is uint8, and Chain\[0\] Dense\(2→4\) computes in float32; "
        r'give x\.astype\("float32"\)'
    )
    with pytest.raises(ConfigurationError, match=words):
        trained(here, pictures)


def test_whole_numbers_stay_for_layers_that_take_them(jax: Device) -> None:
    class Scaled(nn.Layer):
        def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
            return ops.multiply(ops.astype(x, "float32"), 1 / 255)

    layer = nn.Chain(Scaled(), nn.Chain(nn.Dense(2, 2)))
    whole = (X * 10).astype(np.int32)
    assert trained(jax, [(whole, Y)], layer=layer).history[0].loss > 0
    with pytest.raises(ConfigurationError, match=r"Dense\(2→2\) computes in"):
        trained(jax, [(whole, Y)], layer=nn.Dense(2, 2))
    with pytest.raises(ConfigurationError, match=r"epoch 1: x is int32, and Chain\[1\]\[0\] Dense"):
        trained(jax, [(whole, Y)], layer=nn.Chain(nn.Dropout(0.0), nn.Chain(nn.Dense(2, 2))))
    with pytest.raises(ConfigurationError, match="cross_entropy: logits must be"):
        trained(jax, [(whole, Y[:3])], layer=layer)


def test_errors_begin_with_the_batch(here: Device) -> None:
    for wrong, words in (
        ((X, Y[:-1]), "^batch 3 of epoch 1: cross_entropy: logits must be"),
        ((X, Y.astype(np.float32)), "^batch 3 of epoch 1: y is float32, and .* takes int"),
        ((X[:, :1], Y), r"^batch 3 of epoch 1: Chain\[0\] Dense\(2→4\): got 1 features"),
        ((X[:0], Y[:0]), r"^batch 3 of epoch 1 is empty: x has the shape \(0, 2\)"),
        ((X, Y, Y), r"^batch 3 of epoch 1: a batch must be a pair \(x, y\), .* a tuple of 3"),
        (
            {"a": X, "b": Y},
            r"a dict with the keys 'a', 'b'; give .* \(batch\['a'\], batch\['b'\]\)",
        ),
        ({}, r"\(batch\['x'\], batch\['y'\]\)"),
        (
            {"input_ids": X, "attention_mask": X, "labels": Y},
            r"give two of them, as in \(batch\['input_ids'\], batch\['labels'\]\)",
        ),
        (
            {"attention_mask": X, "label": Y, "pixel_values": X},
            r"\(batch\['pixel_values'\], batch\['label'\]\)",
        ),
        ({"input_ids": X, "attention_mask": X}, r"\(batch\['input_ids'\], y\) with targets y"),
        (X, r"an array of shape \(12, 2\); nn\.Batches\(x, y, size=32\) makes"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trained(here, [*BATCHES, wrong])


def test_numbers_that_an_engine_has_not_begin_with_the_batch(jax: Device) -> None:
    with pytest.raises((TransferError, UnsupportedError), match=r"^batch 2 of epoch 1: .*int32"):
        trained(jax, [(X, Y), (X, Y.astype(np.int64) + 2**40)])


def test_the_number_of_a_batch_counts_those_before_a_resume(jax: Device, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    data: list[Any] = [*BATCHES, (X[:, :1], Y)]
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"^batch 3 of epoch 1: Chain"):
            trained(jax, data, save=path, save_every=2, resume=True)


def test_arrays_in_the_place_of_batches(jax: Device) -> None:
    for given, what in (([X, Y], "2 arrays"), ([X, X, X], "3 arrays"), (X, "one array")):
        with pytest.raises(ConfigurationError, match=rf"^data is {what}, .*nn\.Batches\(x, y"):
            trained(jax, given)
    with pytest.raises(ConfigurationError, match="is it one example rather than a batch"):
        trained(jax, list(zip(X, Y, strict=True)))


# Validation


def test_validation_is_looked_at_before_the_first_step(jax: Device) -> None:
    none = on_step(lambda event: pytest.fail("a step was taken"))
    wrong: tuple[tuple[Any, str], ...] = (
        ([X, Y], "^validation is 2 arrays"),
        ([], "validation gave no batches"),
        ([X.tolist()], "^batch 1 of the validation: a batch must be a pair"),
        ([(X[:, :1], Y)], "^batch 1 of the validation: Chain"),
        ([(X[:0], Y[:0])], "^batch 1 of the validation is empty"),
        (lambda seed, epoch: iter([(X, ["cat"] * 12)]), "^batch 1 of the validation: y holds text"),
    )
    for given, words in wrong:
        with pytest.raises(ConfigurationError, match=words):
            trained(jax, BATCHES, validation=given, callbacks=[none])
    for x, y, words in ((X, Y + 1, "a target is 2"), (X * np.nan, Y, "the batch itself holds NaN")):
        with pytest.raises(VerificationError, match=f"^batch 1 of the validation: {words}"):
            trained(jax, BATCHES, validation=nn.Batches(x, y, 4), callbacks=[none])


def test_what_can_be_iterated_once_is_not_touched_before(jax: Device) -> None:
    def once() -> Iterator[Any]:
        yield from BATCHES

    run = trained(jax, BATCHES, validation=once())
    again = trained(jax, BATCHES, validation=BATCHES)
    assert_same_values(run.history.validations, again.history.validations, because=SAME_PROGRAM)


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ((X, Y + 1), VerificationError, "a target is 2, and the model gives 2 classes"),
        (
            (X * np.inf, Y),
            VerificationError,
            "the batch itself holds (NaN|inf.*) values in x; look",
        ),
        ((X, Y[:-1]), ConfigurationError, "cross_entropy: logits must be"),
    ],
)
def test_wrong_validation(here: Device, tmp_path: Path, wrong: Any, kind: Any, words: str) -> None:
    """The batch is named, and the epoch is kept."""
    path = tmp_path / "run.safetensors"
    bad = [(X[:2], Y[:2])] * 3
    with pytest.raises(kind, match=f"^batch 4 of the validation: {words}"):
        trained(here, BATCHES, validation=[*bad, wrong, *bad], save=path)
    resumed = trained(here, BATCHES, validation=bad, resume=path)
    whole = trained(here, BATCHES, validation=bad)
    for curve in ("losses", "validations"):
        assert_same_values(
            getattr(resumed.history, curve), getattr(whole.history, curve), because=SAME_PROGRAM
        )


def test_a_validation_that_the_model_makes_infinite_goes_on(jax: Device) -> None:
    def steep(output: Any, target: Any) -> Any:
        return ops.mean(ops.exp(ops.multiply(output, target)))

    data = [(X, np.zeros((12, 2), np.float32))]
    run = trained(jax, data, steep, validation=[(X, np.full((12, 2), 3e38, np.float32))])
    assert not np.isfinite(run.history.validations[0])


# What is said


def test_a_batch_that_holds_nan_advises_no_smaller_rate(jax: Device) -> None:
    words = r"holds NaN values in y; .* look at the data"
    with pytest.raises(VerificationError, match=words) as raised:
        trained(jax, [(X, X * np.nan)], "mean_squared_error")
    assert "rate" not in str(raised.value)


def test_float16_without_a_step_says_so(here: Device, capsys: pytest.CaptureFixture[str]) -> None:
    def steep(output: Any, target: Any) -> Any:
        return ops.multiply(ops.mean(ops.multiply(output, output)), 1e3)

    run = trained(here, BATCHES, steep, precision="float16")
    assert run.history[-1].left_out == run.history[-1].steps == 2
    said = capsys.readouterr().err
    assert "nothing was learned: each of the 2 steps was left out" in said
    assert 'precision="bfloat16"' in said
    trained(here, BATCHES, precision="bfloat16")
    assert not capsys.readouterr().err


def test_float16_that_overflows_is_advised_of_other_types(jax: Device) -> None:
    with pytest.raises(VerificationError, match=r'float16 ends at 65504: .*precision="bfloat16"'):
        trained(jax, [(X * 1e6, Y)] * 20, precision="float16")


def test_an_idle_resume(jax: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.safetensors"
    trained(jax, BATCHES, epochs=2, save=path)
    assert not capsys.readouterr().err
    assert len(trained(jax, BATCHES, epochs=2, resume=path).history) == 2
    said = capsys.readouterr().err
    assert (
        said
        == f"{path} has 2 epochs already: nothing is left to train, and a larger epochs= goes on\n"
    )
    assert len(trained(jax, BATCHES, epochs=1, resume=path, validation=[]).history) == 2
    assert "has 2 epochs already, more than epochs=1: nothing" in capsys.readouterr().err
    assert len(trained(jax, BATCHES, epochs=3, resume=path).history) == 3
    assert not capsys.readouterr().err


def test_an_engine_in_the_place_of_a_device_is_told_from_one() -> None:
    words = 'torch is an engine, not a backend; write device\\("cpu", engine="torch"\\)'
    with pytest.raises(ConfigurationError, match=words):
        trained("torch", BATCHES)
    with pytest.raises(ConfigurationError, match=r'write device\("cuda", engine="cupy"\)'):
        anydevice.device("cupy:0")
    numpy = anydevice.device("cpu", engine="numpy")
    with pytest.raises(UnsupportedError, match=r'leave device= out, .*engine="torch"') as raised:
        trained(numpy, BATCHES)
    assert raised.value.absent is not None


def test_without_a_library_that_trains_the_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    anydevice.discover()  # before they are hidden: later tests use this report
    monkeypatch.setattr(registry, "read_build", lambda name, *_: Build(name, name))
    words = "NumPy has no autodiff, and no installed library has it; run: pip install .*torch"
    with pytest.raises(UnsupportedError, match=words) as raised:
        trained(anydevice.device("cpu", engine="numpy"), BATCHES)
    assert "device=" not in str(raised.value)
