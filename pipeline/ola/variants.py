"""Controls: the same architecture and tokens, with weights that were never trained together.

The paper's similarity across models disappears for all of them (arXiv 2511.05064, controls): what remains is what the
architecture alone brings. Weights are drawn on the CPU in float32, so that a seed means the same on every device and
dtype.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import ModuleList
from transformers import PreTrainedModel

from storage_schema.errors import UnsupportedModelError


def make_variant(model: PreTrainedModel, variant: str, seed: int, name: str) -> None:
    """Changes the weights of a loaded model, in place, into those of a control.

    `random`: all weights are those of a fresh model of this architecture. `half-random`: those of half of the layers
    (rounded down), chosen by the seed. `shuffled-layers`: all are genuine, but each layer stands in another's place;
    the seed chooses the order, which is never the genuine one.

    A layer that no other is like (ModernBERT's first lacks a norm) stays in its place.

    Raises:
        UnsupportedModelError: for the last two, a model without two layers with weights of their own; for the last,
            without two of like shape.
    """
    generator = torch.Generator().manual_seed(seed)
    if variant == "random":
        _copy(dict(_draw_fresh(model, seed).named_parameters()), dict(model.named_parameters()))
        return
    layers = _find_layers(model, name)
    if variant == "half-random":
        fresh = _find_layers(_draw_fresh(model, seed), name)
        for place in torch.randperm(len(layers), generator=generator)[: len(layers) // 2].tolist():
            _copy(fresh[place], layers[place])
        return
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, layer in enumerate(layers):
        alike.setdefault(tuple((key, weight.shape) for key, weight in layer.items()), []).append(place)
    groups = [places for places in alike.values() if len(places) > 1]
    if not groups:
        raise _refuse(model, name, "no two layers of like shape")
    genuine = [{key: weight.clone() for key, weight in layer.items()} for layer in layers]
    for places in groups:
        order = list(range(len(places)))
        while order == sorted(order):
            order = torch.randperm(len(places), generator=generator).tolist()
        for place, source in zip(places, order, strict=True):
            _copy(genuine[places[source]], layers[place])


def _draw_fresh(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        fresh: PreTrainedModel = type(model)._from_config(  # type: ignore[no-untyped-call]
            model.config, attn_implementation="eager", dtype=torch.float32
        )
    return fresh


def _find_layers(model: PreTrainedModel, name: str) -> list[dict[str, Tensor]]:
    """The weights of each layer, by their names within it.

    XLM and FlauBERT keep a layer's parts in lists of their own (attentions, feed-forward blocks, norms); all of them
    belong to it.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    stacks: dict[str, ModuleList] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, ModuleList) and len(module) == num_layers and not inside:
            stacks[path] = module
    if not stacks or num_layers < 2:
        raise _refuse(model, name, "no stack of two or more layers with weights of their own")
    return [
        {f"{path}.{key}": weight for path, stack in stacks.items() for key, weight in stack[place].named_parameters()}
        for place in range(num_layers)
    ]


def _refuse(model: PreTrainedModel, name: str, reason: str) -> UnsupportedModelError:
    architecture = model.config.get_text_config().model_type
    return UnsupportedModelError(f"{name} ({architecture}) has {reason}; this variant is not for it (`random` is)")


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for key, weight in target.items():
        weight.copy_(source[key])
