"""Controls: the same architecture and tokens, with weights that were never trained together.

The paper's similarity across models disappears for all of them (arXiv 2511.05064, controls): what remains is what the
architecture alone brings. Weights are drawn on the CPU in float32, so that a seed means the same on every device and
dtype.
"""

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

    Raises:
        UnsupportedModelError: for the last two, a model without two layers of like shape and weights of their own.
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
    order = list(range(len(layers)))
    while order == sorted(order):
        order = torch.randperm(len(layers), generator=generator).tolist()
    genuine = [{key: weight.clone() for key, weight in layer.items()} for layer in layers]
    for place, source in enumerate(order):
        _copy(genuine[source], layers[place])


def _draw_fresh(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        fresh: PreTrainedModel = type(model)._from_config(  # type: ignore[no-untyped-call]
            model.config, attn_implementation="eager", dtype=torch.float32
        )
    return fresh


def _find_layers(model: PreTrainedModel, name: str) -> list[dict[str, Tensor]]:
    """The weights of each layer, by their names within it."""
    num_layers = model.config.get_text_config().num_hidden_layers
    stacks = [module for module in model.modules() if isinstance(module, ModuleList) and len(module) == num_layers]
    layers: list[dict[str, Tensor]] = [dict(layer.named_parameters()) for layer in stacks[0]] if stacks else []
    shapes = [{key: weight.shape for key, weight in layer.items()} for layer in layers]
    if len(layers) < 2 or any(shape != shapes[0] for shape in shapes):
        raise UnsupportedModelError(
            f"{name} ({model.config.get_text_config().model_type}) has no stack of two or more layers of like shape "
            "with weights of their own; of the variants it can only take `random`"
        )
    return layers


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for key, weight in target.items():
        weight.copy_(source[key])
