"""Head-mean attention on a GPU: Triton kernels that never hold a [batch, head, query, key] tensor.

Axis names: B batch, H query heads, G key heads, Q queries, K keys, D head size, V value size.
One kernel sums up each row of scores to its log-sum-exp; a second one goes through the heads for each tile of queries
and keys, recomputes the scores and adds up `exp(score - logsumexp)`. torch's own fused attention gives the output; for
soft-capped scores, which it does not know, the first kernel gives it. Importing this module needs Triton.

Numerics: products of narrow dtypes are summed in float32, products of float32 are not rounded to TF32; softmax and mean
are float32. Keys at -inf in the mask have probability 0. Rows that the mask hides altogether (padding) hold finite
numbers without meaning.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@triton.jit
def _load_rows(base, first, stride_row, stride_column, num_rows, size, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    rows = first + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_SIZE)
    inside = (rows[:, None] < num_rows) & (columns[None, :] < size)
    return tl.load(base + rows[:, None] * stride_row + columns[None, :] * stride_column, mask=inside, other=0.0)


@triton.jit
def _score(query, key, mask, in_range, scaling, softcap, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
    if HAS_SOFTCAP:
        # tanh by its exponential form: exp of a negative number, which cannot overflow.
        decay = tl.exp(-2.0 * tl.abs(scores) / softcap)
        capped = softcap * (1.0 - decay) / (1.0 + decay)
        scores = tl.where(scores < 0, -capped, capped)
    if HAS_MASK:
        scores += mask
    return tl.where(in_range, scores, float("-inf"))


@triton.jit
def _sum_rows(
    query, key, value, mask, logsumexp, output,
    query_b, query_h, query_q, query_d, key_b, key_h, key_k, key_d, value_b, value_h, value_k, value_d,
    mask_b, mask_q, mask_k,
    num_heads, num_queries, num_keys, size, value_size, scaling, softcap, hidden_below,
    SHARED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_OUTPUT: tl.constexpr,
):  # fmt: skip
    first_query, head, row = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2).to(tl.int64)
    queries = first_query + tl.arange(0, BLOCK)
    query += row * query_b + head * query_h
    key += row * key_b + (head // SHARED) * key_h
    value += row * value_b + (head // SHARED) * value_h
    mask += row * mask_b
    query_tile = _load_rows(query, first_query, query_q, query_d, num_queries, size, BLOCK, BLOCK_D)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    for first_key in range(0, num_keys, BLOCK):
        keys = first_key + tl.arange(0, BLOCK)
        in_range = (keys[None, :] < num_keys) & (queries[:, None] >= 0)
        mask_tile = tl.zeros([BLOCK, BLOCK], tl.float32)
        if HAS_MASK:
            inside = (queries[:, None] < num_queries) & in_range
            mask_place = mask + queries[:, None] * mask_q + keys[None, :] * mask_k
            mask_tile = tl.load(mask_place, mask=inside, other=hidden_below * 2).to(tl.float32)
        if tl.max(tl.max(mask_tile, axis=1), axis=0) > hidden_below:
            key_tile = _load_rows(key, first_key, key_k, key_d, num_keys, size, BLOCK, BLOCK_D)
            scores = _score(query_tile, key_tile, mask_tile, in_range, scaling, softcap, HAS_MASK, HAS_SOFTCAP)
            higher = tl.maximum(highest, tl.max(scores, axis=1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that the mask hides in this tile
            probabilities = tl.exp(scores - base[:, None])
            decay = tl.exp(highest - base)
            total = total * decay + tl.sum(probabilities, axis=1)
            highest = higher
            if WITH_OUTPUT:
                value_tile = _load_rows(value, first_key, value_k, value_d, num_keys, value_size, BLOCK, BLOCK_V)
                narrow = probabilities.to(value_tile.dtype)
                mixed = mixed * decay[:, None] + tl.dot(narrow, value_tile, input_precision="ieee")
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    is_query = queries < num_queries
    row_place = (row * num_heads + head) * num_queries + queries
    tl.store(logsumexp + row_place, tl.where(seen, highest, 0.0) + tl.log(total), mask=is_query)
    if WITH_OUTPUT:
        columns = tl.arange(0, BLOCK_V)
        place = ((row * num_queries + queries) * num_heads + head)[:, None] * value_size + columns[None, :]
        tl.store(output + place, mixed / total[:, None], mask=is_query[:, None] & (columns[None, :] < value_size))


@triton.jit
def _average_heads(
    query, key, mask, logsumexp, mean,
    query_b, query_h, query_q, query_d, key_b, key_h, key_k, key_d, mask_b, mask_q, mask_k,
    num_heads, num_queries, num_keys, size, scaling, softcap, hidden_below,
    SHARED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    num_key_tiles = tl.cdiv(num_keys, BLOCK)
    first_query = tl.program_id(0) // num_key_tiles * BLOCK
    first_key = tl.program_id(0) % num_key_tiles * BLOCK
    row = tl.program_id(1).to(tl.int64)
    queries, keys = first_query + tl.arange(0, BLOCK), first_key + tl.arange(0, BLOCK)
    in_range = (queries[:, None] < num_queries) & (keys[None, :] < num_keys)
    mask_tile = tl.zeros([BLOCK, BLOCK], tl.float32)
    if HAS_MASK:
        mask_place = mask + row * mask_b + queries[:, None] * mask_q + keys[None, :] * mask_k
        mask_tile = tl.load(mask_place, mask=in_range, other=hidden_below * 2).to(tl.float32)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    if tl.max(tl.max(mask_tile, axis=1), axis=0) > hidden_below:
        for head in range(0, num_heads):
            query_tile = _load_rows(
                query + row * query_b + head * query_h, first_query, query_q, query_d, num_queries, size, BLOCK, BLOCK_D
            )
            key_tile = _load_rows(
                key + row * key_b + (head // SHARED) * key_h, first_key, key_k, key_d, num_keys, size, BLOCK, BLOCK_D
            )
            scores = _score(query_tile, key_tile, mask_tile, in_range, scaling, softcap, HAS_MASK, HAS_SOFTCAP)
            row_place = (row * num_heads + head) * num_queries + queries
            normalizer = tl.load(logsumexp + row_place, mask=queries < num_queries, other=0.0)
            total += tl.exp(scores - normalizer[:, None])
    place = (row * num_queries + queries[:, None]) * num_keys + keys[None, :]
    tl.store(mean + place, total / num_heads, mask=in_range)


def choose_block(size: int, element_bytes: int) -> int:
    """Queries and keys of a tile for heads of a size: up to 64, as many as keep the tile of one head within 16 KiB.

    What a kernel needs is then within 64 KiB of shared memory, which every card since 2018 has.
    """
    tile_width: int = max(16, triton.next_power_of_2(size))
    return max(16, min(64, 16 * 1024 // (tile_width * element_bytes)))


def compute_head_mean_attention(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    value: Float[Tensor, "B G K V"],
    attention_mask: Float[Tensor, "B 1 Q K"] | None,
    scaling: float,
    softcap: float | None = None,
    block: int | None = None,
) -> tuple[Float[Tensor, "B Q H V"], Float[Tensor, "B Q K"]]:
    """As `attention.compute_head_mean_attention`, with the same output and mean.

    Args:
        block: queries and keys of a tile, a power of 2 from 16; default `choose_block`.
    """
    batch, num_heads, num_queries, size = query.shape
    num_groups, num_keys, value_size = value.shape[1:]
    shared = num_heads // num_groups
    block = block or choose_block(max(size, value_size), query.element_size())
    logsumexp = query.new_empty(batch, num_heads, num_queries, dtype=torch.float32)
    mean = query.new_empty(batch, num_queries, num_keys, dtype=torch.float32)
    output = value.new_empty(batch, num_queries, num_heads, value_size)
    mask = query if attention_mask is None else attention_mask[:, 0]
    settings: dict[str, Any] = {
        "scaling": scaling,
        "softcap": softcap or 1.0,
        "hidden_below": torch.finfo(mask.dtype).min / 2,
        "SHARED": shared,
        "BLOCK": block,
        "BLOCK_D": max(16, triton.next_power_of_2(size)),
        "HAS_MASK": attention_mask is not None,
        "HAS_SOFTCAP": softcap is not None,
    }
    sizes = (num_heads, num_queries, num_keys, size)
    num_tiles = triton.cdiv(num_queries, block)
    _sum_rows[(num_tiles, num_heads, batch)](
        query, key, value, mask, logsumexp, output,
        *query.stride(), *key.stride(), *value.stride(), *mask.stride()[:3], *sizes, value_size,
        BLOCK_V=max(16, triton.next_power_of_2(value_size)), WITH_OUTPUT=softcap is not None, **settings,
    )  # fmt: skip
    _average_heads[(num_tiles * triton.cdiv(num_keys, block), batch)](
        query, key, mask, logsumexp, mean, *query.stride(), *key.stride(), *mask.stride()[:3], *sizes, **settings
    )
    if softcap is None:
        output = scaled_dot_product_attention(
            query,
            key.repeat_interleave(shared, dim=1),
            value.repeat_interleave(shared, dim=1),
            attn_mask=attention_mask,
            scale=scaling,
        ).transpose(1, 2)
    return output, mean
