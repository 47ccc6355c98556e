"""`ola materialize`: what it prints while the pipeline runs, and of a dry run."""

import argparse
from typing import TYPE_CHECKING, Any

from pipeline.commands.terminal import print_table, say
from pipeline.store.catalog import choose_store
from storage_schema.errors import InvalidRecipeError
from storage_schema.recipe import parse_maps
from storage_schema.refs import check_tag

if TYPE_CHECKING:
    from pipeline.plan import Plan


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
    print_table(
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
    print_table(("would make", "samples", "tokens", "bytes at most", "seconds"), rows)
    return 0
