"""The sample table of a corpus in the store: one Parquet file a content, shared by all models."""

import io

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.store.folder import StoreFolder, hash_bytes, put_if_absent, read_object
from storage_schema.errors import CorruptedObjectError, MissingObjectError, NewerFormatError
from storage_schema.manifest import StoredObject
from storage_schema.samples import SAMPLE_TABLE_VERSION, Sample, compute_content_hash, from_table, to_table


def write_samples(
    store: StoreFolder, corpus: str, split: str, content_sha256: str, samples: list[Sample]
) -> tuple[str, StoredObject]:
    """The table's path in the store and its digest; written only where it is not there yet.

    Args:
        corpus: with its modifiers, as in a ref.

    Raises:
        CorruptedObjectError: a table is there, but does not hold these samples.
    """
    path = store.samples_path(corpus, split, content_sha256)
    if not path.is_file():
        buffer = io.BytesIO()
        pq.write_table(to_table(samples), buffer, compression="zstd")
        put_if_absent(path, buffer.getvalue())
    stored = read_object(path)
    if compute_content_hash(from_table(_read_table(path.read_bytes(), str(path)))) != content_sha256:
        raise CorruptedObjectError(f"{path} does not hold the samples of {corpus}/{split}; remove it and run again")
    return path.relative_to(store.path).as_posix(), stored


def read_samples_table(store: StoreFolder, path: str, expected: StoredObject) -> pa.Table:
    """The sample table at `path` of the store, as Arrow.

    Raises:
        MissingObjectError: there is no such file.
        CorruptedObjectError: its digest is not the recorded one, or it is no sample table.
        NewerFormatError: a later release wrote it.
    """
    file = store.path / path
    try:
        data = file.read_bytes()
    except OSError:
        raise MissingObjectError(f"the sample table {file} is missing; restore it from a copy") from None
    if hash_bytes(data) != expected.sha256:
        raise CorruptedObjectError(
            f"the sample table {file} is not the one that was written: its SHA-256 differs; restore it from a copy"
        )
    return _read_table(data, str(file))


def _read_table(data: bytes, where: str) -> pa.Table:
    try:
        table = pq.read_table(io.BytesIO(data))
        version = int((table.schema.metadata or {})[b"ola_sample_table"])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise CorruptedObjectError(f"{where} is not a sample table ({type(error).__name__})") from None
    if version > SAMPLE_TABLE_VERSION:
        raise NewerFormatError(f"{where} has table format {version}, this release reads up to {SAMPLE_TABLE_VERSION}")
    return table
