"""Stored maps against the LM that made them, run again."""

import numpy as np

from pipeline.ola.identity import ModelIdentity, identify_model
from pipeline.ola.registry import MODELS
from pipeline.store.layout import Store
from pipeline.store.open import StoredVersion
from pipeline.store.versions import Version
from storage_schema.arrays import count_cells, name_array, unpack_map
from storage_schema.errors import InvalidRecipeError, UnknownModelError
from storage_schema.recipe import Recipe
from storage_schema.samples import from_table

TOLERANCE = 1e-5
"""Largest difference between two runs in float32: batches and machines differ in the last bits."""
_HALF_RELATIVE, _HALF_ABSOLUTE = 2.0**-11, 2.0**-25
_LOW_PRECISION = {"float32": 1.0, "bfloat16": 2000.0, "float16": 500.0}


def recompute_samples(
    store: Store, version: Version, num_samples: int, *, model: str | None = None, device: str = "auto"
) -> list[str]:
    """How stored maps differ from maps computed anew, one line a difference; empty where none does.

    Args:
        num_samples: so many, spread evenly over the version; each runs through the LM alone.
        model: where to load the model from, if it is a local directory; default the name in the recipe.

    Raises:
        InvalidRecipeError: the model found is not the recipe's (another revision or tokenizer), or `num_samples` < 1.
    """
    import torch

    from pipeline.extraction import load_recipe_model
    from pipeline.tokens.encode import encode_samples, load_tokenizer

    recipe = version.manifest.recipe
    if num_samples < 1:
        raise InvalidRecipeError(f"asked to recompute {num_samples} samples; expected 1 or more")
    identity = find_model(recipe, model)
    opened = StoredVersion(store, version)
    count = version.manifest.counts.samples
    chosen = sorted(set(np.linspace(0, count - 1, min(num_samples, count), dtype=int).tolist()))
    samples = from_table(opened.samples_table.take(chosen))
    tokens = encode_samples(
        load_tokenizer(identity.path, identity.name, trust_remote_code=recipe.trust_remote_code),
        samples,
        recipe.max_length,
    )
    loaded = load_recipe_model(identity, recipe, device)
    differences = []
    for row, index in enumerate(chosen):
        first, length = int(tokens.starts[row]), int(tokens.lengths[row])
        where = f"sample {index} ({samples[row].sample_id})"
        stored_first = int(opened.index["length"][:index].sum())
        stored_ids = opened.index["input_ids"][stored_first : stored_first + int(opened.index["length"][index])]
        input_ids = tokens.input_ids[first : first + length]
        if not np.array_equal(stored_ids, input_ids):
            differences.append(f"{where}: its tokens are others now")
            continue
        ids = torch.from_numpy(input_ids.astype(np.int64))[None]
        anew = loaded.compute_maps(ids, torch.ones_like(ids), recipe.maps)[0].cpu().numpy()
        start = int(opened.index["start"][index])
        for column, name in enumerate(recipe.maps):
            row_cells = opened.read_partition(name, int(opened.index["partition"][index]))
            cells = row_cells[start : start + count_cells(length, version.manifest.packing)].astype(np.float32)
            kept = unpack_map(cells, length, version.manifest.packing)
            allowed = np.full_like(kept, TOLERANCE * _LOW_PRECISION[recipe.compute_dtype])
            if recipe.store_dtype == "float16":
                allowed += np.maximum(_HALF_RELATIVE * np.abs(anew[column]), _HALF_ABSOLUTE)
            excess = np.abs(kept - anew[column]) - allowed
            if not excess.max() <= 0:
                worst = float(np.abs(kept - anew[column]).max())
                differences.append(f"{where}, {name_array(name)}: differs by up to {worst:.1e} from the LM's")
    return differences


def find_model(recipe: Recipe, model: str | None = None) -> ModelIdentity:
    """The model that a recipe was run with.

    Args:
        model: where to load it from, if it is a local directory; default the name in the recipe.

    Raises:
        UnknownModelError: there is no such model here.
        InvalidRecipeError: the model found has another revision or tokenizer.
    """
    kind, _, revision = recipe.model_revision.partition(":")
    pinned = f"{recipe.model}@{revision}" if kind == "commit" and recipe.model not in MODELS else recipe.model
    try:
        identity = identify_model(model or pinned, trust_remote_code=recipe.trust_remote_code)
    except UnknownModelError as error:
        raise UnknownModelError(f"{error}; name a local model's directory with --model path/to/model") from None
    for what, found, expected in (
        ("revision", identity.revision, recipe.model_revision),
        ("tokenizer", identity.tokenizer_sha256, recipe.tokenizer_sha256),
    ):
        if found != expected:
            raise InvalidRecipeError(f"{identity.name} has {what} {found}, the version was made with {expected}")
    return identity
