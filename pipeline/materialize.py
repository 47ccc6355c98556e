"""The whole pipeline on one screen: corpus -> tokens -> maps -> store."""

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version as find_library_version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.plan import Plan, find_finished, plan_versions
from pipeline.store.layout import Store, check_writable, open_store, open_store_for_writing
from pipeline.store.presence import check_presence
from pipeline.store.samples import restore_samples
from pipeline.store.versions import Version, find_version, tag_version
from storage_schema.arrays import name_array, plan_partitions
from storage_schema.errors import InvalidRecipeError
from storage_schema.recipe import Recipe
from storage_schema.refs import check_tag

if TYPE_CHECKING:
    from pipeline.extraction import BatchRunner
    from pipeline.ola.load import LoadedModel
    from pipeline.tokens.encode import TokenTable

_RECORDED_LIBRARIES = ("ola-store", "torch", "transformers", "tokenizers", "zarr", "numcodecs", "numpy", "pyarrow")


Reporter: TypeAlias = Callable[[str, str, int, int], None]
"""Hears how far the work is: dataset, stage, samples done, samples in all.

Stages are `wait` (another process does this very work), `tokens`, `maps`, and `halve` (a batch did not fit into memory:
rows that are tried next, of all its rows).
"""


@dataclass(frozen=True)
class Materialized:
    """What became of a plan."""

    version: Version
    is_new: bool
    seconds: float


def materialize(
    model: str,
    corpus: str,
    *,
    store: str | Path,
    device: str = "auto",
    batch_tokens: int | None = None,
    tag: str | None = None,
    report: Reporter = lambda dataset, stage, done, total: None,
    **settings: Any,
) -> list[str]:
    """The refs (`...@vN`) of the versions that the settings ask for, made where they do not exist yet.

    Args:
        settings: those of `plan_versions`.

    Raises:
        BadInputError: before anything is written.
        NonFiniteMapError: an LM gave NaN or infinity; what was finished before stays for the next run.
    """
    plans = plan_versions(model, corpus, **settings)
    done = materialize_plans(plans, store, device=device, batch_tokens=batch_tokens, tag=tag, report=report)
    return [str(result.version.ref) for result in done]


def materialize_plans(
    plans: list[Plan],
    store: str | Path,
    *,
    device: str = "auto",
    batch_tokens: int | None = None,
    tag: str | None = None,
    report: Reporter = lambda dataset, stage, done, total: None,
) -> Iterator[Materialized]:
    """Each plan's version in turn, made unless it exists.

    Whatever can be refused is refused first: all texts are tokenized and the model is loaded, if something is to
    do, before the store is touched.
    """
    if tag is not None:
        check_tag(tag)
    if batch_tokens is not None and batch_tokens < 1:
        raise InvalidRecipeError(f"batch_tokens is {batch_tokens}; expected 1 or more")
    began = time.monotonic()
    finished = {plan.dataset: version for plan in plans if (version := find_finished(store, plan))}
    missing = [plan for plan in plans if plan.dataset not in finished]
    if missing or tag:
        check_writable(store)
    if missing:
        from pipeline.extraction import prepare_plans

        model, tokens = prepare_plans(missing, device, report)
    for plan in plans:
        version, is_new = finished.get(plan.dataset), False
        if version is not None:
            opened = open_store(store)
            restore_samples(opened, version.manifest, plan.samples.samples)
            check_presence(opened, version)
            _sweep_journal(opened, plan.recipe)
        else:
            opened = open_store_for_writing(store)
            version, is_new = _make_version(plan, opened, model, tokens[plan.dataset], batch_tokens, report)
        if tag is not None:
            tag_version(open_store_for_writing(store), version, tag)
        yield Materialized(version, is_new, time.monotonic() - began)
        began = time.monotonic()


def _sweep_journal(store: Store, recipe: Recipe) -> None:
    """Removes what a process left that was killed between publishing its version and removing its journal."""
    if store.has_work(recipe.fingerprint):
        from pipeline.store.ownership import own_work

        with own_work(store, recipe):
            store.remove_journal(recipe.fingerprint)


