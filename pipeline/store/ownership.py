"""Who may work where in a store: one process a recipe, and the collector of garbage beside none that begins.

A worker takes its recipe's ownership and then looks for the collector; the collector takes its own and then looks for
workers. So at least one of two that come at once sees the other: the worker waits, the collector leaves its work alone.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from pipeline.store.layout import Store
from pipeline.store.objects import Ownership
from storage_schema.recipe import Recipe

_COLLECTOR = "_work/gc"


def own_work(
    store: Store, recipe: Recipe, on_wait: Callable[[], None] = lambda: None
) -> AbstractContextManager[Ownership]:
    """Within it, this process alone works on this recipe in this store, and no garbage is collected that it may need.

    Another live owner is waited for (`on_wait` is called once); a killed one holds nothing for long.
    """
    return _own_beside_collector(store, store.work_key(recipe.fingerprint), on_wait)


@contextmanager
def _own_beside_collector(store: Store, prefix: str, on_wait: Callable[[], None]) -> Iterator[Ownership]:
    with store.objects.own(prefix, on_wait) as owner:
        if any(name.startswith("gc.") for name in store.objects.list_names("_work")):
            with own_collection(store, on_wait):
                pass
        yield owner


def own_collection(store: Store, on_wait: Callable[[], None] = lambda: None) -> AbstractContextManager[Ownership]:
    """Within it, this process alone collects garbage, and work that begins waits for it."""
    return store.objects.own(_COLLECTOR, on_wait)
