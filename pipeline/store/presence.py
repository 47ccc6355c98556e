"""Whether every object of a version is there with its recorded size: what can be known without reading them."""

from pathlib import Path

from pipeline.store.folder import StoreFolder
from pipeline.store.versions import Version
from storage_schema.errors import CorruptedObjectError, MissingObjectError


def describe_remedy(version: Version) -> str:
    """What to do about a damaged version."""
    return f"`ola verify {version.ref}` lists all damage; restore it from a copy, or materialize elsewhere"


def check_presence(store: StoreFolder, version: Version) -> None:
    """Nothing, where the group's objects and the sample table are all there with the sizes of the manifest.

    Raises:
        MissingObjectError: an object is not there.
        CorruptedObjectError: an object has another size than recorded, or cannot be looked at.
    """
    manifest = version.manifest
    group = store.dataset_path(manifest.dataset) / manifest.folder
    for name, stored in manifest.objects.items():
        check_size(version, group / name, stored.num_bytes)
    check_size(version, store.path / manifest.samples_path, manifest.samples.num_bytes)


def check_size(version: Version, path: Path, expected: int) -> None:
    """Nothing, where the object at `path` has `expected` bytes; errors as `check_presence`."""
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise MissingObjectError(f"{version.ref}: object {path} is missing; {describe_remedy(version)}") from None
    except OSError as error:
        raise CorruptedObjectError(
            f"{version.ref}: object {path} cannot be read: {error.strerror}; {describe_remedy(version)}"
        ) from None
    if size != expected:
        raise CorruptedObjectError(
            f"{version.ref}: object {path} has {size} bytes, its manifest says {expected}; {describe_remedy(version)}"
        )
