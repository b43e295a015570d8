"""A look at the Ray cluster before an engine loads on it.

Where nobody answers at an address, Ray itself goes on trying for a quarter of an hour; and it ends a connected process,
without a word of ours, a minute after the cluster's head has gone. So another process looks, and the worker does not
connect: engines do that themselves, where they need it.
"""

# Ray is not there where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import importlib.util
import multiprocessing
import sys
from multiprocessing.connection import Connection

from ichat.errors import EXIT_UNAVAILABLE, Exit

CONNECT_S = 20
"""How long the cluster may take to answer, the import of Ray included."""
REASON_CHARS_MAX = 200


def check_ray(gpus: int) -> None:
    """See that a Ray cluster can be reached and has so many GPUs. Raises Exit 69 with what to type.

    It is the one at `RAY_ADDRESS`, or the one that runs on this machine. Blocks for `CONNECT_S` at most.
    """
    if importlib.util.find_spec("ray") is None:
        raise Exit(
            EXIT_UNAVAILABLE,
            f"Ray is not installed for {sys.executable}: install it there (pip install ray), or leave"
            " --distributed-executor-backend out; several machines work without it as well (--nnodes).",
        )
    found = _look_from_outside()
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


def _look_from_outside() -> int | str:
    """Have another process count the cluster's GPUs; give the reason where it could not."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_look, args=(writer,), name="ray-look", daemon=True)
    process.start()
    writer.close()
    try:
        return reader.recv() if reader.poll(CONNECT_S) else f"nobody answered within {CONNECT_S} s"
    except EOFError:
        return "Ray ended the process that looked for it; the log has its words"
    finally:
        reader.close()
        process.kill()
        process.join(CONNECT_S)


def _look(writer: Connection) -> None:
    """Count the GPUs, in a process of its own."""
    try:
        import ray

        ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
        found = int(ray.cluster_resources().get("GPU", 0))
        ray.shutdown()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        writer.send(" ".join(str(error).split())[:REASON_CHARS_MAX] or type(error).__name__)
    else:
        writer.send(found)
