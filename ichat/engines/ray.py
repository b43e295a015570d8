"""A look at the Ray cluster before an engine loads on it."""

# Ray is not there where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import importlib.util
import sys

from ichat.errors import EXIT_UNAVAILABLE, Exit

CONNECT_S = 20
"""How long the cluster may take to answer."""


def check_ray(gpus: int) -> None:
    """See that a Ray cluster can be reached and has so many GPUs. Raises Exit 69 with what to type.

    The connection is left open for the engine, which would make the same: to `RAY_ADDRESS`, or to the cluster that
    runs on this machine.
    """
    if importlib.util.find_spec("ray") is None:
        raise Exit(
            EXIT_UNAVAILABLE,
            f"Ray is not installed for {sys.executable}: install it there (pip install ray), or leave"
            " --distributed-executor-backend out; several machines work without it as well (--nnodes).",
        )
    import ray

    try:
        ray.init(address="auto", logging_level="ERROR", log_to_driver=False, ignore_reinit_error=True)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise Exit(
            EXIT_UNAVAILABLE,
            f"There is no Ray cluster to be reached from here ({reason}): start one with `ray start --head`, join the"
            " other machines to it with `ray start --address HOST:6379`, and set RAY_ADDRESS where it is elsewhere.",
        ) from error
    found = int(ray.cluster_resources().get("GPU", 0))
    if found < gpus:
        raise Exit(
            EXIT_UNAVAILABLE,
            f"The Ray cluster has {found} GPUs, and the model is spread over {gpus}: join more machines, or lower"
            " --tensor-parallel-size or --pipeline-parallel-size.",
        )
