"""The machines that serve a model together, by vLLM's arguments."""

import argparse

from ichat.protocol.messages import Group

_ALONE, _RPC_PORT = "127.0.0.1", 29550
"""vLLM's defaults for the address at which the machines of a data-parallel model meet."""


def group_of(args: argparse.Namespace) -> Group | None:
    """Return the group of machines that these arguments describe, or None."""
    nodes = getattr(args, "nnodes", None) or 1
    if nodes > 1:
        return Group(f"{args.master_addr}:{args.master_port} {args.model}", args.node_rank, nodes)
    here = getattr(args, "data_parallel_size_local", None)
    apart = getattr(args, "data_parallel_external_lb", False) or getattr(args, "data_parallel_hybrid_lb", False)
    if not args.headless and (apart or here is None or here >= args.data_parallel_size):
        return None
    meeting = f"{args.data_parallel_address or _ALONE}:{args.data_parallel_rpc_port or _RPC_PORT} {args.model}"
    rank = getattr(args, "data_parallel_start_rank", None)
    return Group(meeting, (rank or 1) if args.headless else 0, args.data_parallel_size)


def follows(args: argparse.Namespace) -> bool:
    """Return whether vLLM serves no requests on this machine."""
    return args.headless or (bool(getattr(args, "node_rank", 0)) and args.data_parallel_size == 1)
