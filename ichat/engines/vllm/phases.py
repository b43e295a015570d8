"""The lines that vLLM writes while it loads, by its phases; from vLLM 0.12 to 0.32, for GPUs and for CPUs."""

from ichat.engines.load_phases import COMPILING, GRAPHS, KV_CACHE, PROCESSES, WARMING, WEIGHTS, LoadLines, mark

_MARKS = (
    mark(PROCESSES, r"Using max model len \d", r"Initializing a V1 LLM engine"),
    mark(
        WEIGHTS,
        r"Starting to load model ", r"Loading model from scratch",
        r"Loading (?:\w+ checkpoint shards|safetensors using )", r"Multi-thread loading ",
    ),
    mark("profiling", r"Model loading took [\d.]+ Gi?B"),
    mark(
        COMPILING,
        r"Warming up model for the compilation", r"Starting torch\.compile",
        r"Using cache directory: .* torch\.compile", r"Dynamo bytecode transform time", r"Compiling a graph for ",
    ),
    mark(
        KV_CACHE,
        r"Initial profiling/warmup run took", r"Warming up done", r"Available KV cache memory",
        r"GiB for KV cache on node", r"KV cache size: [\d,]+ tokens",
    ),
    mark(GRAPHS, r"Capturing .*(?:CUDA|cuda) ?graphs?", r"Compile and warming up model for size"),
    mark(WARMING, r"Graph capturing finished in", r"init engine \(profile, create kv cache"),
)  # fmt: skip
LOAD_LINES = LoadLines("vLLM", _MARKS)
