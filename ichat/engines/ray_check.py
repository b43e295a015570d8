"""A check of the Ray cluster before an engine loads on it.

If no cluster answers, Ray itself retries for a quarter of an hour. It also kills a connected process a minute after
the cluster's head has ended. So another process checks, and the worker does not connect; engines connect themselves.
"""

# Ray is not there where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import importlib.util
import multiprocessing
import sys
from multiprocessing.connection import Connection

from ichat.errors import EXIT_UNAVAILABLE, Exit

CONNECT_S = 20.0
"""The limit for the cluster's answer, the import of Ray included."""
REASON_CHARS_MAX = 200


def check_ray(gpus: int, within_s: float = CONNECT_S) -> None:
    """Check that a Ray cluster can be reached and has `gpus` GPUs. Raises Exit 69 with what to type.

    It is the cluster at `RAY_ADDRESS`, or the cluster that runs on this machine. Blocks for
    `within_s` at most.
    """
    if importlib.util.find_spec("ray") is None:
        raise Exit(
            EXIT_UNAVAILABLE,
            f"Ray is not installed for {sys.executable}: install it there (pip install ray), or leave"
            " --distributed-executor-backend out; several machines work without it as well (--nnodes).",
        )
    found = _count_gpus(within_s)
    if isinstance(found, str):
        raise Exit(
            EXIT_UNAVAILABLE,
            f"There is no Ray cluster to be reached from here ({found}): start one with `ray start --head`, join the"
            " other machines to it with `ray start --address HOST:6379`, and set RAY_ADDRESS where it is elsewhere.",
        )
    if found < gpus:
        raise Exit(
            EXIT_UNAVAILABLE,
            f"The Ray cluster has {found} GPUs, and the model is spread over {gpus}: join more machines, or lower"
            " --tensor-parallel-size or --pipeline-parallel-size.",
        )


def _count_gpus(within_s: float) -> int | str:
    """Return the number of the cluster's GPUs, or why another process could not count them."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_report_gpus, args=(writer,), name="ray-look", daemon=True)
    process.start()
    writer.close()
    try:
        return reader.recv() if reader.poll(within_s) else f"no answer within {within_s:g} s"
    except EOFError:
        return "Ray ended the process that looked for it; the log has its words"
    finally:
        reader.close()
        process.kill()
        process.join(within_s)


def _report_gpus(writer: Connection) -> None:
    """Send the number of GPUs, or why there is none; runs in a process of its own."""
    try:
        import ray

        ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
        found = int(ray.cluster_resources().get("GPU", 0))
        ray.shutdown()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        writer.send(" ".join(str(error).split())[:REASON_CHARS_MAX] or type(error).__name__)
    else:
        writer.send(found)
