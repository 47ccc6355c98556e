"""The whole pipeline on one screen: corpus -> tokens -> maps -> store."""

import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version as find_library_version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from pipeline.corpora.registry import open_corpus
from pipeline.corpora.units import SampleSet, read_samples
from pipeline.ola.identity import ModelIdentity, identify_model
from pipeline.store.folder import StoreFolder, check_writable, open_store, open_store_for_writing
from pipeline.store.versions import Version, find_version, tag_version
from storage_schema.arrays import (
    Packing,
    Partition,
    count_partition_cells,
    name_array,
    pack_map,
    place_samples,
    plan_partitions,
)
from storage_schema.errors import InvalidRecipeError, NonFiniteMapError
from storage_schema.manifest import Counts
from storage_schema.recipe import MapName, Recipe, check_maps
from storage_schema.refs import Dataset, check_tag, name_dataset
from storage_schema.samples import split_sample_id

if TYPE_CHECKING:
    from pipeline.ola.load import LoadedModel
    from pipeline.tokens.encode import TokenTable

BATCH_TOKENS = 4096
"""Padded tokens in a batch, by default."""


class Reporter(Protocol):
    """Hears how far the work on a dataset is."""

    def __call__(self, dataset: str, stage: str, done: int, total: int) -> None:
        """`stage` is `wait` (another process does this very work), `tokens` or `maps`; both count samples."""


@dataclass(frozen=True)
class Plan:
    """One version to be made: its recipe, and the samples it is made of."""

    dataset: Dataset
    recipe: Recipe
    samples: SampleSet
    model: ModelIdentity
    corpus_licence: str


@dataclass(frozen=True)
class Materialized:
    """What became of a plan."""

    version: Version
    is_new: bool
    seconds: float


def plan_versions(
    model: str,
    corpus: str,
    *,
    split: str = "all",
    maps: tuple[MapName, ...] = (1, 2, 3),
    max_length: int | None = None,
    limit: int | None = None,
    text_unit: str = "sentence",
    text_form: str = "original",
    dtype: str = "float32",
    store_dtype: str = "float16",
    partition_samples: int = 1024,
    trust_remote_code: bool = False,
) -> list[Plan]:
    """The versions that these settings ask for, one a split; runs no LM and touches no store.

    Raises:
        BadInputError: whatever is wrong with the model, the corpus or a setting (see `storage_schema.errors`).
    """
    names = check_maps(maps)
    opened = open_corpus(corpus)
    splits = opened.splits if split == "all" else (split,)
    sets = [read_samples(opened, name, text_unit, text_form) for name in splits]
    identity = identify_model(model, trust_remote_code=trust_remote_code)
    highest = max((name for name in names if isinstance(name, int)), default=1)
    if highest > identity.num_layers:
        raise InvalidRecipeError(
            f"order {highest} of {identity.name} does not exist: an order multiplies so many different layers, "
            f"and the model has {identity.num_layers}; ask for orders up to {identity.num_layers}"
        )
    return [
        Plan(
            name_dataset(
                identity.name, opened.name, name, variant=None, seed=None, unit=text_unit, form=text_form, limit=limit
            ),
            Recipe(
                model=identity.name,
                model_revision=identity.revision,
                tokenizer_sha256=identity.tokenizer_sha256,
                trust_remote_code=trust_remote_code,
                corpus=opened.name,
                split=name,
                corpus_sha256=samples.content_sha256,
                text_unit=text_unit,
                text_form=text_form,
                limit=limit,
                max_length=identity.resolve_max_length(max_length),
                maps=names,
                compute_dtype=dtype,
                store_dtype=store_dtype,
                partition_samples=partition_samples,
            ),
            samples,
            identity,
            opened.licence,
        )
        for name, samples in zip(splits, sets, strict=True)
    ]


def find_finished(store: str | Path, plan: Plan) -> Version | None:
    """The version that already is of this plan's recipe; reads the store, if there is one, and writes nothing."""
    path = Path(store).expanduser()
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    return find_version(open_store(store), plan.dataset, plan.recipe)


def materialize(
    model: str,
    corpus: str,
    *,
    store: str | Path,
    device: str = "auto",
    batch_tokens: int = BATCH_TOKENS,
    tag: str | None = None,
    report: Reporter = lambda dataset, stage, done, total: None,
    **settings: Any,
) -> list[str]:
    """The refs (`...@vN`) of the versions that the settings ask for, made where they do not exist yet.

    Args:
        settings: those of `plan_versions`.

    Raises:
        BadInputError: before anything is written.
        NonFiniteMapError: an LM gave NaN or infinity; what was finished before stays for the next run.
    """
    plans = plan_versions(model, corpus, **settings)
    done = materialize_plans(plans, store, device=device, batch_tokens=batch_tokens, tag=tag, report=report)
    return [str(result.version.ref) for result in done]


