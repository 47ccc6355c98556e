"""What is on disk can be described without an engine, and named without any package at all."""

import subprocess
import sys

import pytest

from tests.conftest import PROJECT

ENGINES = {"torch", "transformers", "zarr", "prefect", "dask", "datasets", "rich", "filelock", "pipeline", "flows"}


def list_imports(modules: str, *options: str) -> set[str]:
    code = f"import sys; sys.path.insert(0, {str(PROJECT)!r}); import {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_the_schema_imports_no_engine():
    modules = ", ".join(f"storage_schema.{path.stem}" for path in (PROJECT / "storage_schema").glob("[!_]*.py"))
    assert modules.count("storage_schema.") >= 6
    assert not list_imports(modules) & ENGINES


@pytest.mark.parametrize("module", ["errors", "recipe", "refs"])
def test_errors_recipe_and_refs_need_the_standard_library_alone(module):
    # -S: no site packages; -I: no environment.
    imported = list_imports(f"storage_schema.{module}", "-I", "-S")
    assert imported - set(sys.stdlib_module_names) <= {"storage_schema", "__main__"}


def test_storing_and_listing_import_no_model_engine():
    imported = list_imports("pipeline.store.catalog, pipeline.cli")
    assert not imported & {"torch", "transformers", "zarr", "prefect"}
