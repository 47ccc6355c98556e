"""Attention of models that call no registered function, read from their own eager attention, one layer at a time.

Axis names: B batch, H heads, Q queries, K keys, T tokens.
BLOOM, MPNet, DeBERTa-v2 and Falcon compute attention by themselves, and their modules return the probabilities when
asked. A hook takes them out of each layer's output as it goes by, so that the model's own list of all layers stays
empty.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.ola.attention import LayerReader, run_model

MAX_CELLS = 32 * 1024 * 1024
"""Probabilities of one layer held at once: 128 MiB of float32, or those of one text where they are more."""


@dataclass(frozen=True)
class Site:
    """Where a layer's probabilities [B, H, Q, K] come out: a module's name, and the place in the tuple it returns."""

    module: str
    place: int


def find_sites(
    model: PreTrainedModel, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"]
) -> tuple[tuple[Site, ...], tuple[Tensor, ...]]:
    """The site of each layer and the probabilities that the model itself gives, from one eager pass.

    There are no sites where the probabilities of a layer are not what some module returned.
    """
    returned: list[tuple[Tensor, Site]] = []

    def note(name: str) -> Any:
        def hook(module: torch.nn.Module, arguments: Any, output: Any) -> None:
            if isinstance(output, tuple):
                returned.extend(
                    (part, Site(name, place)) for place, part in enumerate(output) if isinstance(part, Tensor)
                )

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(note(name)).remove)
        output = run_model(model, input_ids, attention_mask, output_attentions=True, return_dict=True)
    attentions = tuple(output.attentions or ())
    # Inner modules return first, so the first that returned a tensor is the one that made it.
    sites = [next((site for part, site in returned if part is layer), None) for layer in attentions]
    return tuple(site for site in sites if site) if all(sites) else (), attentions


@contextmanager
def reading_eager_attention(model: PreTrainedModel, sites: tuple[Site, ...], read_layer: LayerReader) -> Iterator[None]:
    """Within it, each site hands its layer's head-mean attention to `read_layer`, in order, and passes on nothing of
    it.

    The passes in it must ask for `output_attentions`. The hooks are gone on the way out, also after an exception.
    """
    with ExitStack() as hooks:
        for site in sites:

            def hook(module: torch.nn.Module, arguments: Any, output: Any, place: int = site.place) -> Any:
                read_layer(output[place].mean(dim=1, dtype=torch.float32))
                return (*output[:place], output[place].new_empty(0), *output[place + 1 :])

            hooks.callback(model.get_submodule(site.module).register_forward_hook(hook).remove)
        yield
