"""A padded batch of tokens to its maps: one forward pass, orders accumulated inside it.

Axis names: B batch, T tokens of the longest sample, M maps.
"""

import inspect

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.ola.attention import reading_attention
from pipeline.ola.orders import MapAccumulator
from storage_schema.errors import NonFiniteMapError, UnsupportedModelError
from storage_schema.recipe import MapName


@torch.inference_mode()
def compute_maps(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "B T"],
    attention_mask: Int[Tensor, "B T"],
    maps: tuple[MapName, ...],
    num_layers: int,
) -> Float[Tensor, "B M T T"]:
    """The maps of each sample of a batch that is padded on the right.

    Rows and columns of padding are exactly 0; within a sample rows sum to 1.

    Args:
        attention_mask: 1 for tokens, 0 for padding.
        num_layers: the attention calls that one forward pass makes.

    Raises:
        UnsupportedModelError: the pass made another number of attention calls.
        NonFiniteMapError: a layer's attention holds NaN or infinity; names the batch's sample and the layer.
    """
    accumulator = MapAccumulator(maps)
    finite: list[Bool[Tensor, " B"]] = []
    real = attention_mask.bool()

    def read_layer(attention: Float[Tensor, "B T T"]) -> None:
        row_sums = attention.sum(dim=-1)
        finite.append((row_sums.isfinite() | ~real).all(dim=-1))
        accumulator.add_layer(attention)

    with reading_attention(model, read_layer):
        run_model(model, input_ids, attention_mask)
    if len(finite) != num_layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} made {len(finite)} attention calls in a pass, expected {num_layers}, one a layer"
        )
    all_finite = torch.stack(finite)
    if not all_finite.all():
        layer, row = (~all_finite).nonzero()[0].tolist()
        raise NonFiniteMapError(
            f"attention of layer {layer} holds NaN or infinity; a wider --dtype (float32) usually mends it", row, layer
        )
    padding = ~(real[:, None, :, None] & real[:, None, None, :])
    return accumulator.stack_maps().masked_fill_(padding, 0.0)


def run_model(model: PreTrainedModel, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"]) -> None:
    """One forward pass for its side effects, without a key-value cache."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    model(input_ids=input_ids, attention_mask=attention_mask, **options)
