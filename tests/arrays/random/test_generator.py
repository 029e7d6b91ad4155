"""`rng`: the published generator, the same numbers everywhere, and the right distributions."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import statistics
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import anydevice
from anydevice._arrays.random import generator
from anydevice._arrays.random.generator import (
    FLOATS,
    INTEGERS,
    Random,
    Scratch,
    Stream,
    in_pieces,
    normal_quantile,
    rng,
)
from anydevice._core.device import Device
from anydevice.errors import ConfigurationError, DeviceNotFoundError
from tests.comparing import assert_same_bits, assert_same_integers
from tests.programs import output_of

ONES = 0xFFFFFFFF
SAME = "the same words of one stream"
ALL = 2**64 - 1
KNOWN_ANSWERS = {
    # counter and key, and answer of Philox 4x64-10, from the known-answer vectors of Random123
    ((0,) * 4, (0,) * 2): "16554D9ECA36314C DB20FE9D672D0FDC D7E772CEE186176B 7E68B68AEC7BA23B",
    ((ALL,) * 4, (ALL,) * 2): "87B092C3013FE90B 438C3C67BE8D0224 9CC7D7C69CD777B6 A09CAEBF594F0BA0",
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
    ): "A528F45403E61D95 38C72DBD566E9788 A5A1610E72FD18B5 57BD43B5E52B7FE6",
}
CALLS = {
    "bits": lambda r, shape: r.bits(shape),
    "uniform": lambda r, shape: r.uniform(shape),
    "uniform float64": lambda r, shape: r.uniform(shape, dtype="float64"),
    "uniform float16": lambda r, shape: r.uniform(shape, -3, 5, dtype="float16"),
    "uniform bfloat16": lambda r, shape: r.uniform(shape, dtype="bfloat16"),
    "normal": lambda r, shape: r.normal(shape, 2.0, 3.0),
    "normal float64": lambda r, shape: r.normal(shape, dtype="float64"),
    "integers": lambda r, shape: r.integers(-5, 1000, shape),
    "integers, often drawn again": lambda r, shape: r.integers(-(2**30), 2**30 + 1, shape),
    "integers of 64 bits": lambda r, shape: r.integers(-(2**62), 2**62 + 1, shape, "int64"),
}


def host(seed: int = 0) -> Random:
    """A generator whose numbers are NumPy arrays, whatever else was imported."""
    return rng(seed, anydevice.device("cpu", engine="numpy"))


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox 4x64-10 as published, on Python's integers."""
    a, b, c, d = counter
    left, right = key
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = second >> 64 ^ b ^ left, second & ALL, first >> 64 ^ d ^ right, first & ALL
        left, right = (left + 0x9E3779B97F4A7C15) & ALL, (right + 0xBB67AE8584CAA73B) & ALL
    return a, b, c, d


