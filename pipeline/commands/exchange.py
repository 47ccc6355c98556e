"""`ola diff` and `ola export`: versions beside one another, and elsewhere."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from pipeline.commands.terminal import print_table, say
from pipeline.store.catalog import choose_store


def compare(options: argparse.Namespace) -> int:
    """Prints what differs between two versions: recipes, counts, and the maps of the samples that both have."""
    from rich.console import Console
    from rich.progress import Progress

    from pipeline.compare import Comparison, compare_versions
    from pipeline.readers import open_dataset

    store = choose_store(options.store)
    first = open_dataset(options.first, store)
    second = open_dataset(options.second, options.other_store or store)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("samples", total=None)
        found: Comparison = compare_versions(
            first, second, lambda done, total: progress.update(task, completed=done, total=total)
        )
    if options.json:
        say(json.dumps(asdict(found), indent=1))
        return 0
    pairs = [
        (what, name, *values)
        for what in ("recipe", "facts", "counts", "statistics")
        for name, values in getattr(found, what).items()
    ]
    if pairs:
        print_table(("what", "", found.first, found.second), pairs)
    if not found.recipe:
        others = f"{len(found.objects)} of other bytes: {', '.join(found.objects[:9])}" if found.objects else "the same"
        say(f"one recipe ({first.fingerprint[:16]}); objects: {others}")
    for number, what in (
        (found.only_in_first, f"samples only in {found.first}"),
        (found.only_in_second, f"samples only in {found.second}"),
        (found.other_tokens, "samples of other tokens, whose maps are not compared"),
    ):
        if number:
            say(f"{number} {what}")
    if found.maps:
        print_table(
            ("map", "samples compared", "equal to the bit", "largest difference", "mean difference"),
            [(m.map, m.samples, m.equal_samples, f"{m.largest:.2e}", f"{m.mean:.2e}") for m in found.maps],
        )
    return 0


def export(options: argparse.Namespace) -> int:
    """Writes one version into a new folder, as a store of its own."""
    from pipeline.store.export import export_version
    from pipeline.store.layout import open_store
    from pipeline.store.versions import resolve_ref

    store = open_store(choose_store(options.store))
    version = resolve_ref(store, options.ref)
    folder = Path(options.folder).expanduser()
    num_bytes = export_version(store, version, folder)
    say(f"exported {version.ref}: {num_bytes} bytes; read it with --store {folder}")
    manifest = version.manifest
    say(f"licences: model {manifest.model_licence}; corpus {manifest.corpus_licence}")
    return 0
