"""What differs between two versions: their recipes, what was counted, and the maps of the samples that both have."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch

from pipeline.readers.dataset import OlaDataset
from storage_schema.recipe import MapName, sort_maps

Pair: TypeAlias = tuple[Any, Any]
"""The value in the first version and in the second; None where one has none."""


@dataclass(frozen=True)
class MapDifference:
    """How one map differs over the samples that are compared."""

    map: MapName
    samples: int
    equal_samples: int
    """Samples whose maps are the same to the last bit."""
    largest: float
    """Largest absolute difference of two cells."""
    mean: float
    """Mean absolute difference, over all cells of the [query, key] matrices."""


@dataclass(frozen=True)
class Comparison:
    """Everything in which two versions differ; what is equal is left out."""

    first: str
    second: str
    recipe: dict[str, Pair]
    facts: dict[str, Pair]
    """Packing, number of layers, licences."""
    counts: dict[str, Pair]
    statistics: dict[str, Pair]
    """By `<array> <statistic>`, of the arrays that both have."""
    objects: list[str]
    """Objects of other bytes, where the fingerprints are equal; otherwise none are listed."""
    only_in_first: int
    only_in_second: int
    other_tokens: int
    """Samples that both have, but of other tokens: their maps are not compared."""
    maps: list[MapDifference]


def compare_versions(
    first: OlaDataset, second: OlaDataset, report: Callable[[int, int], None] = lambda done, total: None
) -> Comparison:
    """What differs between two versions; maps are compared where both read them.

    Args:
        report: hears samples done and in all.

    Raises:
        MissingObjectError, CorruptedObjectError: an object of one of them is missing, or not the one that was written.
    """
    one, other = first.manifest, second.manifest
    is_same_recipe = first.fingerprint == second.fingerprint
    names = sorted(one.objects.keys() | other.objects.keys()) if is_same_recipe else []
    common_arrays = one.statistics.keys() & other.statistics.keys()
    places = {sample_id: place for place, sample_id in enumerate(second.sample_ids)}
    shared = [(place, places[i]) for place, i in enumerate(first.sample_ids) if i in places]
    num_compared, maps = _compare_maps(first, second, shared, report)
    return Comparison(
        first.ref,
        second.ref,
        recipe=_find_differences(one.recipe.to_json(), other.recipe.to_json()),
        facts=_find_differences(*({name: getattr(m, name) for name in _FACTS} for m in (one, other))),
        counts=_find_differences(asdict(one.counts), asdict(other.counts)),
        statistics=_find_differences(
            *(
                {
                    f"{name} {what}": value
                    for name in common_arrays
                    for what, value in asdict(m.statistics[name]).items()
                }
                for m in (one, other)
            )
        ),
        objects=[name for name in names if one.objects.get(name) != other.objects.get(name)],
        only_in_first=len(first) - len(shared),
        only_in_second=len(second) - len(shared),
        other_tokens=len(shared) - num_compared,
        maps=maps,
    )


_FACTS = ("packing", "num_layers", "model_licence", "corpus_licence")


def _find_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Pair]:
    return {
        key: (one.get(key), other.get(key))
        for key in sorted(one.keys() | other.keys())
        if one.get(key) != other.get(key)
    }


def _compare_maps(
    first: OlaDataset, second: OlaDataset, shared: list[tuple[int, int]], report: Callable[[int, int], None]
) -> tuple[int, list[MapDifference]]:
    """Samples of equal tokens, and how the maps that both read differ over them."""
    common = sort_maps(set(first.maps) & set(second.maps))
    rows = [[dataset.maps.index(name) for name in common] for dataset in (first, second)]
    equal = torch.zeros(len(common), dtype=torch.int64)
    largest = torch.zeros(len(common))
    total = torch.zeros(len(common), dtype=torch.float64)
    num_samples = num_cells = 0
    for done, places in enumerate(shared, start=1):
        one, other = (dataset[place] for dataset, place in zip((first, second), places, strict=True))
        if torch.equal(one.input_ids, other.input_ids):
            difference = (one.maps[rows[0]] - other.maps[rows[1]]).abs().flatten(1)
            num_samples += 1
            num_cells += difference.shape[1]
            most = difference.amax(1)
            equal += most == 0
            largest = torch.maximum(largest, most)
            total += difference.sum(1, dtype=torch.float64)
        report(done, len(shared))
    if not num_samples:
        return 0, []
    return num_samples, [
        MapDifference(name, num_samples, int(equal[k]), float(largest[k]), float(total[k]) / num_cells)
        for k, name in enumerate(common)
    ]
