"""Damaged objects of a version made again: the only bytes ever written are the recorded ones."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from pipeline.corpora.registry import open_corpus
from pipeline.corpora.units import SampleSet, read_samples
from pipeline.extraction import BatchRunner, build_index, compute_partition, prepare_plans, tokenize_plans
from pipeline.plan import Plan
from pipeline.recompute import find_model
from pipeline.store.arrays import encode_group
from pipeline.store.layout import MANIFEST_COPY, Store
from pipeline.store.objects import describe_bytes
from pipeline.store.ownership import own_work
from pipeline.store.samples import encode_samples_table, read_samples_table
from pipeline.store.shards import encode_shard
from pipeline.store.verify import find_broken
from pipeline.store.versions import Version, iter_versions
from pipeline.tokens.encode import TokenTable
from storage_schema.arrays import Partition, count_row_cells, name_array, plan_partitions
from storage_schema.errors import InvalidRecipeError, OlaError
from storage_schema.manifest import StoredObject
from storage_schema.samples import from_table

_Pairs = Iterable[tuple[str, bytes]]


@dataclass
class Repair:
    """What became of a version's damaged objects, by their keys in the store."""

    rebuilt: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Why an object could not be made again."""


def repair_version(
    store: Store,
    version: Version,
    *,
    model: str | None = None,
    corpus: str | None = None,
    device: str = "auto",
    report: Callable[[str, str, int, int], None] = lambda *_: None,
) -> Repair:
    """Makes every missing or damaged object of a version again, each only where that gives the recorded bytes.

    Objects of the same digest elsewhere in the store are copied; the sample table comes from the corpus, metadata and
    index from the samples' tokens, shards from the LM in the batches that `run.json` tells of. An LM gives the recorded
    bytes in the environment that made them (device, libraries).

    Args:
        model: where to load the model from, if it is a local directory; default the name in the recipe.
        corpus: the corpus as `open_corpus` takes it, if it is a file; default the name in the recipe.
        report: hears dataset, stage, samples done and in all.
    """
    name = str(version.ref.dataset)
    with own_work(store, version.manifest.recipe, on_wait=lambda: report(name, "wait", 0, 1)):
        broken = {key: stored for key, stored, _ in find_broken(store, version)}
        work, source = _Work(store, broken), _Source(store, version, model, corpus, device, report)
        work.take(_iter_copies(store, broken))
        shards = {key: partition for key, partition in source.partitions_by_shard.items() if key in broken}
        table = version.manifest.samples_path
        work.fill([table], lambda: source.iter_table(table))
        work.fill([key for key in broken if key not in (table, *shards)], source.iter_index)
        work.fill(list(shards), lambda: source.iter_shards(sorted({shards[key] for key in shards if key in broken})))
        return work.repair


class _Work:
    """The damaged objects that are left, and what became of the others."""

    def __init__(self, store: Store, broken: dict[str, StoredObject]) -> None:
        self._store, self._broken, self.repair = store, broken, Repair()

    def take(self, pairs: _Pairs) -> None:
        """Writes what is offered for a damaged object, if its bytes are the recorded ones."""
        for key, data in pairs:
            if self._broken.get(key) == describe_bytes(data):
                self._store.objects.replace(key, data)
                self.repair.rebuilt.append(key)
                del self._broken[key]

    def fill(self, keys: list[str], make: Callable[[], _Pairs]) -> None:
        """Makes those of the keys that are still damaged; what cannot be made is refused with the reason."""
        if not any(key in self._broken for key in keys):
            return
        reason = "what is made here has other bytes than the recorded ones: `run.json` tells where it was made"
        try:
            self.take(make())
        except OlaError as error:
            reason = str(error)
        for key in keys:
            if key in self._broken:
                self.repair.refused[key] = reason


def _iter_copies(store: Store, broken: dict[str, StoredObject]) -> Iterator[tuple[str, bytes]]:
    """Objects of the wanted digests in any version of the store, each for every key that wants it."""
    for read_version in iter_versions(store):
        try:
            version = read_version()
        except OlaError:
            continue
        if version is None:
            continue
        manifest = version.manifest
        group = store.group_key(manifest.dataset, manifest.recipe.fingerprint)
        for name, stored in manifest.objects.items():
            wanting = [key for key, wanted in broken.items() if wanted == stored and key != f"{group}/{name}"]
            if wanting:
                try:
                    data = store.objects.read(f"{group}/{name}")
                except OSError:
                    continue
                yield from ((key, data) for key in wanting)


class _Source:
    """What a version's objects are made from, each thing looked up when it is first needed."""

    def __init__(
        self,
        store: Store,
        version: Version,
        model: str | None,
        corpus: str | None,
        device: str,
        report: Callable[[str, str, int, int], None],
    ) -> None:
        self._store, self._manifest = store, version.manifest
        self._model, self._corpus, self._device, self._report = model, corpus, device, report
        self._group = store.group_key(self._manifest.dataset, self._manifest.recipe.fingerprint)

    @property
    def partitions_by_shard(self) -> dict[str, int]:
        """The number of the partition that each shard holds, by the shard's key."""
        return {
            f"{self._group}/{name_array(name)}/c/{number}/0": number
            for name in self._manifest.recipe.maps
            for number in range(self._manifest.counts.partitions)
        }

    def iter_table(self, key: str) -> _Pairs:
        """The sample table, from the corpus."""
        recipe = self._manifest.recipe
        opened = open_corpus(self._corpus or recipe.corpus)
        samples = read_samples(opened, recipe.split, recipe.text_unit, recipe.text_form)
        if samples.content_sha256 != recipe.corpus_sha256:
            raise InvalidRecipeError(
                f"the corpus {opened.name}/{recipe.split} has other samples now (content hash "
                f"{samples.content_sha256[:16]}..., recorded {recipe.corpus_sha256[:16]}...); name it as it was with "
                "--corpus"
            )
        yield key, encode_samples_table(samples.samples)

    def iter_index(self) -> _Pairs:
        """All metadata and the index, from the tokens, and the copy of the manifest."""
        manifest = self._manifest
        yield f"{self._group}/{MANIFEST_COPY}", manifest.encode()
        partitions = self._plan_partitions(self._tokens)
        index = build_index(self._plan, self._tokens, partitions, manifest.packing)
        objects = encode_group(
            manifest.dataset, manifest.recipe, partitions, index,
            packing=manifest.packing, num_layers=manifest.num_layers,
        )  # fmt: skip
        yield from ((f"{self._group}/{name}", data) for name, data in objects.items())

    def iter_shards(self, numbers: list[int]) -> _Pairs:
        """The shards of these partitions, from the LM."""
        manifest, name = self._manifest, str(self._manifest.dataset)
        loaded, tokens_by_dataset = prepare_plans([self._plan], self._device, self._report)
        tokens = tokens_by_dataset[manifest.dataset]
        partitions = self._plan_partitions(tokens)
        starts = build_index(self._plan, tokens, partitions, manifest.packing)["start"]
        runner = BatchRunner(loaded, self._read_batch_tokens())
        total = sum(partitions[number].stop - partitions[number].start for number in numbers)
        done = 0

        def advance(num_samples: int) -> None:
            nonlocal done
            done += num_samples
            self._report(name, "maps", done, total)

        for number in numbers:
            columns = compute_partition(
                self._plan, loaded, runner, tokens, partitions[number], starts, manifest.recipe.maps, advance
            )
            for array, cells in columns.items():
                yield f"{self._group}/{array}/c/{number}/0", encode_shard(cells, count_row_cells(partitions))

    @cached_property
    def _plan(self) -> Plan:
        manifest = self._manifest
        table = read_samples_table(self._store, manifest.samples_path, manifest.samples)
        samples = SampleSet(from_table(table), manifest.recipe.corpus_sha256, 0, 0)
        identity = find_model(manifest.recipe, self._model)
        return Plan(manifest.dataset, manifest.recipe, samples, identity, manifest.corpus_licence)

    @cached_property
    def _tokens(self) -> TokenTable:
        return tokenize_plans([self._plan])[self._manifest.dataset]

    def _plan_partitions(self, tokens: TokenTable) -> list[Partition]:
        manifest = self._manifest
        partitions = plan_partitions(
            tokens.lengths, packing=manifest.packing, partition_samples=manifest.recipe.partition_samples
        )
        if len(partitions) != manifest.counts.partitions:
            raise InvalidRecipeError(
                f"the tokenizer of {manifest.recipe.model} gives {int(tokens.lengths.sum())} tokens here, "
                f"the manifest says {manifest.counts.tokens}; repair with the library versions in `run.json`"
            )
        return partitions

    def _read_batch_tokens(self) -> int | None:
        try:
            return int(json.loads(self._store.objects.read(f"{self._group}/run.json"))["batch_tokens"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # most runs have their device's default
