"""A model ready to be read: loaded, set to one device and dtype, and checked against its own eager attention."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModel, PreTrainedModel
from transformers.utils import logging

from pipeline.ola.check import TOLERANCE, check_decomposition, check_model
from pipeline.ola.extract import Access, compute_maps
from pipeline.ola.identity import ModelIdentity
from pipeline.ola.variants import make_variant
from storage_schema.arrays import Packing
from storage_schema.errors import InvalidRecipeError, UnsupportedModelError, summarize_error
from storage_schema.recipe import CONTRIBUTION_BASELINES, MapName


@dataclass(frozen=True)
class LoadedModel:
    """A model whose attention passed the self-check."""

    name: str
    model: PreTrainedModel
    access: Access

    @property
    def num_layers(self) -> int:
        return self.access.num_layers

    @property
    def packing(self) -> Packing:
        """`lower` where no query sees a later key, else `full`."""
        return self.access.packing

    @property
    def num_embeddings(self) -> int:
        """Token ids that the model knows: 0 to one less."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return len(weight)

    @property
    def short_positions(self) -> int | None:
        """See `Access.short_positions`."""
        return self.access.short_positions

    def compute_maps(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"], maps: tuple[MapName, ...]
    ) -> Float[Tensor, "B M T T"]:
        """The maps of a batch, on the CPU or wherever the model lies; see `extract.compute_maps`."""
        device = self.model.device
        return compute_maps(self.model, self.access, input_ids.to(device), attention_mask.to(device), maps)


def load_model(
    identity: ModelIdentity,
    *,
    maps: tuple[MapName, ...] = (),
    variant: str | None = None,
    seed: int | None = None,
    compute_dtype: str = "float32",
    device: str = "auto",
) -> LoadedModel:
    """The model of `identity`, without its language-modeling head, checked.

    Args:
        maps: what it is loaded for; `irnl` and `alti` ask for a check of their own.
        variant: a control in place of the genuine weights (`make_variant`), with its seed.
        compute_dtype: the weights' dtype.
        device: a torch device, or `auto` for the first GPU where there is one, else the CPU.

    Raises:
        UnsupportedModelError: its weights do not load, or its attention is not the one that is read (`check_model`,
            `check_decomposition`).
        InvalidRecipeError: the device does not exist here.
    """
    target = _choose_device(device)
    with _no_progress_bar():
        model = _load(identity, compute_dtype)
        if variant is not None:
            make_variant(model, variant, seed or 0, identity.name)
    torch.nn.Module.to(model, target)
    model.train(False)
    access = check_model(model, identity.name, TOLERANCE[compute_dtype])
    if any(name in CONTRIBUTION_BASELINES for name in maps):
        check_decomposition(model, identity.name, access, 10 * TOLERANCE[compute_dtype])
    return LoadedModel(identity.name, model, access)


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
            ignore_mismatched_sizes=True,  # it says which, and they are refused below
        )
    except Exception as error:  # whatever a damaged file or foreign code raises
        raise UnsupportedModelError(f"{identity.name}: transformers cannot load it: {summarize_error(error)}") from None
    # A pooler reads the last layer and no attention comes after it; any other weight that is missing would be random.
    missing = sorted(key for key in loading["missing_keys"] if "pooler" not in key)
    if missing:
        raise UnsupportedModelError(
            f"{identity.name}: {len(missing)} weights of {type(model).__name__} are not in {identity.path} "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); they would be random"
        )
    if mismatched := sorted(loading["mismatched_keys"]):
        key, stored, expected = mismatched[0]
        raise UnsupportedModelError(
            f"{identity.name}: {len(mismatched)} weights have another shape than config.json says: {key} is "
            f"{tuple(stored)}, expected {tuple(expected)}; mend the config"
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
