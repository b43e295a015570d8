"""The clusters of Ray that tests of several files share."""

import pytest
from support.ray_cluster import RAY, RayCluster

TOKEN = "a-token-of-thirty-two-characters"


@pytest.fixture(scope="session")
def has_ray():
    """Skip where Ray has not been installed."""
    if not RAY.exists():
        pytest.skip("there is no Ray here: ./build test fetches it from the package index")


@pytest.fixture(scope="session")
def cluster(has_ray):
    """A head without GPUs, and two nodes of four GPUs with the labels zone=b and zone=a."""
    with RayCluster(nodes=2, gpus=4) as found:
        yield found


@pytest.fixture(scope="session")
def fragile_cluster(has_ray):
    """A head and a node, which want a token; tests kill its parts."""
    with RayCluster(nodes=1, gpus=1, token=TOKEN) as found:
        yield found
