"""The sample table of a corpus in the store: one Parquet file a content, shared by all models."""

import io

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.store.layout import Store
from pipeline.store.objects import describe_bytes, raise_unless_damage
from storage_schema.errors import CorruptedObjectError, MissingObjectError, NewerFormatError
from storage_schema.manifest import Manifest, StoredObject
from storage_schema.samples import SAMPLE_TABLE_VERSION, Sample, compute_content_hash, from_table, to_table


def write_samples(
    store: Store, corpus: str, split: str, content_sha256: str, samples: list[Sample]
) -> tuple[str, StoredObject]:
    """The table's key in the store and its digest; written only where it is not there yet.

    Args:
        corpus: with its modifiers, as in a ref.

    Raises:
        CorruptedObjectError: a table is there, but does not hold these samples.
    """
    key = store.samples_key(corpus, split, content_sha256)
    if store.objects.find_size(key) is None:
        store.objects.put_if_absent(key, encode_samples_table(samples))
    data, place = store.objects.read(key), store.describe(key)
    if compute_content_hash(from_table(_read_table(data, place))) != content_sha256:
        raise CorruptedObjectError(f"{place} does not hold the samples of {corpus}/{split}; remove it and run again")
    return key, describe_bytes(data)


def restore_samples(store: Store, manifest: Manifest, samples: list[Sample]) -> None:
    """Writes a version's sample table where it is missing, if these samples give the recorded bytes."""
    if store.objects.find_size(manifest.samples_path) is None:
        data = encode_samples_table(samples)
        if describe_bytes(data) == manifest.samples:
            store.objects.put_if_absent(manifest.samples_path, data)


def encode_samples_table(samples: list[Sample]) -> bytes:
    """The table's bytes: Parquet, equal for equal samples under one version of Arrow."""
    buffer = io.BytesIO()
    pq.write_table(to_table(samples), buffer, compression="zstd")
    return buffer.getvalue()


def read_samples_table(store: Store, key: str, expected: StoredObject) -> pa.Table:
    """The sample table of that key, as Arrow.

    Raises:
        MissingObjectError: there is no such object.
        CorruptedObjectError: its digest is not the recorded one, or it is no sample table.
        NewerFormatError: a later release wrote it.
    """
    place = store.describe(key)
    try:
        data = store.objects.localize(key, expected).read_bytes()
    except OSError as error:
        raise_unless_damage(error)
        raise MissingObjectError(
            f"the sample table {place} is missing; `ola repair` makes it again from the corpus"
        ) from None
    if describe_bytes(data) != expected:
        raise CorruptedObjectError(
            f"the sample table {place} is not the one that was written: its SHA-256 differs; `ola repair` makes it "
            "again from the corpus"
        )
    return _read_table(data, place)


def _read_table(data: bytes, where: str) -> pa.Table:
    try:
        table = pq.read_table(io.BytesIO(data))
        version = int((table.schema.metadata or {})[b"ola_sample_table"])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise CorruptedObjectError(f"{where} is not a sample table ({type(error).__name__})") from None
    if version > SAMPLE_TABLE_VERSION:
        raise NewerFormatError(f"{where} has table format {version}, this release reads up to {SAMPLE_TABLE_VERSION}")
    return table
