"""`ola repair`, `rm` and `gc`: what keeps a store whole and small."""

import argparse
import json
from dataclasses import asdict

from pipeline.commands.terminal import complain, print_table, say
from pipeline.store.catalog import choose_store
from pipeline.store.layout import open_store, open_store_for_writing
from pipeline.store.versions import resolve_ref, restore_manifest
from storage_schema.errors import InvalidNameError
from storage_schema.refs import parse_ref


def repair(options: argparse.Namespace) -> int:
    """Makes damaged objects of a version again and names them; 1 if one is left."""
    from rich.console import Console
    from rich.progress import Progress

    store = open_store_for_writing(choose_store(options.store))
    if restore_manifest(store, parse_ref(options.ref)):
        say(f"{options.ref}: restored its manifest from the copy beside its arrays")
    version = resolve_ref(store, options.ref)

    from pipeline.repair import repair_version

    with Progress(console=Console(stderr=True), transient=True) as progress:
        tasks = {}

        def report(dataset: str, stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(f"{dataset} {stage}", total=total)
            progress.update(tasks[stage], completed=done, total=total)

        done = repair_version(
            store, version, model=options.model, corpus=options.corpus, device=options.device, report=report
        )
    for key in done.rebuilt:
        say(f"{version.ref}: rebuilt {store.describe(key)}")
    for key, reason in done.refused.items():
        complain(f"{version.ref}: {store.describe(key)} is still damaged: {reason}")
    if not done.rebuilt and not done.refused:
        say(f"{version.ref}: every object is as recorded")
    return 1 if done.refused else 0


def remove(options: argparse.Namespace) -> int:
    """Removes one version; its number is never given again."""
    from pipeline.store.removal import remove_version

    if "@" not in options.ref or options.ref.endswith("@latest"):
        raise InvalidNameError(f"{options.ref} names no version for good; say which one to remove, as in DATASET@v3")
    store = open_store_for_writing(choose_store(options.store))
    version = resolve_ref(store, options.ref)
    tags = remove_version(store, version, lambda: complain(f"{version.ref}: waiting for another process's work on it"))
    with_tags = f" with the tags {', '.join(tags)}" if tags else ""
    say(f"removed {version.ref}{with_tags}: {version.manifest.num_bytes} bytes")
    return 0


def collect(options: argparse.Namespace) -> int:
    """Prints what nothing in the store refers to, and with `--apply` removes it."""
    from pipeline.store.removal import collect_garbage

    chosen = choose_store(options.store)
    store = open_store_for_writing(chosen) if options.apply else open_store(chosen)
    survey = collect_garbage(store, unfinished=options.unfinished, apply=options.apply)
    if options.json:
        say(json.dumps({"applied": options.apply, **asdict(survey)}, indent=1))
        return 0
    if survey.garbage:
        print_table(
            ("removed" if options.apply else "would remove", "what", "bytes"),
            [(garbage.key, garbage.what, garbage.bytes) for garbage in survey.garbage],
        )
    else:
        say("nothing that no version refers to")
    for key in survey.unfinished:
        say(f"kept {key}: unfinished; the same `ola materialize` goes on there, `ola gc --unfinished` removes it")
    if survey.garbage and not options.apply:
        say("nothing was removed yet; `ola gc --apply` removes it")
    return 0
