"""One partition's maps: batches of tokens through the model, packed into the cells that are stored.

Axis names: S samples, B batch, M maps, T tokens of one sample.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np
import torch
from jaxtyping import Float, Int, Integer, Shaped
from numpy import ndarray

from pipeline.ola.identity import ModelIdentity
from pipeline.ola.load import LoadedModel, load_model
from pipeline.plan import Plan
from pipeline.tokens.batches import iter_batches
from pipeline.tokens.cache import recall_tokens
from pipeline.tokens.encode import TokenTable, check_vocabulary, encode_samples, load_tokenizer
from storage_schema.arrays import Packing, Partition, name_array, pack_map, place_samples
from storage_schema.errors import InvalidRecipeError, NonFiniteMapError, TextTooLargeError, UnsupportedModelError
from storage_schema.manifest import Counts
from storage_schema.recipe import MapName, Recipe
from storage_schema.refs import Dataset
from storage_schema.samples import split_sample_id

BATCH_TOKENS = {"cpu": 1024, "cuda": 16 * 1024}
"""Padded tokens in a batch, by device: on a CPU about what its caches hold, on a GPU enough to keep it busy."""


class BatchRunner:
    """Runs batches through a model; from the moment one does not fit into memory, in halves."""

    def __init__(
        self,
        model: LoadedModel,
        batch_tokens: int | None = None,
        on_halve: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """Args:
        batch_tokens: padded tokens in a batch; default that of the model's device.
        on_halve: hears, at the first halving only, how many rows of how many are tried next.
        """
        if batch_tokens is not None and batch_tokens < 1:
            raise InvalidRecipeError(f"batch_tokens is {batch_tokens}; expected 1 or more")
        self.batch_tokens = batch_tokens or BATCH_TOKENS.get(model.model.device.type, BATCH_TOKENS["cuda"])
        self.num_halvings = 0
        self._model = model
        self._on_halve = on_halve

    def iter_maps(
        self,
        input_ids: Integer[ndarray, "B T"],
        attention_mask: Integer[ndarray, "B T"],
        maps: tuple[MapName, ...],
        dtype: torch.dtype,
    ) -> Iterator[tuple[int, Shaped[ndarray, "_ M T T"]]]:
        """The maps of a batch, in `dtype`, on the CPU: the first row and the maps of each part, one part if it fits.

        Raises:
            NonFiniteMapError: a layer's attention is not finite; names the batch's row and the layer.
            TextTooLargeError: one row alone does not fit into memory.
        """
        start = 0
        while start < len(input_ids):
            rows = slice(start, start + -(-len(input_ids) // 2**self.num_halvings))
            ids, mask = torch.from_numpy(input_ids[rows]), torch.from_numpy(attention_mask[rows])
            part = None
            try:
                part = self._model.compute_maps(ids, mask, maps).to(dtype).cpu().numpy()
            except NonFiniteMapError as error:
                raise NonFiniteMapError(str(error), start + error.row, error.layer) from None
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
            # Outside the handler, whose traceback keeps every tensor of the pass alive.
            if part is None:
                self._halve(len(ids), len(input_ids), input_ids.shape[1])
            else:
                yield start, part
                start = rows.stop

    def _halve(self, num_tried: int, num_rows: int, num_tokens: int) -> None:
        if num_tried == 1:
            raise TextTooLargeError(
                f"a text of {num_tokens} tokens does not fit into memory, even alone; lower --max-length, ask for "
                "fewer or lower orders, or take a device with more memory. What is finished stays for the next run"
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.num_halvings += 1
        if self.num_halvings == 1:
            self._on_halve(-(-num_tried // 2), num_rows)


def _is_out_of_memory(error: Exception) -> bool:
    # PyTorch's CPU allocator has no error class of its own.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


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
    tokens = tokenize_plans(plans, report)
    model = load_recipe_model(plans[0].model, plans[0].recipe, device)
    highest = max(int(table.input_ids.max()) for table in tokens.values())
    if highest >= model.num_embeddings:
        raise UnsupportedModelError(
            f"the tokenizer of {model.name} gives token id {highest}, "
            f"but the model has {model.num_embeddings} embeddings; are both of the same model?"
        )
    return model, tokens


def tokenize_plans(
    plans: list[Plan], report: Callable[[str, str, int, int], None] = lambda *_: None
) -> dict[Dataset, TokenTable]:
    """The tokens of the samples of plans that share a model, from the cache where they have been made before.

    Args:
        report: hears dataset, stage (`tokens`), samples done and in all.

    Raises:
        UnsupportedModelError: the tokenizer does not load, or knows none of a corpus's words.
        InvalidRecipeError: the maximum length leaves no room beside special tokens.
    """
    identity, trusts_code = plans[0].model, plans[0].recipe.trust_remote_code
    load = cache(partial(load_tokenizer, identity.path, identity.name, trust_remote_code=trusts_code))

    def encode(plan: Plan) -> TokenTable:
        hear = partial(report, str(plan.dataset), "tokens")
        tokens = encode_samples(load(), plan.selected, plan.recipe.max_length, hear)
        check_vocabulary(load(), tokens, identity.name)
        return tokens

    def recall(plan: Plan) -> TokenTable:
        hashes = (identity.revision, identity.tokenizer_sha256)
        tokens = recall_tokens(plan.selected, hashes, plan.recipe.max_length, partial(encode, plan))
        report(str(plan.dataset), "tokens", len(tokens.lengths), len(tokens.lengths))
        return tokens

    make = encode if trusts_code else recall  # code of the repository's own is in no hash of the tokenizer's
    return {plan.dataset: make(plan) for plan in plans}


def load_recipe_model(identity: ModelIdentity, recipe: Recipe, device: str) -> LoadedModel:
    """The model of a recipe, loaded and checked (`load_model`)."""
    return load_model(
        identity,
        maps=recipe.maps,
        variant=recipe.variant,
        seed=recipe.seed,
        compute_dtype=recipe.compute_dtype,
        device=device,
    )


def compute_partition(
    plan: Plan,
    model: LoadedModel,
    runner: BatchRunner,
    tokens: TokenTable,
    partition: Partition,
    starts: Int[ndarray, " S"],
    maps: tuple[MapName, ...],
    advance: Callable[[int], None],
) -> dict[str, Float[ndarray, " cells"]]:
    """A partition's cells of these maps, by array name, in the stored dtype; a map's do not depend on the others.

    Batches are a pure function of the partition's token lengths and the runner's token budget, so that bytes are equal
    from run to run in one environment that has memory enough.

    Raises:
        NonFiniteMapError: a layer's attention is not finite; names sample and layer.
    """
    recipe = plan.recipe
    columns = {name_array(name): np.empty(partition.num_cells, np.dtype(recipe.store_dtype)) for name in maps}
    for indexes, input_ids, mask in iter_batches(
        tokens, partition.start, partition.stop, runner.batch_tokens, model.short_positions
    ):
        if tokens.pad_token_id >= model.num_embeddings:  # a padding token that was added after training
            input_ids[mask == 0] = 0
        try:
            for first, values in runner.iter_maps(input_ids, mask, maps, getattr(torch, recipe.store_dtype)):
                for row, index in enumerate(indexes[first : first + len(values)]):
                    length, start = int(tokens.lengths[index]), int(starts[index])
                    for column, cells in enumerate(columns.values()):
                        packed = pack_map(values[row, column, :length, :length], model.packing)
                        cells[start : start + len(packed)] = packed
        except NonFiniteMapError as error:
            sample = plan.samples.samples[indexes[error.row]].sample_id
            raise NonFiniteMapError(f"{plan.dataset}, sample {sample}: {error}", error.row, error.layer) from None
        advance(len(indexes))
    return columns


def build_index(
    plan: Plan, tokens: TokenTable, partitions: list[Partition], packing: Packing
) -> dict[str, Shaped[ndarray, "..."]]:
    """The arrays of `INDEX_ARRAYS` by name: where each sample lies, who it is, and its tokens."""
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
    """What the manifest counts of a version: its samples, tokens and cells, and what of the texts was left out."""
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