@pytest.mark.parametrize(("counter", "key"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    """Both the definition above and NumPy's, which adds 1 to its counter before each block."""
    answer = tuple(int(word, 16) for word in KNOWN_ANSWERS[counter, key].split())
    assert philox(counter, key) == answer
    before = (sum(part << 64 * place for place, part in enumerate(counter)) - 1) % 2**256
    raw = np.random.Philox(key=key[0] | key[1] << 64, counter=before).random_raw(4)
    assert tuple(raw.tolist()) == answer


@pytest.mark.parametrize(("seed", "stream"), [(0, 0), (7, 0), (3, 5), (ALL, ALL - 1)])
@pytest.mark.parametrize("block", [0, 1, 2**32 - 1, 2**63 - 2])
def test_words_are_halves_of_the_published_generator(seed: int, stream: int, block: int) -> None:
    blocks = [philox((block + place, 0, 0, 0), (seed, stream)) for place in (1, 2)]
    halves = [half for each in blocks for word in each for half in (word & ONES, word >> 32)]
    assert Stream(seed, stream).words(8 * block, 16).tolist() == halves
    random = rng({"seed": seed, "stream": stream, "counter": 8 * block + 3}, host().device)
    assert random.bits(9).tolist() == halves[3:12]


def test_numbers_are_those_of_numpys_generator() -> None:
    raw = np.random.Philox(key=12).random_raw(1000)
    words = [half for word in raw.tolist() for half in (word & ONES, word >> 32)]
    assert host(12).bits(2000).tolist() == words
    assert host(12).uniform(2000).tolist() == [(word >> 8) / 2**24 for word in words]
    doubles = host(12).uniform(1000, dtype="float64")
    assert doubles.tolist() == [word / 2**53 for word in (raw >> np.uint64(11)).tolist()]
    every = host(12).integers(0, 2**64, 1000, "uint64")
    assert_same_integers(every, raw)


def test_any_part_of_a_stream_is_the_same() -> None:
    stream, count = Stream(3, 5), 1000
    whole = stream.words(0, count)
    for start, size in [(0, 1), (1, 2), (3, 7), (8, 8), (count - 5, 5), (2, count - 2)]:
        assert_same_bits(stream.words(start, size), whole[start : start + size], because=SAME)
    assert stream.words(9, 0).shape == (0,)


@pytest.mark.parametrize("name", CALLS)
def test_shapes_and_parts_give_the_same_numbers_and_other_seeds_others(name: str) -> None:
    call = CALLS[name]
    flat = call(host(4), 60)
    arranged = call(host(4), (3, 4, 5))
    assert arranged.shape == (3, 4, 5)
    assert_same_bits(arranged.reshape(-1), flat, because=SAME)
    assert call(host(4), ()).shape == ()
    assert call(host(4), ()) == flat[0]
    assert call(host(4), (2, 0)).shape == (2, 0)
    random = host(11)
    parts = [call(random, size) for size in (1, 7, 0, 300_000, 3)]
    assert_same_bits(np.concatenate(parts), call(host(11), 300_011), because=SAME)
    streams = [random, random, host(2), host(11), *host(11).split(2)]
    assert len({call(stream, 50).tobytes() for stream in streams}) == len(streams)


@pytest.mark.parametrize("name", CALLS)
def test_pieces_of_several_threads_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces on three threads, begun within a block of words, against stretches so short
    that each is one piece, and whose ends lie where no piece ends."""
    monkeypatch.setattr(generator, "usable_cores", lambda: 3)
    monkeypatch.setattr(generator, "_WORDS_AT_ONCE", 1024)
    count = 25 * 1024 + 11
    together, apart = host(5), host(5)
    assert_same_integers(together.bits(3), apart.bits(3))
    whole = CALLS[name](together, count)
    sizes = [311] * (count // 311) + [count % 311]
    assert_same_bits(whole, np.concatenate([CALLS[name](apart, n) for n in sizes]), because=SAME)
    assert together.state == apart.state


@pytest.mark.parametrize("engine", ["torch", "jax", "mlx", "opencl"])
@pytest.mark.parametrize("name", CALLS)
def test_the_numbers_are_the_same_on_every_engine(name: str, engine: str) -> None:
    pytest.importorskip({"mlx": "mlx.core", "opencl": "pyopencl"}.get(engine, engine))
    backend = "opencl" if engine == "opencl" else "cpu"
    try:
        place = anydevice.device(backend, engine=engine)
    except DeviceNotFoundError as error:
        pytest.skip(str(error))
    expected = CALLS[name](host(9), (3, 4))
    try:
        placed = CALLS[name](rng(9, place), (3, 4))
    except anydevice.TransferError:
        # What an engine does not have is refused by name, never made less exact.
        if expected.dtype.itemsize < 8 and expected.dtype != ml_dtypes.bfloat16:
            raise
        return
    assert not isinstance(placed, np.ndarray)
    back = anydevice.to_numpy(placed)
    assert_same_bits(back, expected, because="drawn on the host, then copied")


PINNED: list[list[Any]] = [
    [1634447415, 1812623002],
    [0.3975799083709717, 0.34249746799468994],
    [1.2236321235827798, 2.912424158597926],
    [-0.06540880352258682, 0.1300300806760788],
    [0.536032450661052, -1.1764153093070886],
    [589, 431, 310],
    [2, 0, 4, 3, 1],
    [1399647570, 324196431],
    [4002856386, 3929061042],
]

ELSEWHERE = """
import sys, anydevice
from anydevice._arrays.random.generator import rng
random = rng(2**70 + 1, anydevice.device("cpu", engine="numpy"))
parts = [random.bits(5), random.uniform(5), random.uniform(5, -1, 1, "float64"), random.normal(9),
         random.normal(9, dtype="float64"), random.integers(0, 10**12, 5, "int64"),
         random.permutation(9), *(part.bits(3) for part in random.split(2))]
sys.stdout.write(b"".join(part.tobytes() for part in parts).hex())
"""


def elsewhere(**variables: str) -> str:
    """The numbers that another process makes, as hexadecimal digits."""
    digits = output_of("-W", "error", "-c", ELSEWHERE, env=variables)
    assert len(digits) > 400
    return digits


def test_another_process_without_vector_instructions_gets_the_same_numbers() -> None:
    numbers = elsewhere(PYTHONHASHSEED="1")
    assert numbers == elsewhere(PYTHONHASHSEED="2")
    instructions = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    if not instructions:
        pytest.skip("NumPy uses no vector instructions here beyond those it cannot do without")
    assert numbers == elsewhere(NPY_DISABLE_CPU_FEATURES=" ".join(instructions))


def test_numbers_stay_the_same_from_version_to_version() -> None:
    random = host(2026)
    drawn = [random.bits(2), random.uniform(2), random.uniform(2, 1.0, 3.0, "float64")]
    drawn += [random.normal(2), random.normal(2, dtype="float64"), random.integers(0, 1000, 3)]
    drawn += [random.permutation(5), random.split(2)[1].bits(2), host(2**64).bits(2)]
    assert [each.tolist() for each in drawn] == PINNED
    words = Stream(2026, 0).words(0, 10).tolist()
    pairs = [(words[4], words[5]), (words[6], words[7])]
    doubles = [((upper << 32) + lower) // 2**11 / 2**53 for lower, upper in pairs]
    assert drawn[2].tolist() == [1.0 + 2.0 * double for double in doubles]
    quantile = statistics.NormalDist().inv_cdf
    normals = [quantile((word + 0.5) / 2**32) for word in words[8:]]
    np.testing.assert_allclose(drawn[3], normals, rtol=1e-7)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (0.1, 0.3), (-3e4, 1e4), (-2.0, -1.0)]
)
def test_uniform_stays_within_its_bounds(dtype: str, low: float, high: float) -> None:
    drawn = host(6).uniform(20_000, low, high, dtype).astype(np.float64)
    assert low <= drawn.min()
    assert drawn.max() < high
    spread = high - low
    assert abs(drawn.mean() - (low + high) / 2) < 0.015 * spread
    assert abs(drawn.var() - spread**2 / 12) < 0.01 * spread**2


@pytest.mark.parametrize("dtype", FLOATS)
def test_even_the_last_word_does_not_reach_the_end(dtype: str) -> None:
    kind = FLOATS[dtype]
    last = np.full(4, ONES, dtype=np.uint32)
    for low, high in [(0.0, 1.0), (1.0, 2.0), (0.0, 0.1), (-1.0, 0.0), (-3.0, 2.0**-9)]:
        made = generator.to_uniform(low, high, kind)(last, Scratch()).astype(np.float64)
        assert (made < high).all()
        assert (made >= high - (high - low) * max(2.0**-23, ml_dtypes.finfo(kind).eps)).all()
        least = generator.to_uniform(low, high, kind)(np.zeros(4, np.uint32), Scratch())
        assert (least.astype(np.float64) >= low).all()
    low = 1e16  # the next float64 is 2 further
    assert set(host().uniform(100, low, low + 4, "float64").tolist()) <= {low, low + 2}


def test_sixteen_bits_are_rounded_down_and_others_have_all_random_bits() -> None:
    single = host(8).uniform(5000)
    for dtype in ("float16", "bfloat16"):
        half = host(8).uniform(5000, dtype=dtype)
        above = np.nextafter(half, half.dtype.type(np.inf))
        assert (half.astype(np.float32) <= single).all()
        assert (above.astype(np.float32) > single).all()
        exact = host(8).normal(5000).astype(half.dtype)
        assert_same_bits(host(8).normal(5000, dtype=dtype), exact, because=SAME)
    assert (host().uniform(1000) * 2**24 % 1 == 0).all()
    doubles = host().uniform(1000, dtype="float64")
    assert (doubles * 2.0**53 % 1 == 0).all()
    assert (doubles * 2.0**40 % 1 != 0).any()


def chi_square(counts: np.ndarray[Any, Any]) -> float:
    """How many standard deviations the counts are from equal ones."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**64 - 1, 2**200])
def test_words_and_bits_are_evenly_spread(seed: int) -> None:
    drawn = host(seed).bits(200_000)
    for shift in (0, 8, 16, 24):
        assert abs(chi_square(np.bincount((drawn >> shift) & 255, minlength=256))) < 4
    pairs = (drawn[0::2] >> 28) * 16 + (drawn[1::2] >> 28)
    assert abs(chi_square(np.bincount(pairs, minlength=256))) < 4
    ones = np.unpackbits(drawn.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 4 * 0.5 / math.sqrt(32 * 200_000)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normal_numbers_are_normal(dtype: str) -> None:
    drawn = host(3).normal(400_000, dtype=dtype).astype(np.float64)
    assert abs(drawn.mean()) < 4 / math.sqrt(400_000)
    assert abs(drawn.var() - 1) < 4 * math.sqrt(2 / 400_000)
    assert abs((drawn**3).mean()) < 4 * math.sqrt(15 / 400_000)
    assert abs((drawn**4).mean() - 3) < 4 * math.sqrt(96 / 400_000)
    edges = [statistics.NormalDist().inv_cdf(k / 64) for k in range(1, 64)]
    counts = np.bincount(np.searchsorted(edges, drawn), minlength=64)
    assert abs(chi_square(counts)) < 4
    scaled = host(3).normal(1000, 5.0, 0.5, dtype).astype(np.float64)
    np.testing.assert_allclose(scaled, 5.0 + 0.5 * drawn[:1000], rtol=1e-6)
    assert (host().normal(10, 2.0, 0.0) == 2.0).all()


def test_the_quantile_is_that_of_the_standard_library() -> None:
    tails = 2.0 ** -np.arange(1.0, 54.0)
    p = np.concatenate([np.linspace(1e-9, 1 - 1e-9, 4001), tails, 1 - tails])
    expected = [statistics.NormalDist().inv_cdf(each) for each in p]
    np.testing.assert_allclose(normal_quantile(p), expected, rtol=2e-15)


@pytest.mark.parametrize(("dtype", "furthest"), [("float32", 6.4), ("float64", 8.3)])
def test_the_furthest_normal_numbers_are_finite_and_symmetric(dtype: str, furthest: float) -> None:
    make = generator.to_normal(0.0, 1.0, FLOATS[dtype])
    lowest = make(np.zeros(2, dtype=np.uint32), Scratch())[0]
    highest = make(np.full(2, ONES, dtype=np.uint32), Scratch())[0]
    assert -furthest < lowest < 2 - furthest
    assert highest == -lowest


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 2), (-3, 4), (0, 6), (5, 1000)])
@pytest.mark.parametrize("dtype", ["int32", "int64", "int16", "uint16"])
def test_integers_are_evenly_spread(low: int, high: int, dtype: str) -> None:
    if low < 0 and dtype.startswith("u"):
        low, high = 0, high - low
    drawn = host(5).integers(low, high, 100_000, dtype)
    assert drawn.dtype == INTEGERS[dtype]
    counts = np.bincount(drawn.astype(np.int64) - low, minlength=high - low)
    assert len(counts) == high - low
    assert len(counts) == 1 or abs(chi_square(counts)) < 4