def materialize_plans(
    plans: list[Plan],
    store: str | Path,
    *,
    device: str = "auto",
    batch_tokens: int = BATCH_TOKENS,
    tag: str | None = None,
    report: Reporter = lambda dataset, stage, done, total: None,
) -> Iterator[Materialized]:
    """Each plan's version in turn, made unless it exists; the model is loaded once, and only if something is to do."""
    if tag is not None:
        check_tag(tag)
    if batch_tokens < 1:
        raise InvalidRecipeError(f"batch_tokens is {batch_tokens}; expected 1 or more")
    check_writable(store)
    loaded: LoadedModel | None = None
    for plan in plans:
        began = time.monotonic()
        finished = find_finished(store, plan)
        is_new = finished is None
        if finished is None:
            from pipeline.ola.load import load_model

            loaded = loaded or load_model(plan.model, compute_dtype=plan.recipe.compute_dtype, device=device)
            finished = _make_version(plan, open_store_for_writing(store), loaded, batch_tokens, report)
        folder = open_store(store)
        folder.remove_journal(plan.recipe.fingerprint)
        if tag is not None:
            tag_version(folder, finished, tag)
        yield Materialized(finished, is_new, time.monotonic() - began)


def _make_version(plan: Plan, store: StoreFolder, model: "LoadedModel", batch_tokens: int, report: Reporter) -> Version:
    from pipeline.store.samples import write_samples
    from pipeline.store.writer import VersionWriter, own_work
    from pipeline.tokens.encode import encode_samples, load_tokenizer

    name, recipe = str(plan.dataset), plan.recipe
    began = datetime.now(UTC)
    tokenizer = load_tokenizer(plan.model.path, plan.model.name, trust_remote_code=recipe.trust_remote_code)
    samples = plan.samples.samples[: recipe.limit]
    tokens = encode_samples(
        tokenizer, samples, recipe.max_length, lambda done, total: report(name, "tokens", done, total)
    )
    partitions = plan_partitions(
        tokens.lengths,
        packing=model.packing,
        partition_cells=count_partition_cells(recipe.max_length, model.packing),
        partition_samples=recipe.partition_samples,
    )
    with own_work(store, recipe, on_wait=lambda: report(name, "wait", 0, len(samples))):
        finished = find_version(store, plan.dataset, recipe)
        if finished is not None:
            return finished
        samples_path, samples_object = write_samples(
            store, plan.dataset.corpus, recipe.split, recipe.corpus_sha256, plan.samples.samples
        )
        index = _build_index(plan, tokens, partitions, model.packing)
        writer = VersionWriter(
            store, plan.dataset, recipe, partitions, index, packing=model.packing, num_layers=model.num_layers
        )
        missing = writer.list_missing()
        progress = _Progress(report, name, len(samples))
        progress.advance(len(samples) - sum(partition.stop - partition.start for partition in missing))
        for partition in missing:
            writer.write_partition(
                partition, compute_partition(plan, model, tokens, partition, index["start"], batch_tokens, progress)
            )
        return writer.finish(
            run=_describe_run(model, batch_tokens, began, len(partitions) - len(missing)),
            packing=model.packing,
            num_layers=model.num_layers,
            pad_token_id=tokens.pad_token_id,
            samples_path=samples_path,
            samples=samples_object,
            counts=_count(plan, tokens, partitions),
            model_licence=plan.model.licence,
            corpus_licence=plan.corpus_licence,
        )


class _Progress:
    def __init__(self, report: Reporter, dataset: str, total: int) -> None:
        self._report, self._dataset, self._total, self._done = report, dataset, total, 0

    def advance(self, num_samples: int) -> None:
        self._done += num_samples
        self._report(self._dataset, "maps", self._done, self._total)


def compute_partition(
    plan: Plan,
    model: "LoadedModel",
    tokens: "TokenTable",
    partition: Partition,
    starts: Int[ndarray, " S"],
    batch_tokens: int,
    progress: _Progress,
) -> dict[str, Float[ndarray, " cells"]]:
    """A partition's cells of each map, by array name, in the stored dtype.

    Batches are a pure function of the partition's token lengths and `batch_tokens`, so that bytes are equal from run to
    run in one environment.

    Raises:
        NonFiniteMapError: a layer's attention is not finite; names sample and layer.
    """
    import torch

    from pipeline.tokens.batches import iter_batches

    recipe = plan.recipe
    columns = {name_array(name): np.empty(partition.num_cells, np.dtype(recipe.store_dtype)) for name in recipe.maps}
    for indexes, input_ids, mask in iter_batches(tokens, partition.start, partition.stop, batch_tokens):
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
        progress.advance(len(indexes))
    return columns


def _build_index(
    plan: Plan, tokens: "TokenTable", partitions: list[Partition], packing: Packing
) -> dict[str, np.ndarray[Any, Any]]:
    owner, start = place_samples(tokens.lengths, partitions, packing)
    ids = [split_sample_id(sample.sample_id) for sample in plan.samples.samples[: plan.recipe.limit]]
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


def _count(plan: Plan, tokens: "TokenTable", partitions: list[Partition]) -> Counts:
    samples = plan.samples.samples[: plan.recipe.limit]
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


def _describe_run(model: "LoadedModel", batch_tokens: int, began: datetime, num_resumed: int) -> dict[str, Any]:
    import torch

    ended = datetime.now(UTC)
    device = model.model.device
    return {
        "ola_run": 1,
        "began": began.isoformat(timespec="seconds"),
        "ended": ended.isoformat(timespec="seconds"),
        "seconds": round((ended - began).total_seconds(), 3),
        "host": platform.node(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "batch_tokens": batch_tokens,
        "partitions_taken_over": num_resumed,
        "versions": {
            "python": platform.python_version(),
            **{name: find_library_version(name) for name in _RECORDED_LIBRARIES},
        },
    }


_RECORDED_LIBRARIES = ("ola-store", "torch", "transformers", "tokenizers", "zarr", "numcodecs", "numpy", "pyarrow")
