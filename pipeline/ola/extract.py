"""A padded batch of tokens to its maps: one forward pass, maps accumulated inside it.

Axis names: B batch, T tokens of the longest sample, M maps.
"""

from dataclasses import dataclass
from typing import NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.ola.attention import LayerReader, reading_attention, run_model
from pipeline.ola.baselines import reading_contributions
from pipeline.ola.eager import MAX_CELLS, Site, reading_eager_attention
from pipeline.ola.orders import MapAccumulator
from storage_schema.arrays import Packing
from storage_schema.errors import NonFiniteMapError, UnsupportedModelError
from storage_schema.recipe import CONTRIBUTION_BASELINES, MapName


@dataclass(frozen=True)
class Access:
    """How a model's attention is read, as its self-check found."""

    num_layers: int
    """Attention calls of one forward pass."""
    packing: Packing
    """`lower` where no query sees a later key, else `full`."""
    sites: tuple[Site, ...] = ()
    """Where eager probabilities come out, one a layer; empty where layers call the registered function."""
    short_positions: int | None = None
    """Tokens up to which LongRoPE scales positions by its short factors. The longest text of a batch decides for all of
    it, so no batch may hold texts on both sides; None for other models."""

    @property
    def path(self) -> str:
        """`fused`: inside the registered attention function. `eager`: from each layer's eager probabilities."""
        return "eager" if self.sites else "fused"


@torch.inference_mode()
def compute_maps(
    model: PreTrainedModel,
    access: Access,
    input_ids: Int[Tensor, "B T"],
    attention_mask: Int[Tensor, "B T"],
    maps: tuple[MapName, ...],
) -> Float[Tensor, "B M T T"]:
    """The maps of each sample of a batch that is padded on the right.

    Rows and columns of padding are exactly 0; within a sample rows sum to 1.

    Above the plain forward pass it holds `B * T * T * (maps + 3)` floats at most: the maps (and each order below the
    highest), one layer's head mean, the mask, and a copy where a baseline is multiplied; `irnl` and `alti`
    hold one more each. To that come, whatever the batch, two buffers of `SCORE_CELLS` on a CPU, 16 MiB for a baseline,
    or what eager attention itself holds of one layer for `MAX_CELLS` probabilities.

    Args:
        attention_mask: 1 for tokens, 0 for padding.

    Raises:
        UnsupportedModelError: the pass made another number of attention calls.
        NonFiniteMapError: a layer's attention holds NaN or infinity; names the batch's sample and the layer.
    """
    if access.sites:
        cells = model.config.get_text_config().num_attention_heads * input_ids.shape[1] ** 2
        rows = max(1, MAX_CELLS // cells)
        if rows < len(input_ids):
            parts = zip(torch.split(input_ids, rows), torch.split(attention_mask, rows), strict=True)
            return torch.cat([compute_maps(model, access, ids, mask, maps) for ids, mask in parts])
    accumulator = MapAccumulator(maps, access.packing)
    _run(model, access, input_ids, attention_mask, accumulator.add_layer, accumulator)
    if accumulator.num_layers != access.num_layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} made {accumulator.num_layers} attention calls in a pass, "
            f"expected {access.num_layers}, one a layer"
        )
    stacked = accumulator.stack_maps()
    real = attention_mask.bool()
    padding = ~(real[:, None, :, None] & real[:, None, None, :])
    stacked.masked_fill_(padding, 0.0)
    finite = stacked.sum(dim=-1).isfinite().flatten(1).all(dim=1)
    if not finite.all():
        _name_layer(model, access, input_ids, attention_mask, int((~finite).nonzero()[0]))
    return stacked


def _run(
    model: PreTrainedModel,
    access: Access,
    input_ids: Tensor,
    attention_mask: Tensor,
    read_layer: LayerReader,
    accumulator: MapAccumulator | None = None,
) -> None:
    if access.sites:
        with reading_eager_attention(model, access.sites, read_layer):
            run_model(model, input_ids, attention_mask, output_attentions=True)
        return
    names = tuple(name for name in accumulator.maps if name in CONTRIBUTION_BASELINES) if accumulator else ()
    if accumulator is None or not names:
        with reading_attention(model, read_layer):
            run_model(model, input_ids, attention_mask)
        return
    with (
        reading_contributions(model, names, attention_mask, accumulator.add_contributions) as read_call,
        reading_attention(model, read_layer, read_call),
    ):
        run_model(model, input_ids, attention_mask)


def _name_layer(
    model: PreTrainedModel, access: Access, input_ids: Tensor, attention_mask: Tensor, row: int
) -> NoReturn:
    # Layers are looked at one by one only in a second pass, so that a sound run pays for one look at its maps.
    real = attention_mask.bool()
    finite: list[Tensor] = []
    _run(
        model,
        access,
        input_ids,
        attention_mask,
        lambda attention: finite.append((attention.sum(dim=-1).isfinite() | ~real).all(dim=-1)),
    )
    for layer, rows in enumerate(finite):
        if not rows.all():
            raise NonFiniteMapError(
                f"attention of layer {layer} holds NaN or infinity; {advise_on_overflow(model.dtype)}",
                int((~rows).nonzero()[0]),
                layer,
            )
    raise NonFiniteMapError("attention of every layer is finite, but a map is not: values or norms overflow", row, 0)


def advise_on_overflow(dtype: torch.dtype) -> str:
    """What to do where a model gives NaN or infinity."""
    if dtype == torch.float32:
        return "its weights hold such values, or overflow float32; look at the model's files"
    return "a wider --dtype (float32) usually mends it"
