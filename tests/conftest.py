"""Fixtures shared by all tests: reference data, real packaged models, and tiny random ones built on the spot."""

import json
import os
from pathlib import Path

# Threads that wait by spinning take the core that the awaited one needs: on two cores with four other processes tiny
# models ran a twentieth as fast. Subprocesses inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from jaxtyping import install_import_hook

# Without a GPU, kernels run in Triton's interpreter. Triton looks for this when it is first imported, by any library.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

PROJECT = Path(__file__).resolve().parent.parent

# Shapes and dtypes in signatures hold while tests run; elsewhere they cost nothing. Triton reads the source of its
# kernels, which the hook would have changed.
SHAPED = [
    "storage_schema",
    "pipeline.tokens",
    *(f"pipeline.ola.{file.stem}" for file in (PROJECT / "pipeline/ola").glob("*.py") if file.stem != "kernels"),
    "pipeline.store",
    "pipeline.readers",
    "pipeline.extraction",
]
install_import_hook(SHAPED, "beartype.beartype")

DATA = Path(os.environ.get("OLA_DATA") or PROJECT.parent / "shared" / "data").resolve()
GOLDEN = DATA.parent / "golden"

TINY = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "vocab_size": 300,
    "initializer_range": 0.2,
}
SENTENCES = [
    "The committee that approved the budget did not expect the river to flood.",
    "Yes.",
    "She didn't say who'd borrowed the ladder, but I think it was Tom's brother-in-law.",
]


@pytest.fixture(scope="session")
def corpus_folder():
    """A function from a corpus's folder name to its path; skips by name where it is absent."""

    def find(name: str) -> Path:
        folder = DATA / name
        if not folder.is_dir():
            pytest.skip(f"corpus {name!r} is not in OLA_DATA ({DATA})")
        return folder

    return find


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """The reference maps; skips by name where they are absent."""
    if not GOLDEN.is_dir():
        pytest.skip(f"the golden maps are not beside OLA_DATA ({GOLDEN})")
    return GOLDEN


def train_tokenizer(*, add_special_tokens: bool):
    """A byte-level BPE tokenizer of 300 tokens; with special tokens it surrounds a text by <s> and </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if add_special_tokens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def build_model():
    """A function that writes a tiny random model with its tokenizer into a folder and returns the folder.

    `architecture` is a config's `model_type`; `changes` go over the tiny defaults.
    """
    from transformers import AutoConfig, AutoModel

    def build(folder: Path, architecture: str = "bert", *, add_special_tokens: bool = True, **changes) -> Path:
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            architecture, **{**TINY, "max_position_embeddings": 64, "pad_token_id": 0, **changes}
        )
        AutoModel.from_config(config).save_pretrained(folder)
        train_tokenizer(add_special_tokens=add_special_tokens).save_pretrained(folder)
        return folder

    return build


@pytest.fixture(scope="session")
def tiny_bert(build_model, tmp_path_factory) -> Path:
    """A bidirectional model of 3 layers and 64 positions."""
    return build_model(tmp_path_factory.mktemp("models") / "tiny-bert", "bert")


@pytest.fixture(scope="session")
def tiny_llama(build_model, tmp_path_factory) -> Path:
    """A causal model of 3 layers with grouped key heads, without special tokens."""
    return build_model(
        tmp_path_factory.mktemp("models") / "tiny-llama", "llama", add_special_tokens=False, num_key_value_heads=2
    )


@pytest.fixture(scope="session")
def materialize_text(tmp_path_factory):
    """A function that stores the maps of some texts, one a line, and returns (store, ref)."""
    from pipeline.materialize import materialize

    def run(model: Path | str, texts: list[str], store: Path | None = None, name: str = "lines", **settings):
        folder = tmp_path_factory.mktemp("corpus")
        file = folder / f"{name}.txt"
        file.write_text("\n".join(texts) + "\n", encoding="utf-8")
        store = store or folder / "store"
        (ref,) = materialize(str(model), f"text:{file}", store=store, **settings)
        return store, ref

    return run


@pytest.fixture(scope="session")
def golden_sentences(golden_folder) -> list[str]:
    return json.loads((golden_folder / "sentences.json").read_text(encoding="utf-8"))
