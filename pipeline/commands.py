"""What each command of `ola` does and prints; every function returns its exit code."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.store.catalog import choose_store, survey_datasets
from storage_schema.errors import CorruptedObjectError, InvalidRecipeError
from storage_schema.recipe import parse_maps
from storage_schema.refs import check_tag

if TYPE_CHECKING:
    from pipeline.plan import Plan


def complain(message: str) -> None:
    """Prints one message to the error stream, control characters escaped: names and texts are data."""
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
    print(f"ola: {shown}", file=sys.stderr)  # noqa: T201


def say(text: str) -> None:
    """Prints to the output stream."""
    print(text)  # noqa: T201


def materialize(options: argparse.Namespace) -> int:
    """Makes the versions that the options ask for, or says what making them would cost."""
    from rich.console import Console
    from rich.markup import escape

    from pipeline.plan import find_finished, plan_versions

    maps = parse_maps(options.maps)
    if options.batch_tokens is not None and options.batch_tokens < 1:
        raise InvalidRecipeError(f"--batch-tokens is {options.batch_tokens}; expected 1 or more")
    if options.tag is not None:
        check_tag(options.tag)
    console = Console(stderr=True)
    looking_up = escape(f"looking up {options.model} and {options.corpus} (weights are fetched once)")
    with console.status(looking_up):
        plans = plan_versions(
            options.model,
            options.corpus,
            split=options.split,
            maps=maps,
            max_length=options.max_length,
            limit=options.limit,
            text_unit=options.text_unit,
            text_form=options.text_form,
            dtype=options.dtype,
            store_dtype=options.store_dtype,
            partition_samples=options.partition_samples,
            variant=options.variant,
            seed=options.seed,
            trust_remote_code=options.trust_remote_code,
        )
    store = choose_store(options.store)
    if options.dry_run:
        return _estimate(plans, store, options, find_finished)
    return _run_plans(plans, store, options)


def _run_plans(plans: "list[Plan]", store: str, options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from pipeline.materialize import Materialized, materialize_plans

    results: list[Materialized] = []
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as progress:  # fmt: skip
        tasks: dict[tuple[str, str], Any] = {}

        def report(dataset: str, stage: str, done: int, total: int) -> None:
            if stage == "halve":
                progress.console.print(f"out of memory with {total} texts in a batch; going on with {done}")
                return
            if (dataset, stage) not in tasks:
                text = f"{dataset} waits for another process" if stage == "wait" else f"{dataset} {stage}"
                tasks[dataset, stage] = progress.add_task(text, total=total)
            progress.update(tasks[dataset, stage], completed=done)

        results.extend(
            materialize_plans(
                plans,
                store,
                device=options.device,
                batch_tokens=options.batch_tokens,
                tag=options.tag,
                report=report,
            )
        )
    _print_table(
        ("ref", "samples", "tokens", "bytes", "seconds"),
        [
            (
                str(result.version.ref),
                result.version.manifest.counts.samples,
                result.version.manifest.counts.tokens,
                result.version.manifest.num_bytes,
                f"{result.seconds:.1f}" if result.is_new else "up to date",
            )
            for result in results
        ],
    )
    for result in results:
        _report_losses(result)
    example = results[0].version.ref.dataset
    say(
        "\nRead it:\n"
        "  from pipeline.readers import open_dataset\n"
        f'  ds = open_dataset("{example}", store="{store}")\n'
        "  print(len(ds), ds.maps, ds[0].maps.shape, ds[0].sample.text)"
    )
    return 0


def _report_losses(result: Any) -> None:
    counts = result.version.manifest.counts
    for number, what in (
        (counts.truncated_samples, f"samples cut at {result.version.manifest.recipe.max_length} tokens"),
        (counts.words_without_token, "words left without a token"),
        (counts.skipped_lines, "blank lines skipped"),
        (counts.dropped_words, "words of incomplete last chunks dropped"),
    ):
        if number:
            say(f"{result.version.ref}: {number} {what}")


def _estimate(plans: "list[Plan]", store: str, options: argparse.Namespace, find_finished: Any) -> int:
    from pipeline.estimate import estimate_plan
    from pipeline.store.layout import check_writable

    check_writable(store)
    rows: list[tuple[str | int, ...]] = []
    for plan in plans:
        finished = find_finished(store, plan)
        if finished is not None:
            rows.append((str(finished.ref), "-", "-", "-", "up to date"))
            continue
        cost = estimate_plan(plan, device=options.device, batch_tokens=options.batch_tokens)
        rows.append((str(plan.dataset), cost.samples, cost.tokens, cost.most_bytes, f"{cost.seconds:.0f}"))
    _print_table(("would make", "samples", "tokens", "bytes at most", "seconds"), rows)
    return 0


def list_models(options: argparse.Namespace) -> int:
    """Prints the models of the registry, or, of one model that is named, how its attention is read."""
    from pipeline.ola.registry import MODELS

    if options.model is not None:
        return _list(options, [_describe_model(options.model, options.device)])
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
    return _list(options, rows)


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
    return _list(options, rows)


def list_stored(options: argparse.Namespace) -> int:
    """Prints every finished version of a store."""
    entries, damage = survey_datasets(choose_store(options.store))
    _list(options, [asdict(entry) for entry in entries])
    for error in damage:
        complain(str(error))
    return 1 if damage else 0


def _list(options: argparse.Namespace, rows: list[dict[str, Any]]) -> int:
    if options.json:
        say(json.dumps(rows, indent=1))
    elif not rows:
        say("nothing here yet; `ola materialize --model minilm-l6 --corpus sample` makes something")
    else:
        _print_table(tuple(rows[0]), [tuple(map(_join, row.values())) for row in rows])
    return 0


def _join(cell: Any) -> Any:
    return ",".join(map(str, cell)) if isinstance(cell, tuple) else cell


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
    _print_table(
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


def _print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(f"{cell:,}" if type(cell) is int else escape(str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
