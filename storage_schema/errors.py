"""Every error this project raises on purpose; standard library only.

    OlaError                        exit code 1
    ├── BadInputError               exit code 2: refused before work starts, nothing stored is touched
    │   ├── InvalidNameError        a name that may not stand in a ref, a corpus or a tag
    │   ├── InvalidRecipeError      a setting outside its range (orders, lengths, dtypes, ...)
    │   ├── UnknownModelError       no such model here, in the cache or on the hub
    │   ├── UnsupportedModelError   a model without the attention this project reads
    │   ├── UnknownCorpusError      no such corpus, split or file
    │   ├── CorpusFormatError       a corpus file that breaks its format; names file and line
    │   ├── DatasetNotFoundError    a ref that names nothing in the store
    │   ├── StoreAccessError        a store that is a file, cannot be written, or is no store
    │   └── NewerFormatError        written by a newer release than this one
    ├── DamagedError                stored bytes are not the recorded ones
    │   ├── MissingObjectError
    │   └── CorruptedObjectError
    ├── StoreUnavailableError       an object store cannot be reached, or refuses
    ├── LostOwnershipError          another process has taken this one's work over
    ├── NonFiniteMapError           an LM produced NaN or infinity
    └── TextTooLargeError           one text alone does not fit into memory

A message says the rule, the value seen, the value expected, whose it is, and what to do next.
"""


def summarize_error(error: BaseException, most: int = 400) -> str:
    """What a library's error says, on one line of at most `most` characters; its type where it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[: most - 3]}..."


class OlaError(Exception):
    """Base of the tree; `exit_code` is what the command line returns."""

    exit_code = 1


class BadInputError(OlaError):
    exit_code = 2


class InvalidNameError(BadInputError):
    pass


class InvalidRecipeError(BadInputError):
    pass


class UnknownModelError(BadInputError):
    pass


class UnsupportedModelError(BadInputError):
    pass


class UnknownCorpusError(BadInputError):
    pass


class CorpusFormatError(BadInputError):
    pass


class DatasetNotFoundError(BadInputError):
    pass


class StoreAccessError(BadInputError):
    pass


class NewerFormatError(BadInputError):
    pass


class DamagedError(OlaError):
    pass


class MissingObjectError(DamagedError):
    pass


class CorruptedObjectError(DamagedError):
    pass


class StoreUnavailableError(OlaError):
    pass


class LostOwnershipError(OlaError):
    pass


class NonFiniteMapError(OlaError):
    """`row` is the sample's position in its batch, `layer` the first layer that is not finite."""

    def __init__(self, message: str, row: int, layer: int) -> None:
        super().__init__(message)
        self.row, self.layer = row, layer


class TextTooLargeError(OlaError):
    pass
