"""Data sets of the Hugging Face hub -> samples, at a resolved revision and without running code of theirs.

Columns that are read (the first that exists with the right type): `text` or `sentence`; `words` or `tokens`; `upos`;
`xpos` or `pos_tags`; `chunks` or `chunk_tags`; `entities` or `ner_tags`; `heads`; `deprels`; `relations`; `label`;
`document_id`. ClassLabel values become their names. Other columns are ignored.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.corpora.records import SplitRecords, make_sample
from storage_schema.errors import CorpusFormatError, UnknownCorpusError
from storage_schema.samples import Sample

COLUMNS = {
    "text": ("text", "sentence"),
    "words": ("words", "tokens"),
    "upos": ("upos",),
    "xpos": ("xpos", "pos_tags"),
    "chunks": ("chunks", "chunk_tags"),
    "entities": ("entities", "ner_tags"),
    "heads": ("heads",),
    "deprels": ("deprels",),
    "relations": ("relations",),
    "label": ("label",),
    "document_id": ("document_id",),
}
SINGLE = ("text", "label", "document_id")
ADDRESS = re.compile(r"([^/:@]+/[^/:@]+)(?:@([0-9a-f]{40}))?(?::([^:@/]+))?")

Decode = Callable[[Any], Any]


def parse_address(address: str) -> tuple[str, str | None, str | None]:
    """Repository, revision and configuration of `ORG/NAME[@40 hex digits][:CONFIG]`.

    Raises:
        UnknownCorpusError: the address has another form.
    """
    match = ADDRESS.fullmatch(address)
    if not match:
        raise UnknownCorpusError(f"hf:{address}: expected hf:ORG/NAME[@REVISION][:CONFIG], REVISION a full commit hash")
    return match[1], match[2], match[3]


def load_hub_dataset(repository: str, revision: str | None, config: str | None) -> tuple[dict[str, Any], str]:
    """The splits of a hub data set by name, and its licence; without a revision, the newest one is resolved first.

    Raises:
        UnknownCorpusError: the hub cannot be reached, knows no such data set, revision or configuration, wants a
            licence accepted, or the data set needs code of its own.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    remedy = f"a local file works without a hub: export it and pass jsonl:FILE instead of hf:{repository}"
    if Path(repository).exists():
        raise UnknownCorpusError(f"hf:{repository}: a local folder of this name would be read instead; start elsewhere")
    try:
        found = HfApi().dataset_info(repository, revision=revision, timeout=20)
    except GatedRepoError as error:
        page = f"https://huggingface.co/datasets/{repository}"
        raise UnknownCorpusError(f"hf:{repository} is gated: accept its licence at {page} and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise UnknownCorpusError(f"hf:{repository} has no revision {revision}; {remedy}") from error
    except RepositoryNotFoundError as error:
        raise UnknownCorpusError(f"the hub knows no data set {repository}, or HF_TOKEN is missing; {remedy}") from error
    except Exception as error:
        reason = f"the hub cannot be reached ({type(error).__name__})"
        raise UnknownCorpusError(f"hf:{repository}: {reason}; check the network, or {remedy}") from error
    licence = getattr(found.card_data, "license", None) or "not stated on the hub"
    return _load_splits(repository, found.sha, config, remedy), str(licence)


def _load_splits(repository: str, revision: str | None, config: str | None, remedy: str) -> dict[str, Any]:
    import datasets

    try:
        return dict(datasets.load_dataset(repository, name=config, revision=revision))
    except ValueError as error:
        reason = str(error).splitlines()[0]
    except Exception as error:
        reason = f"it cannot be loaded without running its code, or the connection broke ({type(error).__name__})"
    raise UnknownCorpusError(f"hf:{repository}: {reason}; {remedy}")


def convert_dataset(dataset: Any, where: str) -> SplitRecords:
    """One sample a row of a `datasets.Dataset`; rows with a blank text, or without words, are skipped and counted.

    Args:
        dataset: one split.
        where: the name that stands before the row's number in errors.

    Raises:
        CorpusFormatError: no column holds texts or words, no row has any, or `make_sample` refuses a row.
    """
    plan = {field: found for field in COLUMNS if (found := _find_column(dataset.features, field))}
    if not plan.keys() & {"text", "words"}:
        names = ", ".join(dataset.features)
        raise CorpusFormatError(
            f"{where} has no column of strings `text`, `sentence`, `words` or `tokens`, only {names}"
        )
    samples: list[Sample] = []
    num_skipped = 0
    for number, row in enumerate(dataset.select_columns([column for column, _ in plan.values()])):
        record = {field: decode(row[column]) for field, (column, decode) in plan.items()}
        content = record.get("words", record.get("text"))
        if not content or not (record.get("text") or "_").strip():
            num_skipped += 1
        else:
            samples.append(make_sample(record, f"{where}, row {number}"))
    if not samples:
        raise CorpusFormatError(f"{where} is empty: it holds no sample")
    return SplitRecords(samples, num_skipped)


def _find_column(features: Any, field: str) -> tuple[str, Decode] | None:
    for column in COLUMNS[field]:
        feature = features.get(column)
        if field in SINGLE:
            decode = _find_decoder(feature)
        elif field == "relations":
            item = _find_item(feature)
            decode = _keep if isinstance(item, dict) and item.keys() == {"first", "second", "label"} else None
        else:
            decode = _find_list_decoder(_find_item(feature), is_integer=field == "heads")
        if decode:
            return column, decode
    return None


def _find_item(feature: Any) -> Any:
    """The feature of a list's items; None where the feature is no list."""
    return feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)


def _keep(value: Any) -> Any:
    return value


def _find_decoder(feature: Any) -> Decode | None:
    """What turns a value into a string: a class into its name (-1: None), a string into itself; else None."""
    if names := getattr(feature, "names", None):
        return lambda value: None if value is None or value < 0 else names[value]
    return _keep if getattr(feature, "dtype", None) in ("string", "large_string") else None


def _find_list_decoder(item: Any, is_integer: bool) -> Decode | None:
    if is_integer:
        dtype = str(getattr(item, "dtype", None))
        return _keep if re.fullmatch(r"u?int\d+", dtype) and not getattr(item, "names", None) else None
    decode = _find_decoder(item)
    if decode is None or decode is _keep:
        return decode
    return lambda values: None if values is None else [decode(value) for value in values]