@pytest.mark.parametrize("dtype", INTEGERS)
def test_all_integers_of_a_dtype(dtype: str) -> None:
    limits = np.iinfo(INTEGERS[dtype])
    drawn = host(2).integers(limits.min, int(limits.max) + 1, 40_000, dtype).astype(np.float64)
    spread = float(limits.max) - float(limits.min)
    assert abs(drawn.mean() - (float(limits.max) + float(limits.min)) / 2) < 0.01 * spread
    assert abs(drawn.std() - spread / math.sqrt(12)) < 0.01 * spread


@pytest.mark.parametrize(
    ("span", "bits"), [(3, 32), (3 * 2**30, 32), (2**31 + 1, 32), (3 * 2**62, 64)]
)
def test_no_integer_is_more_likely_than_another(span: int, bits: int) -> None:
    """Two thirds of the words would make a small number more often: those are drawn again."""
    low, high = (-(2**31), span - 2**31) if bits == 32 else (0, span)
    dtype = "int64" if bits == 32 else "uint64"
    drawn = host(1).integers(low, high, 90_000, dtype)
    thirds = ((drawn.astype(object) - low) * 3 // span).astype(np.int64)
    assert abs(chi_square(np.bincount(thirds, minlength=3))) < 4
    assert int(drawn.min()) >= low
    assert int(drawn.max()) < high


def test_useless_words_are_exactly_the_uneven_rest() -> None:
    edge = np.array([ONES - 1, ONES, 0, 7], dtype=np.uint32)  # 2**32 = 3 * 1431655765 + 1
    numbers, again = generator.to_integers(edge, 3, 32)
    assert again.tolist() == [1]
    assert numbers[[0, 2, 3]].tolist() == [2, 0, 1]
    pairs = np.array([ONES, ONES, ONES - 1, ONES], dtype=np.uint32)
    assert generator.to_integers(pairs, 3, 64)[1].tolist() == [0]
    assert generator.to_integers(edge, 2**32, 32)[1].tolist() == []


def test_permutations() -> None:
    random = host(4)
    for n in (0, 1, 2, 1000):
        assert sorted(random.permutation(n).tolist()) == list(range(n))
    assert random.permutation(3).dtype == np.int32
    assert random.permutation(3, dtype="int64").dtype == np.int64
    device = anydevice.device("cpu", engine="numpy")
    orders = [tuple(rng(seed, device).permutation(3).tolist()) for seed in range(1500)]
    counts = np.array([orders.count(order) for order in sorted(set(orders))])
    assert len(counts) == 6
    assert abs(chi_square(counts)) < 4


def test_splitting() -> None:
    random = host(3)
    first, second = random.split(2), random.split(2)
    (third,) = first[0].split(1)
    streams = [random, *first, *second, third, *host(4).split(2)]
    drawn = {bytes(each.bits(16)) for each in streams}
    assert len(drawn) == len(streams)
    assert [each.device for each in first] == [random.device] * 2
    again = host(3).split(2)
    assert_same_bits(again[1].bits(3), host(3).split(5)[1].bits(3), because=SAME)
    together = np.array([each.uniform(2000) for each in host(8).split(8)])
    correlations = np.corrcoef(together) - np.eye(8)
    assert np.abs(correlations).max() < 4.5 / math.sqrt(2000)


def test_going_on_from_a_state() -> None:
    random = host(7)
    random.uniform(5)
    random.normal(3, dtype="float64")
    state = json.loads(json.dumps(random.state))
    assert state == {"seed": 7, "stream": 0, "counter": 11}
    others = [
        rng(state, random.device),
        Random.from_state(state, random.device),
        pickle.loads(pickle.dumps(random)),
        copy.deepcopy(random),
    ]
    expected = random.bits(9)
    for other in others:
        assert other.device == random.device
        assert_same_bits(other.bits(9), expected, because=SAME)
    (part,) = host(7).split(1)
    assert_same_bits(rng(part.state, part.device).bits(4), part.bits(4), because=SAME)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"seed": 1, "stream": 0},
        {"seed": 1, "stream": 0, "counter": 0, "more": 1},
        {"seed": -1, "stream": 0, "counter": 0},
        {"seed": 2**64, "stream": 0, "counter": 0},
        {"seed": 1, "stream": 0.5, "counter": 0},
        {"seed": 1, "stream": 0, "counter": 2**66 + 1},
        7,
    ],
    ids=str,
)
def test_what_is_not_a_state(state: Any) -> None:
    with pytest.raises(ConfigurationError, match="state"):
        Random.from_state(state, "cpu")


