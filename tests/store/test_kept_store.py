"""A store written by the first release opens for good."""

import shutil

import numpy as np
import pytest

from pipeline.readers import list_datasets, open_dataset
from pipeline.store.layout import open_store
from pipeline.store.verify import verify_version
from pipeline.store.versions import resolve_ref
from tests.conftest import PROJECT

KEPT = PROJECT / "tests" / "golden" / "store-1"


@pytest.mark.parametrize("version", ["v1", "latest", "first"])
def test_the_first_release_store_still_opens_with_the_same_maps(version):
    expected = np.load(PROJECT / "tests" / "golden" / "kept.npz")
    dataset = open_dataset(f"minilm-l6/kept/all@{version}", KEPT)
    texts = (PROJECT / "tests" / "golden" / "kept.txt").read_text(encoding="utf-8").splitlines()
    assert [item.sample.text for item in dataset] == texts
    assert dataset.maps == (1, 2, "rollout")
    for index, item in enumerate(dataset):
        for name, values in zip(dataset.maps, item.maps.numpy(), strict=True):
            assert np.array_equal(values, expected[f"map_{index}_{name}"])


def test_the_first_release_store_verifies_after_a_copy(tmp_path):
    shutil.copytree(KEPT, tmp_path / "copy")
    store = open_store(tmp_path / "copy")
    (entry,) = list_datasets(tmp_path / "copy")
    assert verify_version(store, resolve_ref(store, entry.ref)) == []
