"""Many requests to each real engine: the ledger of the gateway has exactly what the engines have counted."""

import pytest
from support.real_engines import ENGINES, Deployment
from support.usage_load import compare

REQUESTS = 2500


@pytest.mark.parametrize("engine", ENGINES)
def test_the_sums_of_many_requests_are_the_engines(engine, tmp_path):
    """Of 5 000 requests, half of them to each engine, no token is missing and none counts twice."""
    deployment = Deployment(engine, "chat", tmp_path, max_model_len=512, enforce_eager=True)
    try:
        deployment.wait()
        counted, ledger = compare(deployment, REQUESTS)
    finally:
        deployment.end()
    print(f"{engine}: {REQUESTS} requests, tokens in and out by the engine {counted}, by the ledger {ledger[:2]}")
    assert ledger[:2] == counted
    assert ledger[2:] == [REQUESTS, 0, 0]
