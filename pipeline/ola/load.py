"""A model ready to be read: loaded, set to one device and dtype, and checked against its own eager attention."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from pipeline.ola.attention import reading_attention
from pipeline.ola.extract import compute_maps, run_model
from pipeline.ola.identity import ModelIdentity
from storage_schema.arrays import Packing
from storage_schema.errors import InvalidRecipeError, UnsupportedModelError
from storage_schema.recipe import MapName

_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}


@dataclass(frozen=True)
class LoadedModel:
    """A model whose attention passed the self-check."""

    name: str
    model: PreTrainedModel
    num_layers: int
    packing: Packing
    """`lower` where no query sees a later key, else `full`."""

    @property
    def num_embeddings(self) -> int:
        """Token ids that the model knows: 0 to one less."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return len(weight)

    def compute_maps(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"], maps: tuple[MapName, ...]
    ) -> Float[Tensor, "B M T T"]:
        """The maps of a batch, on the CPU or wherever the model lies; see `extract.compute_maps`."""
        device = self.model.device
        return compute_maps(self.model, input_ids.to(device), attention_mask.to(device), maps, self.num_layers)


def load_model(identity: ModelIdentity, *, compute_dtype: str = "float32", device: str = "auto") -> LoadedModel:
    """The model of `identity`, without its language-modeling head, checked.

    Args:
        compute_dtype: the weights' dtype.
        device: a torch device, or `auto` for the first GPU where there is one, else the CPU.

    Raises:
        UnsupportedModelError: its weights do not load, or its attention is not the one that is read (`check_model`).
        InvalidRecipeError: the device does not exist here.
    """
    target = _choose_device(device)
    with _no_progress_bar():
        model = _load(identity, compute_dtype)
    torch.nn.Module.to(model, target)
    model.train(False)
    num_layers, packing = check_model(model, identity.name, _TOLERANCE[compute_dtype])
    return LoadedModel(identity.name, model, num_layers, packing)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _load(identity: ModelIdentity, compute_dtype: str) -> PreTrainedModel:
    try:
        model, loading = AutoModel.from_pretrained(
            identity.path,
            dtype=getattr(torch, compute_dtype),
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=identity.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever a damaged file or foreign code raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedModelError(f"{identity.name}: transformers cannot load it: {reason}") from None
    # A pooler reads the last layer and no attention comes after it; any other weight that is missing would be random.
    missing = sorted(key for key in loading["missing_keys"] if "pooler" not in key)
    if missing or loading["mismatched_keys"]:
        named = ", ".join(missing[:3]) or str(loading["mismatched_keys"])
        raise UnsupportedModelError(
            f"{identity.name}: {len(missing)} weights of {type(model).__name__} are not in {identity.path} "
            f"or have another shape ({named}, ...); they would be random"
        )
    loaded: PreTrainedModel = model
    _check_layers_are_all_read(loaded, loading["unexpected_keys"], identity.name)
    return loaded


def _check_layers_are_all_read(model: PreTrainedModel, unread: Iterable[str], name: str) -> None:
    # A head that is not loaded is no loss; a further copy of a loaded part is a layer that the config leaves out.
    def generalize(key: str) -> str:
        return re.sub(r"\.\d+\.", ".#.", key.removeprefix(f"{model.base_model_prefix}."))

    parts = {generalize(key) for key in model.state_dict()}
    layers = sorted(key for key in unread if "#" in generalize(key) and generalize(key) in parts)
    if layers:
        raise UnsupportedModelError(
            f"{name}: its weights have more layers than its config.json names ({layers[0]}, ...); mend the config"
        )


def _choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.ones(1, device=chosen).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidRecipeError(f"device {device!r} is not here: {str(error).splitlines()[0]}") from None
    return chosen


@torch.inference_mode()
def check_model(model: PreTrainedModel, name: str, tolerance: float) -> tuple[int, Packing]:
    """The number of layers and the packing of a model whose attention can be read.

    Two short texts of random tokens, one padded, go through the model's eager attention and through ours. There must be
    one call a layer, each equal to the eager probabilities' head mean, with rows that sum to 1 and nothing on padding.

    Raises:
        UnsupportedModelError: one of these does not hold; names the model and what was seen.
    """
    config = model.config.get_text_config()
    num_layers = getattr(config, "num_hidden_layers", None)
    if not num_layers:
        raise UnsupportedModelError(f"{name} ({config.model_type}) has no attention layers that its config names")
    input_ids, mask = _make_probe(config, model.device)
    ours: list[Tensor] = []
    try:
        with reading_attention(model, ours.append):
            run_model(model, input_ids, mask)
        eager = model(input_ids=input_ids, attention_mask=mask, output_attentions=True, return_dict=True).attentions
    except Exception as error:  # a model's own code may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedModelError(
            f"{name} ({config.model_type}): a pass over two short texts fails: {reason}"
        ) from error
    if len(ours) != num_layers or eager is None or len(eager) != num_layers:
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) sent {len(ours)} of its {num_layers} layers through a registered attention "
            "function; its attention cannot be read"
        )
    lower = True
    for layer, (mean, probabilities) in enumerate(zip(ours, eager, strict=True)):
        difference = max(
            float((mean[row, :length, :length] - probabilities[row, :, :length, :length].float().mean(0)).abs().max())
            for row, length in ((0, 6), (1, 4))
        )
        row_error = float((mean[0].sum(-1) - 1).abs().max())
        on_padding = float(mean[1, :4, 4:].abs().max())
        if not (difference <= tolerance and row_error <= tolerance and on_padding == 0):
            raise UnsupportedModelError(
                f"{name} ({config.model_type}), layer {layer}: head-mean attention differs from eager attention by "
                f"{difference:.1e} (allowed {tolerance:.0e}), rows from 1 by {row_error:.1e}, "
                f"and {on_padding:.1e} falls on padding"
            )
        lower = lower and not mean[0].triu(1).any()
    return num_layers, "lower" if lower else "full"


def _make_probe(config: PreTrainedConfig, device: torch.device) -> tuple[Int[Tensor, "2 6"], Int[Tensor, "2 6"]]:
    pad = config.pad_token_id if isinstance(config.pad_token_id, int) and config.pad_token_id >= 0 else 0
    # Some models count positions from padding ids, so a text must not hold one.
    tokens = torch.tensor([token for token in range(min(config.vocab_size, 1000)) if token != pad])
    input_ids = tokens[torch.randint(len(tokens), (2, 6), generator=torch.Generator().manual_seed(0))]
    mask = torch.ones_like(input_ids)
    input_ids[1, 4:], mask[1, 4:] = pad, 0
    return input_ids.to(device), mask.to(device)
