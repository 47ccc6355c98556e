"""Attention blocks, taken apart: what each token adds to a block's output, exactly.

Axis names: B batch, T tokens of one text (i: queries, j: keys), H query heads, G key heads, V value size, D hidden
size, J keys of a tile.
An attention block is attention with its residual connection and, where the architecture has one there, the norm after
it; the feed-forward block that follows is not part of it (Kobayashi et al. 2021). Its output is, without remainder,

    y_i = sum_j t_ij + b_i,    t_ij = (1 / s_i) sum_h a_ij^h v_j^h + [i = j] r_i

with `a^h` head h's probabilities. `v_j^h` is key j's value vector through h's part of the output projection, centered
and scaled as the norm does; a norm is linear once its denominator `s_i` is known (1 where there is none). `r_i`
is the residual's part, `b_i` what no token brought (biases).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import LayerNorm, Linear, Module
from transformers import PreTrainedModel

from pipeline.ola.attention import AttentionCall, CallReader

TILE_CELLS = 4 * 1024 * 1024
"""Floats that a text's decomposition holds at once: 16 MiB, or those of one key where they are more."""
_SCORED_QUERIES = 64


@dataclass(frozen=True)
class Block:
    """The modules of one attention block.

    Its input is argument `start_place` of `start`. Its output is what `end` is given, or, where `end` is `start`, what
    it returns.
    """

    project: Linear
    norm: Module | None
    start: Module
    start_place: int
    end: Module

    @property
    def norms_residual(self) -> bool:
        """Whether the norm comes after the sum with the residual (BERT), and not before it (Gemma 2)."""
        return self.end is self.start


def find_blocks(model: PreTrainedModel) -> tuple[Block, ...]:
    """The attention blocks of a model, first to last; empty where it has none of a known form.

    Forms are recognized by their parts: BERT's (RoBERTa, ELECTRA), where a LayerNorm follows the sum; Llama's (Qwen2,
    Mistral), where none does; Gemma 2's (Gemma 3), where an RMSNorm comes before the sum. Whether a model of
    such parts computes what is assumed here is for the self-check to see.
    """
    blocks = []
    for module in model.modules():
        parts: dict[str, Any] = {name: part for name, part in module.named_modules() if name.count(".") < 2}
        if {"self", "output.dense", "output.LayerNorm"} <= parts.keys():
            output = parts["output"]
            blocks.append(Block(parts["output.dense"], parts["output.LayerNorm"], output, 1, output))
        elif {"self_attn.o_proj", "input_layernorm", "post_attention_layernorm"} <= parts.keys():
            after, before_feed_forward = parts["post_attention_layernorm"], parts.get("pre_feedforward_layernorm")
            blocks.append(
                Block(
                    parts["self_attn.o_proj"],
                    after if before_feed_forward else None,
                    parts["input_layernorm"],
                    0,
                    before_feed_forward or after,
                )
            )
    return tuple(blocks)


