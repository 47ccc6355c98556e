"""The self-check of a loaded model: its attention is what is read, and what is read is its attention."""

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.ola.attention import AttentionCall, LayerReader, reading_attention, run_model
from pipeline.ola.baselines import reconstruct_output
from pipeline.ola.blocks import Decomposition, find_blocks, reading_blocks
from pipeline.ola.eager import Site, find_sites, reading_eager_attention
from pipeline.ola.extract import Access
from storage_schema.errors import UnsupportedModelError

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest difference from eager probabilities, by the dtype of the weights."""
_LENGTHS = (6, 4)


@torch.inference_mode()
def check_model(model: PreTrainedModel, name: str, tolerance: float) -> Access:
    """How the attention of a model is read, once it is known that it can be.

    Two short texts of random tokens, one padded, go through the model's eager attention and through ours. There must be
    one call a layer, each equal to the eager probabilities' head mean, with rows that sum to 1 and nothing on padding;
    the padded text alone must give the same (a convolution, for one, mixes padding into texts); and turning the layers'
    attention outputs around must change the model's output. Models that never call the registered function are read
    from their eager probabilities.

    Raises:
        UnsupportedModelError: one of these does not hold; names the model and what was seen.
    """
    config = model.config.get_text_config()
    title = f"{name} ({config.model_type})"
    num_layers = getattr(config, "num_hidden_layers", None)
    if not num_layers:
        raise UnsupportedModelError(f"{title} has no attention layers that its config names")
    input_ids, mask = make_probe(config, model.device)
    ours: list[Tensor] = []
    alone: list[Tensor] = []
    modules: list[torch.nn.Module] = []
    try:
        with reading_attention(model, ours.append, lambda call: modules.append(call.module)):
            run_model(model, input_ids, mask)
        sites, eager = find_sites(model, input_ids, mask)
        if not ours and len(sites) == num_layers:
            with reading_eager_attention(model, sites, ours.append):
                run_model(model, input_ids, mask, output_attentions=True)
            modules = [model.get_submodule(site.module) for site in sites]
        else:
            sites = ()
        short = slice(1, 2), slice(_LENGTHS[1])
        with _reading(model, sites, alone.append):
            run_model(model, input_ids[short], mask[short], **_options(sites))
    except Exception as error:  # a model's own code may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedModelError(f"{title}: a pass over two short texts fails: {reason}") from error
    if len(ours) != num_layers or len(eager) != num_layers:
        raise UnsupportedModelError(
            f"{title} sent {len(ours)} of its {num_layers} layers through a registered attention function and "
            f"returned eager probabilities of {len(eager)}; its attention cannot be read"
        )
    _check_layers(title, ours, eager, alone, tolerance)
    if not _is_moved_by(model, modules, sites, input_ids, mask):
        raise UnsupportedModelError(f"{title}: its output stays the same when its attention is changed")
    lower = not any(mean[0].triu(1).any() for mean in ours)
    return Access(num_layers, "lower" if lower else "full", sites)


def _check_layers(
    title: str, ours: list[Tensor], eager: tuple[Tensor, ...], alone: list[Tensor], tolerance: float
) -> None:
    for layer, (mean, probabilities, unpadded) in enumerate(zip(ours, eager, alone, strict=True)):
        difference = max(
            float((mean[row, :length, :length] - probabilities[row, :, :length, :length].float().mean(0)).abs().max())
            for row, length in enumerate(_LENGTHS)
        )
        row_error = float((mean[0].sum(-1) - 1).abs().max())
        on_padding = float(mean[1, : _LENGTHS[1], _LENGTHS[1] :].abs().max())
        if not (difference <= tolerance and row_error <= tolerance and on_padding == 0):
            raise UnsupportedModelError(
                f"{title}, layer {layer}: head-mean attention differs from eager attention by "
                f"{difference:.1e} (allowed {tolerance:.0e}), rows from 1 by {row_error:.1e}, "
                f"and {on_padding:.1e} falls on padding"
            )
        by_padding = float((mean[1, : _LENGTHS[1], : _LENGTHS[1]] - unpadded[0]).abs().max())
        if not by_padding <= tolerance:
            raise UnsupportedModelError(
                f"{title}, layer {layer}: padding changes a text's attention by {by_padding:.1e} "
                f"(allowed {tolerance:.0e}), so that its maps would depend on the batch"
            )


def _reading(model: PreTrainedModel, sites: tuple[Site, ...], read_layer: LayerReader) -> AbstractContextManager[None]:
    return reading_eager_attention(model, sites, read_layer) if sites else reading_attention(model, read_layer)


def _options(sites: tuple[Site, ...]) -> dict[str, bool]:
    return {"output_attentions": True} if sites else {}


def _is_moved_by(
    model: PreTrainedModel, modules: list[torch.nn.Module], sites: tuple[Site, ...], input_ids: Tensor, mask: Tensor
) -> bool:
    def turn_around(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        return (-output[0], *output[1:]) if isinstance(output, tuple) else -output

    options = _options(sites)
    with ExitStack() as stack:
        stack.enter_context(_reading(model, sites, lambda mean: None))
        before = run_model(model, input_ids, mask, return_dict=True, **options).last_hidden_state
        for module in dict.fromkeys(modules):
            stack.callback(module.register_forward_hook(turn_around).remove)
        after = run_model(model, input_ids, mask, return_dict=True, **options).last_hidden_state
    return not torch.equal(before, after)


@torch.inference_mode()
def check_decomposition(model: PreTrainedModel, name: str, access: Access, tolerance: float) -> None:
    """Passes if each attention block's output is the sum of the parts that IRNL and ALTI look at.

    Raises:
        UnsupportedModelError: the blocks have no known form, or the sum differs from the model's own output by more
            than
            `tolerance` of its largest value; names the layer and the difference.
    """
    title = f"{name} ({model.config.get_text_config().model_type})"
    num_blocks = len(find_blocks(model))
    if access.sites or num_blocks != access.num_layers:
        raise UnsupportedModelError(
            f"{title} cannot be taken apart for irnl and alti: {num_blocks} of its {access.num_layers} attention "
            "blocks have a known form (BERT's, Llama's, Gemma 2's); ask for orders and rollout"
        )
    input_ids, mask = make_probe(model.config.get_text_config(), model.device)
    errors: list[float] = []

    def measure(row: int, block: Decomposition) -> None:
        difference = (reconstruct_output(block) - block.output).abs().max() / block.output.abs().max()
        errors.append(float(difference))

    def ignore(call: Tensor | AttentionCall) -> None:
        pass

    try:
        with reading_blocks(model, list(_LENGTHS), measure) as read_call, reading_attention(model, ignore, read_call):
            run_model(model, input_ids, mask)
    except Exception as error:  # parts of a known name may be anything
        raise UnsupportedModelError(f"{title} cannot be taken apart for irnl and alti: {error}") from error
    worst = max(errors, default=0.0)
    layer = errors.index(worst) // len(_LENGTHS) if errors else 0
    if len(errors) != len(_LENGTHS) * access.num_layers or not worst <= tolerance:
        raise UnsupportedModelError(
            f"{title}, layer {layer}: the parts that irnl and alti look at sum to the block's output but "
            f"for {worst:.1e} of it (allowed {tolerance:.0e})"
        )


def make_probe(config: PreTrainedConfig, device: torch.device) -> tuple[Int[Tensor, "2 6"], Int[Tensor, "2 6"]]:
    """Two texts of random tokens, of 6 and 4, and their mask."""
    pad = config.pad_token_id if isinstance(config.pad_token_id, int) and config.pad_token_id >= 0 else 0
    # Some models count positions from padding ids, so a text must not hold one.
    tokens = torch.tensor([token for token in range(min(config.vocab_size, 1000)) if token != pad])
    input_ids = tokens[torch.randint(len(tokens), (2, _LENGTHS[0]), generator=torch.Generator().manual_seed(0))]
    mask = torch.ones_like(input_ids)
    input_ids[1, _LENGTHS[1] :], mask[1, _LENGTHS[1] :] = pad, 0
    return input_ids.to(device), mask.to(device)
