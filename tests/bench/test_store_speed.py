"""The store beside other ways to keep the same maps; `OLA_BENCH_SAMPLES=2000 make bench` makes a quick run of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]
PROJECT = Path(__file__).resolve().parents[2]
NUM_SAMPLES = os.environ.get("OLA_BENCH_SAMPLES", "20000")


@pytest.mark.parametrize("model", ["minilm-l6", "smollm2-135m"])
def test_the_store_beside_its_peers(model, corpus_folder):
    arguments = [model, str(corpus_folder("ud-ewt")), NUM_SAMPLES]
    subprocess.run([sys.executable, "-m", "tests.bench.store_speed", *arguments], cwd=PROJECT, check=True)
