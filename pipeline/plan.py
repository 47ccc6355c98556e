"""What is to be made: settings to recipes, samples and refs, and whether the store has it already."""

from dataclasses import dataclass
from pathlib import Path

from pipeline.corpora.registry import open_corpus
from pipeline.corpora.units import SampleSet, read_samples
from pipeline.ola.identity import ModelIdentity, identify_model
from pipeline.store.layout import is_unclaimed, open_store
from pipeline.store.versions import Version, find_version
from storage_schema.errors import InvalidRecipeError
from storage_schema.recipe import MapName, Recipe, check_maps, check_variant
from storage_schema.refs import Dataset, name_dataset
from storage_schema.samples import Sample


@dataclass(frozen=True)
class Plan:
    """One version to be made: its recipe, and the samples it is made of."""

    dataset: Dataset
    recipe: Recipe
    samples: SampleSet
    model: ModelIdentity
    corpus_licence: str

    @property
    def selected(self) -> list[Sample]:
        """The samples within the recipe's limit."""
        return self.samples.samples[: self.recipe.limit]


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
    variant: str | None = None,
    seed: int | None = None,
    trust_remote_code: bool = False,
) -> list[Plan]:
    """The versions that these settings ask for, one a split; runs no LM and touches no store.

    A `variant` without a seed has seed 0.

    Raises:
        BadInputError: whatever is wrong with the model, the corpus or a setting (see `storage_schema.errors`).
    """
    names = check_maps(maps)
    if variant is not None and seed is None:
        seed = 0
    check_variant(variant, seed)
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
                identity.name,
                opened.name,
                name,
                variant=variant,
                seed=seed,
                unit=text_unit,
                form=text_form,
                limit=limit,
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
                variant=variant,
                seed=seed,
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
    if is_unclaimed(store):
        return None
    return find_version(open_store(store), plan.dataset, plan.recipe)