def _make_version(
    plan: Plan,
    store: Store,
    model: "LoadedModel",
    tokens: "TokenTable",
    batch_tokens: int | None,
    report: Reporter,
) -> tuple[Version, bool]:
    """The plan's version, and whether it was made here (another process may have made it while this one waited)."""
    from pipeline.extraction import BatchRunner, build_index, compute_partition, count_losses
    from pipeline.reuse import PartitionReuse
    from pipeline.store.ownership import own_work
    from pipeline.store.samples import write_samples
    from pipeline.store.writer import VersionWriter

    name, recipe = str(plan.dataset), plan.recipe
    began = datetime.now(UTC)
    num_samples = len(tokens.lengths)
    partitions = plan_partitions(
        tokens.lengths,
        packing=model.packing,
        partition_samples=recipe.partition_samples,
    )
    with own_work(store, recipe, on_wait=lambda: report(name, "wait", 0, num_samples)) as owner:
        finished = find_version(store, plan.dataset, recipe)
        if finished is not None:
            store.remove_journal(recipe.fingerprint)
            return finished, False
        samples_path, samples_object = write_samples(
            store, plan.dataset.corpus, recipe.split, recipe.corpus_sha256, plan.samples.samples
        )
        index = build_index(plan, tokens, partitions, model.packing)
        writer = VersionWriter(
            store, plan.dataset, recipe, partitions, index,
            packing=model.packing, num_layers=model.num_layers, owner=owner,
        )  # fmt: skip
        missing = writer.list_missing()
        progress = _Progress(report, name, num_samples)
        runner = BatchRunner(model, batch_tokens, partial(report, name, "halve"))
        reuse = PartitionReuse(store, plan, tokens, _describe_environment(model, runner))
        progress.advance(num_samples - sum(partition.stop - partition.start for partition in missing))
        for partition in missing:
            cells = reuse.read_partition(partition)
            if absent := tuple(name for name in recipe.maps if name_array(name) not in cells):
                cells |= compute_partition(
                    plan, model, runner, tokens, partition, index["start"], absent, progress.advance
                )
            else:
                progress.advance(partition.stop - partition.start)
            writer.write_partition(partition, cells)
        version = writer.finish(
            run={
                "ola_run": 1,
                **_describe_times(began),
                **_describe_environment(model, runner),
                "partitions_taken_over": len(partitions) - len(missing),
                "partitions_reused": dict(reuse.counts),
            },
            packing=model.packing,
            num_layers=model.num_layers,
            pad_token_id=tokens.pad_token_id,
            samples_path=samples_path,
            samples=samples_object,
            counts=count_losses(plan, tokens, partitions),
            model_licence=plan.model.licence,
            corpus_licence=plan.corpus_licence,
        )
        return version, True


class _Progress:
    def __init__(self, report: Reporter, dataset: str, total: int) -> None:
        self._report, self._dataset, self._total, self._done = report, dataset, total, 0

    def advance(self, num_samples: int) -> None:
        self._done += num_samples
        self._report(self._dataset, "maps", self._done, self._total)


def _describe_times(began: datetime) -> dict[str, Any]:
    ended = datetime.now(UTC)
    return {
        "began": began.isoformat(timespec="seconds"),
        "ended": ended.isoformat(timespec="seconds"),
        "seconds": round((ended - began).total_seconds(), 3),
        "host": platform.node(),
        "platform": platform.platform(),
    }


def _describe_environment(model: "LoadedModel", runner: "BatchRunner") -> dict[str, Any]:
    """What decides the last bits of a map."""
    import torch

    device = model.model.device
    processor = f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "threads": torch.get_num_threads(),
        "attention": model.access.path,
        "batch_tokens": runner.batch_tokens,
        "batch_halvings": runner.num_halvings,
        "versions": {
            "python": platform.python_version(),
            **{name: find_library_version(name) for name in _RECORDED_LIBRARIES},
        },
    }
