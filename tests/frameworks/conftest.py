"""The cluster of the frameworks' tests."""

from __future__ import annotations

import pytest

from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import StartCluster


@pytest.fixture(scope="module")
def cluster(start_module_cluster: StartCluster) -> LocalCluster:
    """A cluster with a long detection time, so that no rank counts as frozen on a busy machine."""
    return start_module_cluster(detect_s=20.0)
