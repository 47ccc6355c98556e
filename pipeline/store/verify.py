"""Whether a finished version is what was written: digests, row sums, the triangle, the samples."""

from collections.abc import Callable, Iterator

import numpy as np

from pipeline.store.layout import MANIFEST_COPY, Store
from pipeline.store.objects import describe_bytes, raise_unless_damage
from pipeline.store.open import StoredVersion
from pipeline.store.versions import Version
from storage_schema.arrays import count_cells, place_samples, plan_partitions, unpack_map
from storage_schema.errors import DamagedError
from storage_schema.manifest import StoredObject
from storage_schema.samples import compute_content_hash, from_table, split_sample_id

ROW_SUM_TOLERANCE = {"float32": 1e-5, "float16": 2.0**-11}
"""How far a row may be from 1, apart from 2^-25 for each of its cells (float16's smallest step)."""


def verify_version(
    store: Store, version: Version, report: Callable[[int, int], None] = lambda done, total: None
) -> list[str]:
    """What is wrong with a version, one line a finding; empty where it is whole.

    Every object's digest is compared with the manifest, then every map's rows are added up and every index entry and
    sample is checked. Maps are read only where all digests are right.
    """
    damage = [finding for _, _, finding in find_broken(store, version)]
    if damage:
        return damage
    try:
        opened = StoredVersion(store, version)
        return list(_check_index(opened)) or list(_check_maps(opened, report))
    except DamagedError as error:
        return [str(error)]


def find_broken(store: Store, version: Version) -> Iterator[tuple[str, StoredObject, str]]:
    """Each object that is missing or not as recorded: its key in the store, what is recorded, and what was found.

    The manifest's copy beside the arrays counts; `run.json`, of which nothing is recorded, does not.
    """
    manifest = version.manifest
    group = store.group_key(manifest.dataset, manifest.recipe.fingerprint)
    expected = {f"{group}/{name}": stored for name, stored in manifest.objects.items()}
    expected[manifest.samples_path] = manifest.samples
    if manifest.number is not None:
        expected[f"{group}/{MANIFEST_COPY}"] = describe_bytes(manifest.encode())
    for key, stored in expected.items():
        place = store.describe(key)
        try:
            found = describe_bytes(store.objects.read(key))
        except FileNotFoundError:
            yield key, stored, f"{place}: missing"
            continue
        except OSError as error:
            raise_unless_damage(error)
            yield key, stored, f"{place}: cannot be read ({error.strerror})"
            continue
        if found.num_bytes != stored.num_bytes:
            yield key, stored, f"{place}: {found.num_bytes} bytes, the manifest says {stored.num_bytes}"
        elif found.sha256 != stored.sha256:
            sha256 = f"SHA-256 {found.sha256[:16]}..., the manifest says {stored.sha256[:16]}..."
            yield key, stored, f"{place}: {sha256}"


def _check_index(opened: StoredVersion) -> Iterator[str]:
    manifest, index = opened.manifest, opened.index
    samples = from_table(opened.samples_table)
    if (found := compute_content_hash(samples)) != manifest.recipe.corpus_sha256:
        expected = manifest.recipe.corpus_sha256
        yield f"{manifest.samples_path}: content hash {found[:16]}..., the recipe says {expected[:16]}..."
    num_samples, num_tokens = manifest.counts.samples, manifest.counts.tokens
    if len(samples) < num_samples or len(index["length"]) != num_samples or index["length"].sum() != num_tokens:
        yield f"length, sample table: not the manifest's numbers of samples and tokens, {num_samples} and {num_tokens}"
        return
    samples = samples[:num_samples]
    ids = [split_sample_id(sample.sample_id) for sample in samples]
    if ids != list(zip(index["sample_hash"].tolist(), index["sample_repetition"].tolist(), strict=True)):
        yield "sample_hash, sample_repetition: not the ids of the sample table"
    planned = plan_partitions(
        index["length"],
        packing=manifest.packing,
        partition_samples=manifest.recipe.partition_samples,
    )
    for name, expected_values in zip(
        ("partition", "start"), place_samples(index["length"], planned, manifest.packing), strict=True
    ):
        if not np.array_equal(index[name], expected_values):
            yield f"{name}: not where the lengths put the samples"
    words = np.repeat([len(sample.words) for sample in samples], index["length"])
    if (index["word_ids"] >= words).any() or (index["word_ids"] < -1).any():
        yield "word_ids: a token belongs to a word that its sample does not have"
    texts = np.repeat([len(sample.text) for sample in samples], index["length"])
    starts, stops = index["offsets"].T
    if (starts < 0).any() or (starts > stops).any() or (stops > texts).any():
        yield "offsets: a token lies outside its text"


def _check_maps(opened: StoredVersion, report: Callable[[int, int], None]) -> Iterator[str]:
    manifest, index = opened.manifest, opened.index
    packing, tolerance = manifest.packing, ROW_SUM_TOLERANCE[manifest.recipe.store_dtype]
    members: dict[int, list[int]] = {}
    for sample, partition in enumerate(index["partition"].tolist()):
        members.setdefault(partition, []).append(sample)
    done, total = 0, len(manifest.recipe.maps) * len(index["length"])
    for name in manifest.recipe.maps:
        for partition, samples in members.items():
            cells = opened.read_partition(name, partition)
            for sample in samples:
                start, length = int(index["start"][sample]), int(index["length"][sample])
                stop = start + count_cells(length, packing)
                values = unpack_map(cells[start:stop].astype(np.float32), length, packing)
                sums = values.sum(axis=1, dtype=np.float64)
                allowed = tolerance + length * 2.0**-25
                worst = float(np.abs(sums - 1).max())
                if not (worst <= allowed and values.min() >= 0):
                    yield (
                        f"map {name} of sample {sample} (partition {partition}): a row sums to 1 {worst:+.1e} "
                        f"(allowed {allowed:.1e}), smallest value {values.min():.1e}"
                    )
                if packing == "lower" and not abs(values[0, 0] - 1) <= allowed:
                    yield f"map {name} of sample {sample}: the first token of a causal map sees more than itself"
            used = max(int(index["start"][s]) + count_cells(int(index["length"][s]), packing) for s in samples)
            if cells[used:].any():
                yield f"map {name}, partition {partition}: values beyond its last sample"
            done += len(samples)
            report(done, total)
