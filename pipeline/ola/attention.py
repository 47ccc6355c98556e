"""Head-mean attention, computed inside a model's own attention call.

Axis names: B batch, H query heads, G key heads, Q queries, K keys, D head size.
The function is registered with transformers under a name of its own and is used only inside `reading_attention`; models
outside it keep theirs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

# A name that contains "sdpa", "flash_attention" or "flex_attention" would switch on that backend's checks.
IMPLEMENTATION = "head_mean"
SCORE_CELLS = 4 * 1024 * 1024
"""Scores held at once: 16 MiB of float32, or those of one key head's queries where they are more."""

LayerReader = Callable[[Float[Tensor, "B Q K"]], None]
_reader: ContextVar[LayerReader | None] = ContextVar("reader", default=None)


def compute_head_mean_attention(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    value: Float[Tensor, "B G K V"],
    attention_mask: Float[Tensor, "B _ Q K"] | None,
    scaling: float,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "B Q H V"], Float[Tensor, "B Q K"]]:
    """A layer's attention output and its probabilities averaged over the query heads.

    Key heads are shared by `H / G` query heads each; the mean is over query heads (grouped-query attention, Ainslie et
    al. 2023). The mask is added to the scores; `softcap` is Gemma 2's `cap * tanh(score / cap)`.

    Numerics: scores, softmax and mean are float32; the output has the values' dtype, from probabilities cast to it, as
    eager attention does.
    """
    batch, num_heads, num_queries, _ = query.shape
    num_groups, num_keys = key.shape[1], key.shape[2]
    shared = num_heads // num_groups
    output = value.new_empty(batch, num_groups, shared, num_queries, value.shape[-1])
    mean = query.new_zeros(batch, num_queries, num_keys, dtype=torch.float32)
    grouped = query.reshape(batch, num_groups, shared, num_queries, query.shape[-1])
    mask = None if attention_mask is None else attention_mask[..., :num_keys].float()
    step = max(1, SCORE_CELLS // (batch * shared * num_queries * num_keys))
    for first in range(0, num_groups, step):
        heads = slice(first, first + step)
        keys = key[:, heads].float().transpose(2, 3).unsqueeze(2)
        scores = torch.matmul(grouped[:, heads].float() * scaling, keys)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores += mask.unsqueeze(2)
        probabilities = torch.softmax(scores, dim=-1)
        mean += probabilities.sum(dim=(1, 2))
        output[:, heads] = torch.matmul(probabilities.to(value.dtype), value[:, heads].unsqueeze(2))
    return output.flatten(1, 2).transpose(1, 2).contiguous(), mean.div_(num_heads)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    output, mean = compute_head_mean_attention(
        query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling, softcap
    )
    reader = _reader.get()
    if reader is not None:
        reader(mean)
    return output, None


AttentionInterface.register(IMPLEMENTATION, _attend)
# Without a mask function under the same name, padding, causality and windows vanish without a word
# (transformers issue 45811). The float mask is built for unpadded causal batches too; the boolean one is None there.
AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)


@contextmanager
def reading_attention(model: PreTrainedModel, reader: LayerReader) -> Iterator[None]:
    """Within it, each attention layer of `model` hands its head-mean attention to `reader`, in order.

    The model gets its attention back on the way out, also after an exception.
    """
    configs = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    token = _reader.set(reader)
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        _reader.reset(token)
        for key, config in configs.items():
            config._attn_implementation = before[key]
