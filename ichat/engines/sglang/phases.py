"""The lines that SGLang writes while it loads, by its phases; from SGLang 0.5.5 to 0.5.23, for GPUs and for CPUs."""

from ichat.engines.load_phases import GRAPHS, KV_CACHE, PROCESSES, WARMING, WEIGHTS, LoadLines, mark

_MARKS = (
    mark(PROCESSES, r"server_args=", r"Init (?:parallel|torch distributed) begin"),
    mark(WEIGHTS, r"Load weight begin", r"(?:Loading|loading) \w* ?(?:checkpoint )?shards"),
    mark(KV_CACHE, r"Load weight end"),
    mark(GRAPHS, r"Capture .*[Gg]raph.* begin", r"Capture cpu graph", r"(?:Capturing|Compiling) (?:batch|num tok)"),
    mark(WARMING, r"max_total_num_tokens=\d", r"Engine startup timings", r"Prefill batch"),
)  # fmt: skip
LOAD_LINES = LoadLines("SGLang", _MARKS)
