"""`ola ls`, `show`, `verify`, `tag` and `plot`: what a store holds."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from pipeline.commands.terminal import complain, print_rows, print_table, say
from pipeline.store.catalog import choose_store, survey_datasets
from storage_schema.errors import CorruptedObjectError, InvalidRecipeError
from storage_schema.recipe import parse_maps


def list_stored(options: argparse.Namespace) -> int:
    """Prints every finished version of a store."""
    entries, damage = survey_datasets(choose_store(options.store))
    print_rows(options, [asdict(entry) for entry in entries])
    for error in damage:
        complain(str(error))
    return 1 if damage else 0


def show(options: argparse.Namespace) -> int:
    """Prints one version: its recipe, counts, statistics and licences."""
    from pipeline.store.layout import open_store
    from pipeline.store.versions import list_tags, resolve_ref

    store = open_store(choose_store(options.store))
    version = resolve_ref(store, options.ref)
    manifest = version.manifest
    tags, code = "-", 0
    try:
        tags = ", ".join(list_tags(store, version)) or tags
    except CorruptedObjectError as error:
        complain(str(error))
        code = 1
    if options.json:
        say(json.dumps(manifest.to_json(), indent=1, sort_keys=True))
        return code
    print_table(
        (str(version.ref), ""),
        [
            ("fingerprint", manifest.recipe.fingerprint),
            ("tags", tags),
            ("bytes", manifest.num_bytes),
            ("packing", manifest.packing),
            ("layers", manifest.num_layers),
            *((f"recipe: {name}", value) for name, value in manifest.recipe.to_json().items()),
            *((f"count: {name}", value) for name, value in asdict(manifest.counts).items()),
            *(
                (name, f"mean {s.mean:.3g}, std {s.std:.3g}, max {s.max:.3g}")
                for name, s in manifest.statistics.items()
            ),
            ("model licence", manifest.model_licence),
            ("corpus licence", manifest.corpus_licence),
        ],
    )
    return code


def verify(options: argparse.Namespace) -> int:
    """Prints what is wrong with a version; 1 if anything is."""
    from rich.console import Console
    from rich.progress import Progress

    from pipeline.recompute import recompute_samples
    from pipeline.store.layout import open_store
    from pipeline.store.verify import verify_version
    from pipeline.store.versions import resolve_ref

    if options.recompute is not None and options.recompute < 1:
        raise InvalidRecipeError(f"--recompute is {options.recompute}; expected 1 or more")
    store = open_store(choose_store(options.store))
    version = resolve_ref(store, options.ref)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{version.ref} maps", total=None)
        damage = verify_version(store, version, lambda done, total: progress.update(task, completed=done, total=total))
    if options.recompute is not None and not damage:
        damage = recompute_samples(store, version, options.recompute, model=options.model, device=options.device)
    for finding in damage:
        complain(f"{version.ref}: {finding}")
    if not damage:
        num_again = min(options.recompute or 0, version.manifest.counts.samples)
        again = f", {num_again} samples recomputed" if num_again else ""
        say(
            f"{version.ref}: whole ({len(version.manifest.objects)} objects, {version.manifest.num_bytes} bytes{again})"
        )
    return 1 if damage else 0


def tag(options: argparse.Namespace) -> int:
    """Lets a name stand for a version."""
    from pipeline.store.layout import open_store_for_writing
    from pipeline.store.versions import resolve_ref, tag_version

    store = open_store_for_writing(choose_store(options.store))
    version = resolve_ref(store, options.ref)
    tag_version(store, version, options.name)
    say(f"{version.ref.dataset}@{options.name} is {version.ref}")
    return 0


def plot(options: argparse.Namespace) -> int:
    """Draws the maps of one sample."""
    from pipeline.jobs.plot import plot_sample
    from pipeline.readers import open_dataset

    dataset = open_dataset(options.ref, choose_store(options.store), parse_maps(options.maps) if options.maps else None)
    name = "-".join(str(dataset.manifest.dataset).split("/"))
    if options.output and not options.output.parent.is_dir():
        raise InvalidRecipeError(f"there is no folder {options.output.parent} to draw into")
    output = options.output or Path(f"{name}-{options.sample}.png")
    plot_sample(dataset, options.sample, output)
    say(str(output))
    return 0
