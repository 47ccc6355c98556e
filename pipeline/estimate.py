"""What a materialization would cost, without doing it."""

import time
from dataclasses import dataclass

from pipeline.plan import Plan
from storage_schema.arrays import count_cells

_TIMED_BATCHES = 3


@dataclass(frozen=True)
class Estimate:
    """The size of a plan's work."""

    samples: int
    tokens: int
    truncated_samples: int
    most_bytes: int
    """Bytes of all maps before compression; stored ones are fewer."""
    seconds: float
    """On this device, from a few batches of the real texts."""


def estimate_plan(plan: Plan, *, device: str, batch_tokens: int | None = None) -> Estimate:
    """Samples, tokens, bytes and time of a plan: tokenizes all of it and runs a few batches of the real model.

    Raises:
        BadInputError: what the real run would refuse.
    """
    import numpy as np
    import torch

    from pipeline.extraction import BatchRunner, prepare_plans
    from pipeline.tokens.batches import iter_batches, plan_batches

    recipe = plan.recipe
    model, by_dataset = prepare_plans([plan], device)
    tokens = by_dataset[plan.dataset]
    runner = BatchRunner(model, batch_tokens)
    num_batches = len(plan_batches(tokens.lengths, runner.batch_tokens))
    chosen = set(np.linspace(0, num_batches - 1, min(num_batches, _TIMED_BATCHES + 1), dtype=int).tolist())
    seconds = []
    for position, (_, input_ids, mask) in enumerate(iter_batches(tokens, 0, len(tokens.lengths), runner.batch_tokens)):
        if position in chosen:
            began = time.monotonic()
            list(runner.iter_maps(input_ids, mask, recipe.maps, getattr(torch, recipe.store_dtype)))
            seconds.append(time.monotonic() - began)
    timed = seconds[1:] or seconds  # the first pass also warms up
    cells = sum(count_cells(int(length), model.packing) for length in tokens.lengths)
    return Estimate(
        samples=len(tokens.lengths),
        tokens=int(tokens.lengths.sum()),
        truncated_samples=tokens.num_truncated,
        most_bytes=cells * len(recipe.maps) * np.dtype(recipe.store_dtype).itemsize,
        seconds=num_batches * sum(timed) / len(timed),
    )
