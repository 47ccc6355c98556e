"""Head-mean attention, computed inside a model's own attention call.

Axis names: B batch, H query heads, G key heads, Q queries, K keys, D head size, V value size.
The function is registered with transformers under a name of its own and is used only inside `reading_attention`; models
outside it keep theirs.
"""

import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import product
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

# A name that contains "sdpa", "flash_attention" or "flex_attention" would switch on that backend's checks.
IMPLEMENTATION = "head_mean"
SCORE_CELLS = {"cpu": 1024 * 1024, "cuda": 32 * 1024 * 1024}
"""Scores held at once, by device: on a CPU 4 MiB of float32, what its caches hold; more is slower there, not only
larger."""
QUERY_BLOCK = {"cpu": 64, "cuda": 1024}
"""Queries scored at once, by device; keys that none of them sees are not scored at all."""


_KEPT_MASKS = 3
"""Masks kept during a pass: those of full, sliding and chunked layers; a model may also make one a layer."""


@dataclass(frozen=True)
class KeySpan:
    """What a block of queries sees: the mask hides all keys but `keys`, and changes no scores but those of `masked`."""

    queries: slice
    keys: slice
    masked: slice

    @property
    def num_queries(self) -> int:
        return int(self.queries.stop - self.queries.start)

    @property
    def num_keys(self) -> int:
        return int(self.keys.stop - self.keys.start)


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention call: what came in, and the output that goes on."""

    module: torch.nn.Module
    query: Float[Tensor, "B H Q D"]
    key: Float[Tensor, "B G K D"]
    value: Float[Tensor, "B G K V"]
    attention_mask: Float[Tensor, "B _ Q K"] | None
    """With -inf for hidden keys; for all heads, or one for each."""
    scaling: float
    softcap: float | None
    output: Float[Tensor, "B Q H V"]


LayerReader = Callable[[Float[Tensor, "B Q K"]], None]
CallReader = Callable[[AttentionCall], None]


@dataclass
class _Reading:
    read_layer: LayerReader
    read_call: CallReader
    masks: dict[int, tuple[Tensor, Tensor, list[KeySpan]]] = field(default_factory=dict)

    def look_into(self, mask: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor | None, list[KeySpan]]:
        """The mask with its hidden keys at -inf, and its spans."""
        num_queries, num_keys = query.shape[2], key.shape[2]
        if mask is None:
            return None, find_key_spans(None, num_queries, num_keys)
        # Layers of a kind share one mask tensor; it is kept beside what is made of it, so that its id stays its own.
        if id(mask) not in self.masks:
            if len(self.masks) == _KEPT_MASKS:
                del self.masks[next(iter(self.masks))]
            hiding = hide_keys(mask, len(query), num_queries, num_keys)
            self.masks[id(mask)] = (mask, hiding, find_key_spans(hiding, num_queries, num_keys))
        return self.masks[id(mask)][1:]


_reading: ContextVar[_Reading | None] = ContextVar("reading", default=None)


def hide_keys(mask: Float[Tensor, "_ _ _ _"], batch: int, num_queries: int, num_keys: int) -> Float[Tensor, "B _ Q K"]:
    """The mask with -inf for every key that it hides, so that no score wins over it; itself where it has no other.

    A key is hidden by half the least finite number of the mask's dtype, or less. float16's least is -65504, which
    scores reach (transformers#33317). A query that sees nothing (padding) keeps its numbers, so that its row stays
    finite.
    """
    mask = mask[..., :num_keys].expand(batch, -1, num_queries, -1)
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    hidden &= (~hidden).any(dim=-1, keepdim=True)
    return mask.masked_fill(hidden, -math.inf) if (hidden & (mask > -math.inf)).any() else mask


def build_mask(*arguments: Any, **options: Any) -> Float[Tensor, "B 1 Q K"] | None:
    """transformers' float mask for eager attention, with its hidden keys at -inf as `hide_keys` has them."""
    mask: Tensor | None = eager_mask(*arguments, **options)
    if mask is not None:  # in place: it is built for us, and a second one would take as much memory
        hidden = mask < 0
        mask.masked_fill_(hidden.logical_and_((~hidden).any(dim=-1, keepdim=True)), -math.inf)
    return mask


def find_key_spans(mask: Float[Tensor, "B _ Q K"] | None, num_queries: int, num_keys: int) -> list[KeySpan]:
    """The key spans of each block of queries, over all texts of the batch and all heads.

    Under a causal mask a block sees no later keys, under a sliding window no much earlier ones. Queries that see
    nothing (padding) get all keys, as eager attention gives them.
    """
    spans = []
    block_size = QUERY_BLOCK.get("cpu" if mask is None else mask.device.type, QUERY_BLOCK["cuda"])
    for start in range(0, num_queries, block_size):
        queries = slice(start, min(start + block_size, num_queries))
        keys, masked = slice(0, num_keys), slice(0, 0)
        if mask is not None:
            block = mask[:, :, queries].flatten(0, 2)
            seen = block > torch.finfo(mask.dtype).min / 2
            if seen.any(-1).all():
                keys = _enclose(seen.any(0), 0)
            masked = _enclose((block[..., keys] != 0).any(0), keys.start)
        spans.append(KeySpan(queries, keys, masked))
    return spans


def _enclose(flags: Tensor, offset: int) -> slice:
    places = flags.nonzero()
    return slice(offset + int(places[0]), offset + int(places[-1]) + 1) if len(places) else slice(0, 0)


@torch.no_grad()
def compute_head_mean_attention(
    query: Float[Tensor, "B H Q D"],
    key: Float[Tensor, "B G K D"],
    value: Float[Tensor, "B G K V"],
    attention_mask: Float[Tensor, "B _ Q K"] | None,
    scaling: float,
    softcap: float | None = None,
    spans: list[KeySpan] | None = None,
) -> tuple[Float[Tensor, "B Q H V"], Float[Tensor, "B Q K"]]:
    """A layer's attention output and its probabilities averaged over the query heads.

    Key heads are shared by `H / G` query heads each; the mean is over query heads (grouped-query attention, Ainslie et
    al. 2023). The mask is added to the scores; `softcap` is Gemma 2's `cap * tanh(score / cap)`.

    Args:
        attention_mask: one for all heads or one for each; -inf hides a key (`hide_keys`), a finite number is added.
        spans: `find_key_spans` of the mask; found here where they are not given.

    Numerics: scores, softmax and mean are float32; the output has the values' dtype, from probabilities cast to it, as
    eager attention does. Beside inputs and results, two buffers of `SCORE_CELLS` are held (more only where the scores
    of `QUERY_BLOCK` queries of one key head are more).
    """
    batch, num_heads, num_queries, head_size = query.shape
    num_groups, num_keys, value_size = value.shape[1:]
    shared = num_heads // num_groups
    mean = query.new_zeros(batch, num_queries, num_keys, dtype=torch.float32)
    output = value.new_empty(batch, num_queries, num_groups, shared, value_size)
    spans = find_key_spans(attention_mask, num_queries, num_keys) if spans is None else spans
    most_cells = SCORE_CELLS.get(query.device.type, SCORE_CELLS["cuda"])
    cells = shared * max(span.num_queries * span.num_keys for span in spans)
    group_step = min(num_groups, max(1, most_cells // cells))
    row_step = min(batch, max(1, most_cells // (cells * group_step)))
    buffers = mean.new_empty(2, row_step * group_step * cells)
    for row, group in product(range(0, batch, row_step), range(0, num_groups, group_step)):
        rows, groups = slice(row, row + row_step), slice(group, group + group_step)
        keys = key[rows, groups].float().flatten(0, 1)
        values = value[rows, groups].flatten(0, 1)
        pairs = len(keys)
        first_head = group * shared
        queries = query[rows, first_head : groups.stop * shared].float()
        heads_now = queries.shape[1]
        queries = queries.reshape(pairs, shared, num_queries, head_size)
        for span in spans:
            shape = (pairs, shared * span.num_queries, span.num_keys)
            scores, probabilities = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
            torch.baddbmm(
                scores,
                queries[:, :, span.queries].reshape(pairs, -1, head_size),
                keys[:, span.keys].transpose(1, 2),
                beta=0,
                alpha=scaling,
                out=scores,
            )
            by_row = (-1, heads_now, span.num_queries, span.num_keys)
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            if attention_mask is not None and span.masked.stop > span.masked.start:
                masked = slice(span.masked.start - span.keys.start, span.masked.stop - span.keys.start)
                heads = slice(None) if attention_mask.shape[1] == 1 else slice(first_head, first_head + heads_now)
                scores.view(by_row)[..., masked] += attention_mask[rows, heads, span.queries, span.masked]
            torch.softmax(scores, dim=-1, out=probabilities)
            mean[rows, span.queries, span.keys] += probabilities.view(by_row).sum(1)
            mixed = torch.bmm(probabilities.to(value.dtype), values[:, span.keys])
            by_group = (-1, heads_now // shared, shared, span.num_queries, value_size)
            output[rows, span.queries, groups] = mixed.view(by_group).permute(0, 3, 1, 2, 4)
    return output.flatten(2, 3), mean.div_(num_heads)


def find_kernels(query: Tensor, attention_mask: Tensor | None = None) -> ModuleType | None:
    """The module of Triton kernels, where queries lie on a GPU, heads share a mask, and Triton is installed."""
    by_head = attention_mask is not None and attention_mask.shape[1] > 1
    if not query.is_cuda or by_head or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("pipeline.ola.kernels")


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
    reading = _reading.get()
    if reading is None:
        raise RuntimeError(f"the attention {IMPLEMENTATION!r} is used inside reading_attention only")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    kernels = find_kernels(query, attention_mask)
    attention_mask, spans = reading.look_into(attention_mask, query, key)
    if kernels is None:
        output, mean = compute_head_mean_attention(query, key, value, attention_mask, scaling, softcap, spans)
    else:
        output, mean = kernels.compute_head_mean_attention(query, key, value, attention_mask, scaling, softcap)
    reading.read_layer(mean)
    reading.read_call(AttentionCall(module, query, key, value, attention_mask, scaling, softcap, output))
    return output, None


AttentionInterface.register(IMPLEMENTATION, _attend)
# Without a mask function under the same name, padding, causality and windows vanish without a word
# (transformers#45811). The float mask is built for unpadded causal batches too; the boolean one is None there.
AttentionMaskInterface.register(IMPLEMENTATION, build_mask)


@contextmanager
def using_attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Within it, `model` uses an attention implementation; it gets its own back, also after an exception."""
    configs = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        if any(name != implementation for name in before.values()):
            model.set_attn_implementation(implementation)
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


@contextmanager
def reading_attention(
    model: PreTrainedModel, read_layer: LayerReader, read_call: CallReader = lambda call: None
) -> Iterator[None]:
    """Within it, each attention layer of `model` hands its head-mean attention to `read_layer`, in order.

    The model gets its attention back on the way out, also after an exception.

    Args:
        read_call: gets each layer's whole call after `read_layer`, for what needs more than the head mean.
    """
    token = _reading.set(_Reading(read_layer, read_call))
    try:
        with using_attention(model, IMPLEMENTATION):
            yield
    finally:
        _reading.reset(token)


def run_model(
    model: PreTrainedModel, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"], **options: Any
) -> Any:
    """What one forward pass without a key-value cache returns."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False
    return model(input_ids=input_ids, attention_mask=attention_mask, **options)
