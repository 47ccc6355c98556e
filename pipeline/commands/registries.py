"""`ola models` and `ola corpora`: what has a name here."""

import argparse
from typing import Any

from pipeline.commands.terminal import print_rows


def list_models(options: argparse.Namespace) -> int:
    """Prints the models of the registry, or, of one model that is named, how its attention is read."""
    from pipeline.ola.registry import MODELS

    if options.model is not None:
        return print_rows(options, [_describe_model(options.model, options.device)])
    rows = [
        {
            "name": model.name,
            "hub_id": model.hub_id,
            "architecture": model.architecture,
            "path": model.path,
            "weights": ", ".join(model.packaged.packages) if model.packaged else "hub",
            "licence": model.licence,
            "gated": model.gated,
        }
        for model in MODELS.values()
    ]
    return print_rows(options, rows)


def _describe_model(name: str, device: str) -> dict[str, Any]:
    from pipeline.ola.check import TOLERANCE, check_decomposition
    from pipeline.ola.identity import identify_model
    from pipeline.ola.load import load_model
    from storage_schema.errors import UnsupportedModelError

    identity = identify_model(name)
    loaded = load_model(identity, device=device)
    baselines = "alti,irnl,rollout"
    try:
        check_decomposition(loaded.model, identity.name, loaded.access, 10 * TOLERANCE["float32"])
    except UnsupportedModelError:
        baselines = "rollout"
    return {
        "name": identity.name,
        "revision": identity.revision,
        "architecture": loaded.model.config.get_text_config().model_type,
        "path": loaded.access.path,
        "layers": loaded.num_layers,
        "packing": loaded.packing,
        "max_length": identity.max_positions,
        "baselines": baselines,
    }


def list_corpora(options: argparse.Namespace) -> int:
    """Prints the corpora of the registry."""
    from pipeline.corpora.registry import list_corpora

    rows = [
        {
            "name": entry.name,
            "splits": ", ".join(entry.splits),
            "annotations": ", ".join(entry.annotations),
            "licence": entry.licence,
            "source": entry.source,
        }
        for entry in list_corpora()
    ]
    return print_rows(options, rows)