@dataclass(frozen=True)
class Decomposition:
    """One text's pass through one block, ready to be taken apart (symbols as in the module's docstring)."""

    query: Float[Tensor, "H T K"]
    key: Float[Tensor, "G T K"]
    value: Float[Tensor, "G T V"]
    mask: Float[Tensor, "_ T T"] | None
    """For all heads, or one for each."""
    scaling: float
    softcap: float | None
    projection: Float[Tensor, "H V D"]
    """Each head's part of the output projection, centered and scaled as the norm does."""
    inverse_scale: Float[Tensor, " T"]
    """`1 / s_i`."""
    residual: Float[Tensor, "T D"]
    """`r_i`."""
    bias: Float[Tensor, "T D"]
    """`b_i`."""
    output: Float[Tensor, "T D"]
    """`y_i`, as the model computed it."""

    def iter_tiles(self) -> Iterator[tuple[slice, Float[Tensor, "J T H"], Float[Tensor, "J H D"]]]:
        """A few keys at a time: which, their `a_ij^h / s_i`, and their `v_j^h`."""
        num_heads, num_tokens, _ = self.query.shape
        hidden = self.residual.shape[-1]
        shared = num_heads // len(self.key)
        normalizer = torch.cat(
            [
                self._score(slice(start, start + _SCORED_QUERIES), slice(None)).logsumexp(dim=-1)
                for start in range(0, num_tokens, _SCORED_QUERIES)
            ],
            dim=1,
        )
        step = max(1, TILE_CELLS // (num_tokens * max(num_heads, hidden) + num_heads * hidden))
        for start in range(0, num_tokens, step):
            keys = slice(start, min(start + step, num_tokens))
            attention = (self._score(slice(None), keys) - normalizer[:, :, None]).exp_()
            attention *= self.inverse_scale[None, :, None]
            vectors = torch.bmm(self.value[:, keys].repeat_interleave(shared, dim=0), self.projection)
            yield keys, attention.permute(2, 1, 0), vectors.transpose(0, 1)

    def _score(self, queries: slice, keys: slice) -> Float[Tensor, "H _ _"]:
        num_tokens, size = self.query.shape[1:]
        grouped = self.query.view(len(self.key), -1, num_tokens, size)[:, :, queries]
        scores = torch.matmul(grouped * self.scaling, self.key[:, None, keys].transpose(2, 3)).flatten(0, 1)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores if self.mask is None else scores + self.mask[:, queries, keys]


@contextmanager
def reading_blocks(
    model: PreTrainedModel, lengths: list[int], read_decomposition: Callable[[int, Decomposition], None]
) -> Iterator[CallReader]:
    """A reader of attention calls; with it, each block hands every text's decomposition to `read_decomposition`.

    Args:
        lengths: tokens of each text of the batch, which is padded on the right.
        read_decomposition: gets the text's row in the batch, then its decomposition; rows in order, block by block.
    """
    calls: list[AttentionCall] = []
    starts: list[Tensor] = []

    def finish(block: Block, output: Tensor) -> None:
        call, start = calls.pop(), starts.pop()
        for row, decomposition in enumerate(_decompose(block, call, start, output, lengths)):
            read_decomposition(row, decomposition)

    with ExitStack() as hooks:
        for block in find_blocks(model):

            def hear_start(module: Module, arguments: Any, place: int = block.start_place) -> None:
                starts.append(arguments[place])

            def hear_end(module: Module, arguments: Any, output: Any = None, block: Block = block) -> None:
                finish(block, arguments[0] if output is None else output)

            hooks.callback(block.start.register_forward_pre_hook(hear_start).remove)
            hear = block.end.register_forward_hook if block.norms_residual else block.end.register_forward_pre_hook
            hooks.callback(hear(hear_end).remove)
        yield calls.append


def _decompose(
    block: Block, call: AttentionCall, start: Tensor, output: Tensor, lengths: list[int]
) -> Iterator[Decomposition]:
    weight = block.project.weight.float()
    mixed = torch.nn.functional.linear(call.output.flatten(2), block.project.weight, block.project.bias).float()
    start, output = start.float(), output.float()
    bias = torch.zeros_like(weight[:, 0]) if block.project.bias is None else block.project.bias.float()
    denominator = torch.ones_like(mixed[..., 0])
    residual, shift = start, torch.zeros_like(bias)
    if block.norm is not None:
        center, gain, shift, eps = _describe_norm(block.norm, weight.shape[0])
        normed = mixed + start if block.norms_residual else mixed
        if center:
            weight, bias = weight - weight.mean(dim=0), bias - bias.mean()
            normed = normed - normed.mean(dim=-1, keepdim=True)
        denominator = (normed.square().mean(dim=-1) + eps).sqrt()
        weight, bias = weight * gain[:, None], bias * gain
        if block.norms_residual:
            residual = (start - start.mean(dim=-1, keepdim=True) if center else start) * gain / denominator[..., None]
    projection = weight.view(len(weight), call.query.shape[1], -1).permute(1, 2, 0).contiguous()
    for row, length in enumerate(lengths):
        inverse = 1 / denominator[row, :length]
        yield Decomposition(
            query=call.query[row, :, :length].float(),
            key=call.key[row, :, :length].float(),
            value=call.value[row, :, :length].float(),
            mask=None if call.attention_mask is None else call.attention_mask[row, :, :length, :length].float(),
            scaling=call.scaling,
            softcap=call.softcap,
            projection=projection,
            inverse_scale=inverse,
            residual=residual[row, :length],
            bias=inverse[:, None] * bias + shift,
            output=output[row, :length],
        )


def _describe_norm(norm: Any, hidden: int) -> tuple[bool, Tensor, Tensor, float]:
    """Whether a norm centers, its gain [D], its shift [D], and its epsilon."""
    if isinstance(norm, LayerNorm):
        return True, norm.weight.float(), norm.bias.float(), norm.eps
    eps = float(getattr(norm, "eps", None) or norm.variance_epsilon)
    # Gemma's RMSNorm scales by 1 + weight, others by weight: a vector of ones tells.
    gain = norm(torch.ones(hidden, device=norm.weight.device, dtype=norm.weight.dtype)).float() * (1 + eps) ** 0.5
    return False, gain, torch.zeros_like(gain), eps