def test_the_end_of_a_stream() -> None:
    random = rng({"seed": 0, "stream": 0, "counter": 2**66 - 4}, host().device)
    assert random.bits(3).shape == (3,)
    with pytest.raises(ConfigurationError, match="only 1 words left, and 2 are asked for"):
        random.bits(2)
    assert random.bits(1).shape == (1,)


def test_seeds_of_any_size() -> None:
    for seed in (-1, 1.0, True, "7", None, np.float32(3)):
        with pytest.raises(ConfigurationError, match="the seed must be an integer of 0 or more"):
            rng(seed, "cpu")  # type: ignore[arg-type]
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1, 2**64, 2**64 + 1, 2**100, 2**20_000]
    assert len({bytes(host(seed).bits(8)) for seed in seeds}) == len(seeds)
    assert_same_bits(host(np.int64(5)).bits(3), host(5).bits(3), because=SAME)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda r: r.uniform(3, 1, 1), "low must be less than high"),
        (lambda r: r.uniform(3, 0, 1e6, "float16"), "float16, ±65504"),
        (lambda r: r.uniform(3, -1e308, 1e308, "float64"), "their difference"),
        (lambda r: r.uniform(3, 0.1, 0.10001, "bfloat16"), "no bfloat16 lies between"),
        (lambda r: r.uniform(3, 0, math.inf), "high must be a finite number, not inf"),
        (lambda r: r.uniform(3, "0", 1), "low must be a finite number"),
        (lambda r: r.uniform(3, None, 1), "low must be a finite number"),
        (lambda r: r.uniform(3, dtype="int32"), "use one of float16, bfloat16"),
        (lambda r: r.uniform(-1), "each length of a shape must be an integer of 0 or more"),
        (lambda r: r.uniform((2, 1.5)), "each length of a shape"),
        (lambda r: r.normal(3, std=-1), "std must be 0 or more"),
        (lambda r: r.normal(3, std=8000, dtype="float16"), "range of float16"),
        (lambda r: r.normal(3, mean=math.nan), "mean must be a finite number"),
        (lambda r: r.integers(3, 3, 1), "low must be less than high"),
        (lambda r: r.integers(0, 2**31 + 1, 1), "must fit into int32"),
        (lambda r: r.integers(-1, 3, 1, "uint8"), "which is 0 to 255"),
        (lambda r: r.integers(0.0, 3, 1), "low must be an integer, not 0.0"),
        (lambda r: r.integers(0, 3, 1, "float32"), "use one of int8"),
        (lambda r: r.permutation(-1), "n must be an integer of 0 or more"),
        (lambda r: r.permutation(300, "uint8"), "use int64"),
        (lambda r: r.split(0), "n must be an integer of 1 or more"),
    ],
)
def test_what_cannot_be_drawn_is_said_and_takes_no_numbers(call: Any, said: str) -> None:
    random = host()
    with pytest.raises(ConfigurationError) as caught:
        call(random)
    assert said in str(caught.value)
    assert random.state["counter"] == 0


