"""The cluster and the slices on which tests of pipelines put four stages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pw
from pw.testing import InProcessCluster
from tests.stages.stage import mesh_on


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    """Two islands of four devices."""
    with InProcessCluster(islands=2, devices_per_island=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def meshes(cluster: InProcessCluster) -> list[pw.Mesh]:
    """Four slices of one device, two on each island."""
    return [mesh_on(stage // 2, devices=1, axis="data") for stage in range(4)]
