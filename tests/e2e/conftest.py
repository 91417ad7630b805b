"""One served cluster for the tests of a module, of random weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.served_cluster import ServedCluster, served_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    with served_cluster(tmp_path_factory.mktemp("serve"), "--log-level", "warning") as cluster:
        yield cluster
