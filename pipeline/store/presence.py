"""Whether every object of a version is there with its recorded size: what can be known without reading them."""

from pipeline.store.layout import Store
from pipeline.store.objects import raise_unless_damage
from pipeline.store.versions import Version
from storage_schema.errors import CorruptedObjectError, MissingObjectError


def describe_remedy(version: Version) -> str:
    """What to do about a damaged version."""
    return f"`ola verify {version.ref}` lists all damage; `ola repair {version.ref}` mends it"


def check_presence(store: Store, version: Version) -> None:
    """Nothing, where the group's objects and the sample table are all there with the sizes of the manifest.

    Raises:
        MissingObjectError: an object is not there.
        CorruptedObjectError: an object has another size than recorded, or cannot be looked at.
    """
    manifest = version.manifest
    group = store.group_key(manifest.dataset, manifest.recipe.fingerprint)
    try:
        sizes = store.objects.list_sizes(group)
    except OSError as error:
        raise_unless_damage(error)
        raise CorruptedObjectError(
            f"{version.ref}: {error.filename or store.describe(group)} cannot be read: {error.strerror}; "
            f"{describe_remedy(version)}"
        ) from None
    for name, stored in manifest.objects.items():
        _compare_size(version, store.describe(f"{group}/{name}"), sizes.get(name), stored.num_bytes)
    check_size(store, version, manifest.samples_path, manifest.samples.num_bytes)


def check_size(store: Store, version: Version, key: str, expected: int) -> None:
    """Nothing, where the object has `expected` bytes; errors as `check_presence`."""
    place = store.describe(key)
    try:
        size = store.objects.find_size(key)
    except OSError as error:
        raise_unless_damage(error)
        raise CorruptedObjectError(
            f"{version.ref}: object {place} cannot be read: {error.strerror}; {describe_remedy(version)}"
        ) from None
    _compare_size(version, place, size, expected)


def _compare_size(version: Version, place: str, size: int | None, expected: int) -> None:
    if size is None:
        raise MissingObjectError(f"{version.ref}: object {place} is missing; {describe_remedy(version)}")
    if size != expected:
        raise CorruptedObjectError(
            f"{version.ref}: object {place} has {size} bytes, its manifest says {expected}; {describe_remedy(version)}"
        )
