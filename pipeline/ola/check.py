"""The self-check of a loaded model: its attention is what is read, and what is read is its attention."""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.ola.attention import (
    QUERY_BLOCK,
    AttentionCall,
    LayerReader,
    reading_attention,
    run_model,
    using_attention,
)
from pipeline.ola.baselines import reconstruct_output
from pipeline.ola.blocks import Decomposition, find_blocks, reading_blocks
from pipeline.ola.eager import Site, find_sites, reading_eager_attention
from pipeline.ola.extract import Access, advise_on_overflow
from pipeline.ola.identity import find_max_positions
from storage_schema.errors import UnsupportedModelError, summarize_error

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest difference of two float32 results that went through weights of a dtype."""
_EXACT = 1e-5
_ROUNDINGS = 4
"""Times that a score is rounded to its dtype: inputs, product, scaling, soft-cap or mask."""


@dataclass(frozen=True)
class Probe:
    """Two short texts of random tokens, the second padded on the right."""

    input_ids: Int[Tensor, "2 T"]
    mask: Int[Tensor, "2 T"]
    lengths: tuple[int, int]


@dataclass(frozen=True)
class _ReadLayer:
    """What one attention call gave."""

    mean: Tensor
    from_formula: float
    """How far `mean` is from the formula in float64, on the same queries and keys."""
    largest_score: float


@torch.inference_mode()
def check_model(model: PreTrainedModel, name: str, tolerance: float) -> Access:
    """How the attention of a model is read, once it is known that it can be.

    Two texts of random tokens, one longer than a block of queries and one padded, go through the model's eager
    attention and through ours. There must be one call a layer, each equal to the eager probabilities' head mean, with
    rows that sum to 1 and nothing on padding; the padded text alone must give the same (a convolution, for one, mixes
    padding into texts); and turning the layers' attention outputs around must change the model's output. Models that
    never call the registered function are read from their eager probabilities.

    Eager attention rounds scores to the weights' dtype. Where that is not float32, each layer is held to its formula in
    float64, and to eager attention as far as `_ROUNDINGS` roundings of its largest score let them be apart.

    Args:
        tolerance: `TOLERANCE` of the weights' dtype.

    Raises:
        UnsupportedModelError: one of these does not hold; names the model and what was seen.
    """
    config = model.config.get_text_config()
    title = f"{name} ({config.model_type})"
    num_layers = getattr(config, "num_hidden_layers", None)
    if not num_layers:
        raise UnsupportedModelError(f"{title} has no attention layers that its config names")
    short_positions = find_short_positions(config)
    probe = make_probe(model, name)
    ours: list[_ReadLayer] = []
    alone: list[Tensor] = []
    means: list[Tensor] = []
    modules: list[torch.nn.Module] = []

    def read_call(call: AttentionCall) -> None:
        modules.append(call.module)
        ours.append(_hold_to_formula(call, means[-1], probe.lengths))

    try:
        with reading_attention(model, means.append, read_call):
            run_model(model, probe.input_ids, probe.mask)
        with using_attention(model, "eager"):
            sites, eager = find_sites(model, probe.input_ids, probe.mask)
            if not ours and len(sites) == num_layers:
                with reading_eager_attention(model, sites, means.append):
                    run_model(model, probe.input_ids, probe.mask, output_attentions=True)
                ours = [_ReadLayer(mean, 0.0, 0.0) for mean in means]
                modules = [model.get_submodule(site.module) for site in sites]
            else:
                sites = ()
        short = slice(1, 2), slice(probe.lengths[1])
        with _reading(model, sites, alone.append):
            run_model(model, probe.input_ids[short], probe.mask[short], **_options(sites))
    except Exception as error:  # a model's own code may raise anything
        raise UnsupportedModelError(f"{title}: a pass over two short texts fails: {summarize_error(error)}") from error
    if len(ours) != num_layers or len(eager) != num_layers:
        raise UnsupportedModelError(
            f"{title} sent {len(ours)} of its {num_layers} layers through a registered attention function and "
            f"returned eager probabilities of {len(eager)}; its attention cannot be read"
        )
    _check_layers(title, ours, eager, alone, probe.lengths, tolerance, model.dtype)
    if not _is_moved_by(model, modules, sites, probe):
        raise UnsupportedModelError(f"{title}: its output stays the same when its attention is changed")
    lower = not any(layer.mean[0].triu(1).any() for layer in ours)
    return Access(num_layers, "lower" if lower else "full", sites, short_positions)


def _bound_rounding(dtype: torch.dtype, largest_score: float) -> float:
    """How far probabilities may be apart where scores are rounded to a dtype."""
    return min(1.0, _ROUNDINGS * torch.finfo(dtype).eps / 2 * largest_score)


def _hold_to_formula(call: AttentionCall, mean: Tensor, lengths: tuple[int, int]) -> _ReadLayer:
    shared = call.query.shape[1] // call.key.shape[1]
    keys = call.key.double().repeat_interleave(shared, dim=1)
    scores = call.query.double() @ keys.mT * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    largest = float(scores.abs().max())
    if call.attention_mask is not None:
        scores = scores + call.attention_mask.double()
    difference = (scores.softmax(dim=-1).mean(dim=1) - mean).abs()
    worst = max(float(difference[row, :length].max()) for row, length in enumerate(lengths))
    return _ReadLayer(mean, worst, largest)


def _check_layers(
    title: str,
    ours: list[_ReadLayer],
    eager: tuple[Tensor, ...],
    alone: list[Tensor],
    lengths: tuple[int, int],
    tolerance: float,
    dtype: torch.dtype,
) -> None:
    is_exact = dtype == torch.float32
    for layer, (read, probabilities, unpadded) in enumerate(zip(ours, eager, alone, strict=True)):
        where, mean = f"{title}, layer {layer}", read.mean
        squares = [mean[row, :length, :length] for row, length in enumerate(lengths)]
        if not all(square.isfinite().all() for square in squares):
            raise UnsupportedModelError(f"{where}: its attention holds NaN or infinity; {advise_on_overflow(dtype)}")
        allowed = tolerance if is_exact else tolerance + _bound_rounding(dtype, read.largest_score)
        exact = _EXACT + _bound_rounding(torch.float32, read.largest_score)
        differences = [
            float((square - probabilities[row, :, : len(square), : len(square)].float().mean(0)).abs().max())
            for row, square in enumerate(squares)
        ]
        # Scores beyond float16 make eager attention NaN where ours, in float32, is not (transformers#33317).
        comparable = is_exact or bool(probabilities.isfinite().all())
        row_error = float((mean[0].sum(-1) - 1).abs().max())
        on_padding = float(mean[1, : lengths[1], lengths[1] :].abs().max())
        is_equal = not comparable or max(differences) <= allowed
        if not (is_equal and read.from_formula <= exact and row_error <= tolerance and on_padding == 0):
            raise UnsupportedModelError(
                f"{where}: head-mean attention differs from eager attention by {max(differences):.1e} (allowed "
                f"{allowed:.0e}), from its formula by {read.from_formula:.1e} (allowed {exact:.0e}), rows from 1 by "
                f"{row_error:.1e} (allowed {tolerance:.0e}), and {on_padding:.1e} falls on padding"
            )
        by_padding = float((squares[1] - unpadded[0]).abs().max())
        if not by_padding <= allowed:
            raise UnsupportedModelError(
                f"{where}: padding changes a text's attention by {by_padding:.1e} "
                f"(allowed {allowed:.0e}), so that its maps would depend on the batch"
            )


def _reading(model: PreTrainedModel, sites: tuple[Site, ...], read_layer: LayerReader) -> AbstractContextManager[None]:
    return reading_eager_attention(model, sites, read_layer) if sites else reading_attention(model, read_layer)


def _options(sites: tuple[Site, ...]) -> dict[str, bool]:
    return {"output_attentions": True} if sites else {}


def _is_moved_by(model: PreTrainedModel, modules: list[torch.nn.Module], sites: tuple[Site, ...], probe: Probe) -> bool:
    def turn_around(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        return (-output[0], *output[1:]) if isinstance(output, tuple) else -output

    options = _options(sites)
    with ExitStack() as stack:
        stack.enter_context(_reading(model, sites, lambda mean: None))
        before = run_model(model, probe.input_ids, probe.mask, return_dict=True, **options).last_hidden_state
        for module in dict.fromkeys(modules):
            stack.callback(module.register_forward_hook(turn_around).remove)
        after = run_model(model, probe.input_ids, probe.mask, return_dict=True, **options).last_hidden_state
    return not torch.equal(before, after)


@torch.inference_mode()
def check_decomposition(model: PreTrainedModel, name: str, access: Access, tolerance: float) -> None:
    """Passes if each attention block's output is the sum of the parts that IRNL and ALTI look at.

    Raises:
        UnsupportedModelError: the blocks have no known form, or the sum differs from the model's own output by more
            than `tolerance` of its largest value; names the layer and the difference.
    """
    title = f"{name} ({model.config.get_text_config().model_type})"
    num_blocks = len(find_blocks(model))
    if access.sites or num_blocks != access.num_layers:
        raise UnsupportedModelError(
            f"{title} cannot be taken apart for irnl and alti: {num_blocks} of its {access.num_layers} attention "
            "blocks have a known form (BERT's, Llama's, Gemma 2's); ask for orders and rollout"
        )
    probe = make_probe(model, name)
    errors: list[float] = []

    def measure(row: int, block: Decomposition) -> None:
        difference = (reconstruct_output(block) - block.output).abs().max() / block.output.abs().max()
        errors.append(float(difference))

    def ignore(call: Tensor | AttentionCall) -> None:
        pass

    try:
        with (
            reading_blocks(model, list(probe.lengths), measure) as read_call,
            reading_attention(model, ignore, read_call),
        ):
            run_model(model, probe.input_ids, probe.mask)
    except Exception as error:  # parts of a known name may be anything
        raise UnsupportedModelError(
            f"{title} cannot be taken apart for irnl and alti: {summarize_error(error)}"
        ) from error
    worst = max(errors, default=0.0)
    layer = errors.index(worst) // len(probe.lengths) if errors else 0
    if len(errors) != len(probe.lengths) * access.num_layers or not worst <= tolerance:
        raise UnsupportedModelError(
            f"{title}, layer {layer}: the parts that irnl and alti look at sum to the block's output but "
            f"for {worst:.1e} of it (allowed {tolerance:.0e})"
        )


def make_probe(model: PreTrainedModel, name: str) -> Probe:
    """Two texts: a few tokens more than a block of queries, or as many as the model takes at once, and half of it.

    So long, since windows and sparse patterns (Doge keeps each head's best keys) do not show in a few tokens.
    """
    config, device = model.config.get_text_config(), model.device
    limits = find_max_positions(config, name), find_short_positions(config)
    longest = min(limit for limit in (QUERY_BLOCK["cpu"] + 6, *limits) if limit)
    lengths = longest, -(-longest // 2)
    pad = config.pad_token_id if isinstance(config.pad_token_id, int) and config.pad_token_id >= 0 else 0
    # Some models count positions from padding ids, so a text must not hold one.
    tokens = torch.tensor([token for token in range(min(config.vocab_size, 1000)) if token != pad])
    input_ids = tokens[torch.randint(len(tokens), (2, longest), generator=torch.Generator().manual_seed(0))]
    mask = torch.ones_like(input_ids)
    input_ids[1, lengths[1] :], mask[1, lengths[1] :] = pad, 0
    return Probe(input_ids.to(device), mask.to(device), lengths)


def find_short_positions(config: PreTrainedConfig) -> int | None:
    """Tokens up to which LongRoPE scales positions by its short factors; None for models without it."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict) and kind.get("rope_type") == "longrope"]
    return min((int(kind["original_max_position_embeddings"]) for kind in kinds), default=None)
