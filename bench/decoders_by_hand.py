"""The decoder of `anydevice._llm.decoder` as one would write it in each library alone.

Each function takes a description, and gives `forward(parameters, ids, start, count, cache)` over
the same tree of weights, with the library's own attention and normalization where it has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anydevice._llm.description import Description

Forward = Callable[..., tuple[Any, Any]]


def split(shape: Description) -> tuple[int, int]:
    """Where queries and keys end in a row of their common projection."""
    queries = shape.heads * shape.head_size
    return queries, queries + shape.kv_heads * shape.head_size


def theta(shape: Description) -> float:
    rope = shape.layers[0].rope
    assert rope is not None
    return rope.theta


def torch(shape: Description) -> Forward:
    import torch as lib
    from torch.nn import functional

    half = lib.arange(0, shape.head_size, 2, dtype=lib.float32) / shape.head_size
    frequencies, ends = theta(shape) ** -half, split(shape)

    def turned(x: Any, cosine: Any, sine: Any) -> Any:
        first, second = x.chunk(2, -1)
        return lib.cat((first * cosine - second * sine, second * cosine + first * sine), -1)

    def heads(x: Any, count: int) -> Any:
        return x.view(*x.shape[:2], count, shape.head_size).transpose(1, 2)

    def forward(parameters: Any, ids: Any, start: Any, count: Any, cache: Any) -> tuple[Any, Any]:
        with lib.no_grad():
            x = functional.embedding(ids, parameters["embedding"])
            positions = start + lib.arange(ids.shape[1], dtype=lib.int32)
            angles = positions[:, None] * frequencies
            cosine, sine = angles.cos(), angles.sin()
            mask, after = None, []
            if cache is not None:
                mask = lib.arange(cache[0]["keys"].shape[2]) <= positions[:, None]
            for index, layer in enumerate(parameters["layers"]):
                y = functional.rms_norm(
                    x, (shape.hidden,), layer["attention_norm"]["weight"], shape.eps
                )
                parts = functional.linear(y, layer["qkv"]["weight"]).tensor_split(ends, -1)
                q = turned(heads(parts[0], shape.heads), cosine, sine)
                k = turned(heads(parts[1], shape.kv_heads), cosine, sine)
                v = heads(parts[2], shape.kv_heads)
                if cache is not None:
                    k = cache[index]["keys"].index_copy(2, positions, k)
                    v = cache[index]["values"].index_copy(2, positions, v)
                    after.append({"keys": k, "values": v})
                y = functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
                )
                x = x + functional.linear(y.transpose(1, 2).flatten(2), layer["output"]["weight"])
                y = functional.rms_norm(x, (shape.hidden,), layer["mlp_norm"]["weight"], shape.eps)
                gate, up = functional.linear(y, layer["gate_up"]["weight"]).chunk(2, -1)
                x = x + functional.linear(functional.silu(gate) * up, layer["down"]["weight"])
            x = functional.rms_norm(x, (shape.hidden,), parameters["norm"]["weight"], shape.eps)
            return functional.linear(x, parameters["head"]["weight"]), after or None

    return forward


def jax(shape: Description) -> Forward:
    import jax as lib
    import jax.numpy as jnp

    frequencies = theta(shape) ** -(
        jnp.arange(0, shape.head_size, 2, dtype=jnp.float32) / shape.head_size
    )

    def normalized(x: Any, weight: Any) -> Any:
        return x * lib.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + shape.eps) * weight

    def turned(x: Any, cosine: Any, sine: Any) -> Any:
        first, second = jnp.split(x, 2, -1)
        return jnp.concatenate((first * cosine - second * sine, second * cosine + first * sine), -1)

    def forward(parameters: Any, ids: Any, start: Any, count: Any, cache: Any) -> tuple[Any, Any]:
        x = parameters["embedding"][ids]
        positions = start + jnp.arange(ids.shape[1])
        angles = positions[:, None, None] * frequencies
        cosine, sine = jnp.cos(angles), jnp.sin(angles)
        after = []
        for index, layer in enumerate(parameters["layers"]):
            y = normalized(x, layer["attention_norm"]["weight"]) @ layer["qkv"]["weight"].T
            q, k, v = (
                part.reshape(*x.shape[:2], -1, shape.head_size)
                for part in jnp.split(y, split(shape), -1)
            )
            q, k = turned(q, cosine, sine), turned(k, cosine, sine)
            if cache is None:
                y = lib.nn.dot_product_attention(q, k, v, is_causal=True)
            else:
                k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
                k = cache[index]["keys"].at[:, :, positions].set(k)
                v = cache[index]["values"].at[:, :, positions].set(v)
                after.append({"keys": k, "values": v})
                seen = jnp.arange(k.shape[2]) <= positions[:, None]
                y = lib.nn.dot_product_attention(
                    q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask=seen[None, None]
                )
            x = x + y.reshape(*x.shape[:2], -1) @ layer["output"]["weight"].T
            gate, up = jnp.split(
                normalized(x, layer["mlp_norm"]["weight"]) @ layer["gate_up"]["weight"].T, 2, -1
            )
            x = x + (lib.nn.silu(gate) * up) @ layer["down"]["weight"].T
        return normalized(x, parameters["norm"]["weight"]) @ parameters["head"][
            "weight"
        ].T, after or None

    return forward


def mlx(shape: Description) -> Forward:
    import mlx.core as lib

    def heads(x: Any, count: int) -> Any:
        return x.reshape(*x.shape[:2], count, shape.head_size).transpose(0, 2, 1, 3)

    def turned(x: Any, start: Any) -> Any:
        return lib.fast.rope(
            x, shape.head_size, traditional=False, base=theta(shape), scale=1.0, offset=start
        )

    def forward(parameters: Any, ids: Any, start: Any, count: Any, cache: Any) -> tuple[Any, Any]:
        x = parameters["embedding"][ids]
        positions, first = start + lib.arange(ids.shape[1]), start[0]
        mask: Any = "causal"
        after = []
        if cache is not None:
            mask = lib.arange(cache[0]["keys"].shape[2]) <= positions[:, None]
        for index, layer in enumerate(parameters["layers"]):
            y = (
                lib.fast.rms_norm(x, layer["attention_norm"]["weight"], shape.eps)
                @ layer["qkv"]["weight"].T
            )
            q, k, v = lib.split(y, split(shape), -1)
            q = turned(heads(q, shape.heads), first)
            k, v = turned(heads(k, shape.kv_heads), first), heads(v, shape.kv_heads)
            if cache is not None:
                k = lib.slice_update(cache[index]["keys"], k, start, axes=(2,))
                v = lib.slice_update(cache[index]["values"], v, start, axes=(2,))
                after.append({"keys": k, "values": v})
            y = lib.fast.scaled_dot_product_attention(
                q, k, v, scale=shape.head_size**-0.5, mask=mask
            )
            x = x + y.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1) @ layer["output"]["weight"].T
            y = (
                lib.fast.rms_norm(x, layer["mlp_norm"]["weight"], shape.eps)
                @ layer["gate_up"]["weight"].T
            )
            gate, up = lib.split(y, 2, -1)
            x = x + (gate * lib.sigmoid(gate) * up) @ layer["down"]["weight"].T
        x = lib.fast.rms_norm(x, parameters["norm"]["weight"], shape.eps)
        return x @ parameters["head"]["weight"].T, after or None

    return forward
