"""An S3-speaking server on loopback, and fresh buckets in it."""

import subprocess
import sys
import urllib.request
from collections.abc import Callable

import pytest

from tests.conftest import PROJECT


@pytest.fixture(scope="session")
def s3_endpoint():
    """The URL of a running server."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.store.s3_server"], stdout=subprocess.PIPE, text=True, cwd=PROJECT
    )
    with process:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


@pytest.fixture(scope="session")
def s3_environment(s3_endpoint) -> dict[str, str]:
    """What makes a process talk to the server."""
    return {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "ANYONE",
        "AWS_SECRET_ACCESS_KEY": "VERY-SECRET-KEY",
        "AWS_SESSION_TOKEN": "VERY-SECRET-TOKEN",
        "AWS_REGION": "us-east-1",
    }


@pytest.fixture(scope="session")
def make_bucket(s3_endpoint) -> Callable[[], str]:
    """A function that makes a new bucket and returns the URL of a prefix in it."""
    numbers = iter(range(1000))

    def make() -> str:
        name = f"bucket-{next(numbers)}"
        urllib.request.urlopen(urllib.request.Request(f"{s3_endpoint}/{name}", method="PUT")).close()
        return f"s3://{name}/some/prefix"

    return make


@pytest.fixture
def bucket(make_bucket, s3_environment, monkeypatch, tmp_path) -> str:
    """The URL of a prefix in a bucket of its own, for this process to use, with a cache of its own."""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OLA_CACHE", str(tmp_path / "cache"))
    return make_bucket()
