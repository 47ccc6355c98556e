"""Names of datasets and versions: `<model>/<corpus>/<split>@<version>`.

A name's part is letters, digits, `.`, `_` and `-`, starts with a letter or digit, and may carry modifiers after `+`
(`smollm2-135m+random.7/ud-ewt+words50/test+first200`). So no name leaves the store's folder.
"""

import re
from dataclasses import dataclass

from storage_schema.errors import InvalidNameError

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_PART = re.compile(rf"{_WORD}(\+{_WORD})*")
_NAME = re.compile(_WORD)
_VERSION_NUMBER = re.compile(r"v([1-9][0-9]*)")
_FINGERPRINT = re.compile(r"[0-9a-f]{8,64}")


def check_name(name: str, what: str) -> str:
    """The name itself, once it may stand in a ref.

    Args:
        what: whose name it is, for the error ("corpus", "tag", ...).

    Raises:
        InvalidNameError: another character than letters, digits, `.`, `_`, `-`, or one of `._-` in front.
    """
    if not _NAME.fullmatch(name):
        raise InvalidNameError(
            f"{what} name {name!r} is not allowed: use letters, digits, '.', '_' and '-', a letter or digit first"
        )
    return name


def check_tag(name: str) -> str:
    """The tag itself, once it cannot be mistaken for another kind of version.

    Raises:
        InvalidNameError: as `check_name`, or the tag is `latest`, reads as `vN`, or reads as a fingerprint.
    """
    check_name(name, "tag")
    if name == "latest" or _VERSION_NUMBER.fullmatch(name) or _FINGERPRINT.fullmatch(name):
        raise InvalidNameError(f"tag {name!r} is not allowed: it reads as a version number, a fingerprint or `latest`")
    return name


@dataclass(frozen=True, order=True)
class Dataset:
    """What a version is a version of."""

    model: str
    corpus: str
    split: str

    def __post_init__(self) -> None:
        for what, part in (("model", self.model), ("corpus", self.corpus), ("split", self.split)):
            if not _PART.fullmatch(part):
                raise InvalidNameError(f"{what} {part!r} is not allowed in a ref: letters, digits, '.', '_', '-', '+'")

    def __str__(self) -> str:
        return f"{self.model}/{self.corpus}/{self.split}"


@dataclass(frozen=True)
class Ref:
    """A dataset and a version: `vN`, a tag, a fingerprint of 8 or more hex digits, or `latest`."""

    dataset: Dataset
    version: str = "latest"

    @property
    def number(self) -> int | None:
        """N of `vN`, else None."""
        match = _VERSION_NUMBER.fullmatch(self.version)
        return int(match[1]) if match else None

    @property
    def is_fingerprint(self) -> bool:
        return _FINGERPRINT.fullmatch(self.version) is not None

    def __str__(self) -> str:
        return f"{self.dataset}@{self.version}"


def parse_ref(text: str) -> Ref:
    """The ref that `text` spells; without `@` the version is `latest`.

    Raises:
        InvalidNameError: not `<model>/<corpus>/<split>[@<version>]`.
    """
    name, at, version = text.partition("@")
    parts = name.split("/")
    if len(parts) != 3 or (at and not _NAME.fullmatch(version)):
        raise InvalidNameError(f"{text!r} is no ref; expected <model>/<corpus>/<split>[@<version>]")
    return Ref(Dataset(*parts), version if at else "latest")


def name_dataset(
    model: str,
    corpus: str,
    split: str,
    *,
    variant: str | None,
    seed: int | None,
    unit: str,
    form: str,
    limit: int | None,
) -> Dataset:
    """The dataset of a recipe: whatever changes what is in it stands as a modifier in its name.

    A hub id's `/` becomes `--`. Modifiers: `+<variant>.<seed>`, `+document` or `+words<N>`, `+joined` (text form
    `words`), `+first<limit>`.
    """
    model_part = model.replace("/", "--") + (f"+{variant}.{seed}" if variant else "")
    corpus_part = corpus
    if unit != "sentence":
        corpus_part += "+" + unit.replace(":", "")
    if form == "words":
        corpus_part += "+joined"
    return Dataset(model_part, corpus_part, split + (f"+first{limit}" if limit is not None else ""))