def test_dtypes_by_any_librarys_name() -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), torch.bfloat16):
        assert host().normal(2, dtype=dtype).dtype == ml_dtypes.bfloat16
    assert host().normal(2, dtype=np.float64).dtype == np.float64


@pytest.mark.needs("torch")
def test_the_device() -> None:
    assert host().device == Device("cpu")
    assert rng(0, "cpu").device == Device("cpu")
    with anydevice.use_device("cpu"):
        assert rng(0).device.chosen_by == "use_device"
    with pytest.raises(DeviceNotFoundError):
        rng(0, "cuda:77")
    with anydevice.testing.fake_machine(cuda=2, engines=("torch",)):
        assert str(rng(0, "cuda:1").device) == "cuda:1"
    text = repr(rng(5, "cpu"))
    assert text == "Random(seed=5, stream=0, counter=0, device='cpu')"


def test_threads_that_share_one_get_every_number_once() -> None:
    random = host(1)
    drawn: list[list[int]] = [[] for _ in range(4)]

    def draw(into: list[int]) -> None:
        for _ in range(200):
            into.extend(random.bits(3).tolist())

    threads = [threading.Thread(target=draw, args=(into,)) for into in drawn]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(itertools.chain(*drawn)) == sorted(host(1).bits(2400).tolist())


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 1000, 1001])
def test_every_piece_once(count: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "usable_cores", lambda: cores)
    times = np.zeros(count, int)
    lengths = []

    def work(begin: int, end: int, scratch: Scratch) -> None:
        times[begin:end] += 1
        lengths.append(end - begin)

    in_pieces(count, 10, work)
    assert (times == 1).all()
    assert sorted(lengths) == sorted([10] * (count // 10) + [count % 10] * (count % 10 > 0))


def test_each_thread_has_its_own_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "usable_cores", lambda: 3)
    together = threading.Barrier(3, timeout=400)
    scratches: dict[int, set[int]] = {}

    def work(begin: int, end: int, scratch: Scratch) -> None:
        if threading.get_ident() not in scratches:
            together.wait()
        scratches.setdefault(threading.get_ident(), set()).add(id(scratch))

    in_pieces(240, 10, work)
    assert len(scratches) == 3
    assert threading.get_ident() in scratches
    assert len(set.union(*scratches.values())) == 3
    monkeypatch.setattr(generator, "usable_cores", lambda: 64)
    threads = set()
    in_pieces(100, 10, lambda *_: threads.add(threading.get_ident()))
    assert threads == {threading.get_ident()}, "few pieces are not worth a thread"


@pytest.mark.parametrize("helper", [False, True], ids=["in the caller", "in another thread"])
def test_an_error_ends_the_other_threads(helper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "usable_cores", lambda: 2)
    together = threading.Barrier(2, timeout=400)
    caller, begun = threading.get_ident(), []

    def work(begin: int, end: int, scratch: Scratch) -> None:
        begun.append(begin)
        together.wait()
        if (threading.get_ident() != caller) is helper:
            together.abort()
            raise ArithmeticError("this piece")
        with pytest.raises(threading.BrokenBarrierError):  # waits until the other has failed
            together.wait()

    with pytest.raises(ArithmeticError, match="this piece"):
        in_pieces(10_000, 10, work)
    assert len(begun) < 1000


def test_scratch_is_used_again_and_grows() -> None:
    scratch = Scratch()
    first = scratch("a", 5)
    assert first.shape == (5,)
    assert first.dtype == np.float64
    assert np.shares_memory(first, scratch("a", 2, 4))
    for other in (scratch("b", 5), scratch("a", 5, dtype=np.uint32), scratch("a", 100)):
        assert not np.shares_memory(first, other)
    assert scratch("a", 0).shape == (0,)
    assert scratch("a", 0, 4, dtype=bool).shape == (0, 4)
