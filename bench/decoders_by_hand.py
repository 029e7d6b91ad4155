"""The decoder of `anydevice.check.decoder` as one would write it in each library alone.

Each function takes the shape, and gives `forward(parameters, ids, positions, cache)` over the same
tree of weights, with the library's own attention and normalization where it has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anydevice.check.decoder import DecoderShape

Forward = Callable[..., tuple[Any, Any]]


def torch(shape: DecoderShape) -> Forward:
    import torch as lib
    from torch.nn import functional

    half = lib.arange(0, shape.size, 2, dtype=lib.float32) / shape.size
    frequencies = shape.theta**-half

    def turned(x: Any, cosine: Any, sine: Any) -> Any:
        first, second = x.chunk(2, -1)
        return lib.cat((first * cosine - second * sine, second * cosine + first * sine), -1)

    def heads(x: Any, count: int) -> Any:
        return x.view(*x.shape[:2], count, shape.size).transpose(1, 2)

    def forward(parameters: Any, ids: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
        with lib.no_grad():
            x = functional.embedding(ids, parameters["embedding"])
            angles = positions[:, None] * frequencies
            cosine, sine = angles.cos(), angles.sin()
            mask, after = None, []
            if cache is not None:
                mask = lib.arange(cache[0]["keys"].shape[2]) <= positions[:, None]
            for index, layer in enumerate(parameters["layers"]):
                y = functional.rms_norm(x, (shape.hidden,), layer["attention_norm"], shape.eps)
                queries, keys, _ = shape.split
                parts = functional.linear(y, layer["qkv"]).tensor_split((queries, keys), -1)
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
                x = x + functional.linear(y.transpose(1, 2).flatten(2), layer["output"])
                y = functional.rms_norm(x, (shape.hidden,), layer["mlp_norm"], shape.eps)
                gate, up = functional.linear(y, layer["gate_up"]).chunk(2, -1)
                x = x + functional.linear(functional.silu(gate) * up, layer["down"])
            x = functional.rms_norm(x, (shape.hidden,), parameters["norm"], shape.eps)
            return functional.linear(x, parameters["head"]), after or None

    return forward


def jax(shape: DecoderShape) -> Forward:
    import jax as lib
    import jax.numpy as jnp

    frequencies = shape.theta ** -(jnp.arange(0, shape.size, 2, dtype=jnp.float32) / shape.size)

    def normalized(x: Any, weight: Any) -> Any:
        return x * lib.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + shape.eps) * weight

    def turned(x: Any, cosine: Any, sine: Any) -> Any:
        first, second = jnp.split(x, 2, -1)
        return jnp.concatenate((first * cosine - second * sine, second * cosine + first * sine), -1)

    def forward(parameters: Any, ids: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
        x = parameters["embedding"][ids]
        angles = positions[:, None, None] * frequencies
        cosine, sine = jnp.cos(angles), jnp.sin(angles)
        after = []
        for index, layer in enumerate(parameters["layers"]):
            y = normalized(x, layer["attention_norm"]) @ layer["qkv"].T
            q, k, v = (
                part.reshape(*x.shape[:2], -1, shape.size)
                for part in jnp.split(y, shape.split[:2], -1)
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
            x = x + y.reshape(*x.shape[:2], -1) @ layer["output"].T
            gate, up = jnp.split(normalized(x, layer["mlp_norm"]) @ layer["gate_up"].T, 2, -1)
            x = x + (lib.nn.silu(gate) * up) @ layer["down"].T
        return normalized(x, parameters["norm"]) @ parameters["head"].T, after or None

    return forward


def mlx(shape: DecoderShape) -> Forward:
    import mlx.core as lib

    def heads(x: Any, count: int) -> Any:
        return x.reshape(*x.shape[:2], count, shape.size).transpose(0, 2, 1, 3)

    def turned(x: Any, start: Any) -> Any:
        return lib.fast.rope(
            x, shape.size, traditional=False, base=shape.theta, scale=1.0, offset=start
        )

    def forward(parameters: Any, ids: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
        x = parameters["embedding"][ids]
        start = positions[0]
        mask: Any = "causal"
        after = []
        if cache is not None:
            mask = lib.arange(cache[0]["keys"].shape[2]) <= positions[:, None]
        for index, layer in enumerate(parameters["layers"]):
            y = lib.fast.rms_norm(x, layer["attention_norm"], shape.eps) @ layer["qkv"].T
            q, k, v = lib.split(y, shape.split[:2], -1)
            q = turned(heads(q, shape.heads), start)
            k, v = turned(heads(k, shape.kv_heads), start), heads(v, shape.kv_heads)
            if cache is not None:
                k = lib.slice_update(cache[index]["keys"], k, positions[:1], axes=(2,))
                v = lib.slice_update(cache[index]["values"], v, positions[:1], axes=(2,))
                after.append({"keys": k, "values": v})
            y = lib.fast.scaled_dot_product_attention(q, k, v, scale=shape.size**-0.5, mask=mask)
            x = x + y.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1) @ layer["output"].T
            y = lib.fast.rms_norm(x, layer["mlp_norm"], shape.eps) @ layer["gate_up"].T
            gate, up = lib.split(y, 2, -1)
            x = x + (gate * lib.sigmoid(gate) * up) @ layer["down"].T
        x = lib.fast.rms_norm(x, parameters["norm"], shape.eps)
        return x @ parameters["head"].T, after or None

    return forward
