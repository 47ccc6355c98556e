"""The code in README.md and FORMAT.md runs as it stands there."""

import re

import numpy as np
import pytest

from pipeline.ola.registry import MODELS
from pipeline.readers import open_dataset
from tests.conftest import PROJECT


def read_code(path: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (PROJECT / path).read_text(encoding="utf-8"), re.S)


@pytest.fixture(params=["tiny_bert", "tiny_llama"])
def stored(request, materialize_text):
    texts = [f"Text number {number} of eight." for number in range(8)]
    store, ref = materialize_text(request.getfixturevalue(request.param), texts)
    return store, ref.partition("@")[0]


def test_ten_lines_of_the_format_page_read_a_map_with_zarr_and_numpy(stored):
    store, dataset = stored
    (code,) = read_code("storage_schema/FORMAT.md")
    assert len(code.strip().splitlines()) == 10
    assert set(re.findall(r"^(?:import|from) (.*)$", code, re.M)) == {"json, pathlib, numpy, zarr"}
    values = {"STORE": str(store)}
    exec(code.replace("minilm-l6/sample/train", dataset), values)
    item = open_dataset(dataset, store)[7]
    assert np.array_equal(values["matrix"], item.maps[0].numpy())
    assert np.array_equal(values["input_ids"], item.input_ids.numpy())


def test_the_readme_reads_a_dataset(stored, monkeypatch):
    store, dataset = stored
    (code,) = read_code("README.md")
    values = {}
    exec(code.replace("minilm-l6/sample/train", dataset).replace('"data/store"', repr(str(store))), values)
    assert values["batch"].maps.shape[1] == 2
    assert values["state"]["epoch"] == 1


def test_the_readme_names_every_command_and_corpus():
    from pipeline.cli import _build_parser
    from pipeline.corpora.registry import list_corpora

    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    for command in _build_parser()._subparsers._group_actions[0].choices:
        assert f"ola {command}" in readme
    for entry in list_corpora():
        assert entry.name in readme
    assert "minilm-l6" in MODELS


def test_links_of_the_documents_lead_somewhere():
    for page in [PROJECT / "README.md", *PROJECT.glob("storage_schema/**/*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
