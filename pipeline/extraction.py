"""One partition's maps: batches of tokens through the model, packed into the cells that are stored.

Axis names: S samples, T tokens of one sample.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from numpy import ndarray

from pipeline.ola.load import LoadedModel, load_model
from pipeline.plan import Plan
from pipeline.tokens.batches import iter_batches
from pipeline.tokens.encode import TokenTable, check_vocabulary, encode_samples, load_tokenizer
from storage_schema.arrays import Packing, Partition, name_array, pack_map, place_samples
from storage_schema.errors import NonFiniteMapError, UnsupportedModelError
from storage_schema.manifest import Counts
from storage_schema.refs import Dataset
from storage_schema.samples import split_sample_id


def prepare_plans(
    plans: list[Plan], device: str, report: Callable[[str, str, int, int], None] = lambda *_: None
) -> tuple[LoadedModel, dict[Dataset, TokenTable]]:
    """The model that the plans share, loaded and checked, and the tokens of each plan's samples.

    Args:
        report: hears dataset, stage (`tokens`), samples done and in all.

    Raises:
        UnsupportedModelError: the tokenizer or the model does not load or fails its check, or they do not fit together.
        InvalidRecipeError: the maximum length leaves no room beside special tokens, or the device is not here.
    """
    identity, recipe = plans[0].model, plans[0].recipe
    tokenizer = load_tokenizer(identity.path, identity.name, trust_remote_code=recipe.trust_remote_code)
    tokens = {
        plan.dataset: encode_samples(
            tokenizer, plan.selected, plan.recipe.max_length, partial(report, str(plan.dataset), "tokens")
        )
        for plan in plans
    }
    for table in tokens.values():
        check_vocabulary(tokenizer, table, identity.name)
    model = load_model(identity, compute_dtype=recipe.compute_dtype, device=device)
    highest = max(int(table.input_ids.max()) for table in tokens.values())
    if highest >= model.num_embeddings:
        raise UnsupportedModelError(
            f"the tokenizer of {identity.name} gives token id {highest}, "
            f"but the model has {model.num_embeddings} embeddings; are both of the same model?"
        )
    return model, tokens


def compute_partition(
    plan: Plan,
    model: LoadedModel,
    tokens: TokenTable,
    partition: Partition,
    starts: Int[ndarray, " S"],
    batch_tokens: int,
    advance: Callable[[int], None],
) -> dict[str, Float[ndarray, " cells"]]:
    """A partition's cells of each map, by array name, in the stored dtype.

    Batches are a pure function of the partition's token lengths and `batch_tokens`, so that bytes are equal from run to
    run in one environment.

    Raises:
        NonFiniteMapError: a layer's attention is not finite; names sample and layer.
    """
    recipe = plan.recipe
    columns = {name_array(name): np.empty(partition.num_cells, np.dtype(recipe.store_dtype)) for name in recipe.maps}
    for indexes, input_ids, mask in iter_batches(tokens, partition.start, partition.stop, batch_tokens):
        if tokens.pad_token_id >= model.num_embeddings:  # a padding token that was added after training
            input_ids[mask == 0] = 0
        try:
            maps = model.compute_maps(torch.from_numpy(input_ids), torch.from_numpy(mask), recipe.maps)
        except NonFiniteMapError as error:
            sample = plan.samples.samples[indexes[error.row]].sample_id
            raise NonFiniteMapError(f"{plan.dataset}, sample {sample}: {error}", error.row, error.layer) from None
        values = maps.to(getattr(torch, recipe.store_dtype)).cpu().numpy()
        for row, index in enumerate(indexes):
            length, start = int(tokens.lengths[index]), int(starts[index])
            for column, cells in enumerate(columns.values()):
                packed = pack_map(values[row, column, :length, :length], model.packing)
                cells[start : start + len(packed)] = packed
        advance(len(indexes))
    return columns


def build_index(
    plan: Plan, tokens: TokenTable, partitions: list[Partition], packing: Packing
) -> dict[str, Shaped[ndarray, "..."]]:
    owner, start = place_samples(tokens.lengths, partitions, packing)
    ids = [split_sample_id(sample.sample_id) for sample in plan.selected]
    return {
        "partition": owner,
        "start": start,
        "length": tokens.lengths,
        "sample_hash": np.array([digest for digest, _ in ids], np.uint64),
        "sample_repetition": np.array([repetition for _, repetition in ids], np.int32),
        "input_ids": tokens.input_ids,
        "word_ids": tokens.word_ids,
        "offsets": tokens.offsets,
    }


def count_losses(plan: Plan, tokens: TokenTable, partitions: list[Partition]) -> Counts:
    samples = plan.selected
    return Counts(
        samples=len(samples),
        tokens=int(tokens.lengths.sum()),
        words=sum(len(sample.words) for sample in samples),
        cells=sum(partition.num_cells for partition in partitions),
        partitions=len(partitions),
        truncated_samples=tokens.num_truncated,
        words_without_token=tokens.num_words_without_token,
        skipped_lines=plan.samples.num_skipped_lines,
        dropped_words=plan.samples.num_dropped_words,
    )
