"""Make ichat/engines/FLAGS.md: what becomes of every flag that the documents name which iChat was made from.

    python tests/engine/flags_table.py [--check]

Each engine's own parser is asked, in the engine's own environment, so both engines must be installed.
"""

import argparse
import json
import pathlib
import shlex
import subprocess
import sys

import attrs

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from ichat.engines.flags import FlagOutcome  # noqa: E402
from ichat.engines.sglang import flags as sglang_args  # noqa: E402
from ichat.engines.translation import translate  # noqa: E402
from ichat.engines.vllm import flags as vllm_args  # noqa: E402
from ichat.errors import Exit  # noqa: E402
from ichat.security.redact import shown  # noqa: E402

FILE = ROOT / "ichat/engines/FLAGS.md"
TABLES = {"vllm": vllm_args.table(), "sglang": sglang_args.table()}
ALIASES = 6
COUNTS = {"A": 168, "B": 98, "1": 115, "3": 19, "4": 88}
"""How many long flags each document names: A and B are the appendices on SGLang and vLLM, the others are on vLLM."""

# Every flag of appendix A, with a value that it may have; its other names at the end.
SGLANG = """
--model-path m
--tokenizer-path t
--host 127.0.0.1
--port 8000
--nccl-port 29600
--tokenizer-mode auto
--skip-tokenizer-init
--skip-server-warmup
--load-format auto
--model-loader-extra-config '{}'
--trust-remote-code
--dtype bfloat16
--kv-cache-dtype fp8_e5m2
--quantization fp8
--quantization-param-path scales.json
--context-length 4096
--device cuda
--served-model-name a
--chat-template template.jinja
--completion-template c
--is-embedding
--enable-multimodal
--revision main
--impl auto
--mem-fraction-static 0.8
--max-running-requests 64
--max-total-tokens 65536
--chunked-prefill-size 4096
--max-prefill-tokens 8192
--schedule-policy fcfs
--schedule-conservativeness 1.0
--cpu-offload-gb 4
--page-size 16
--hybrid-kvcache-ratio 0.5
--tensor-parallel-size 2
--pipeline-parallel-size 2
--max-micro-batch-size 4
--stream-interval 2
--stream-output
--random-seed 7
--constrained-json-whitespace-pattern '[ ]?'
--watchdog-timeout 300
--dist-timeout 600
--download-dir d
--base-gpu-id 1
--gpu-id-step 2
--sleep-on-idle
--log-level info
--log-level-http warning
--log-requests
--log-requests-level 1
--crash-dump-folder d
--show-time-cost
--enable-metrics
--bucket-time-to-first-token 0.1 1
--bucket-inter-token-latency 0.1 1
--bucket-e2e-request-latency 0.1 1
--collect-tokens-histogram
--kv-events-config '{"publisher": "zmq"}'
--decode-log-interval 40
--enable-request-time-stats-logging
--api-key k
--file-storage-path d
--enable-cache-report
--reasoning-parser qwen3
--tool-call-parser hermes
--data-parallel-size 2
--load-balance-method round_robin
--dist-init-addr 10.0.0.1:29500
--nnodes 2
--node-rank 0
--json-model-override-args '{"max_position_embeddings": 8192}'
--preferred-sampling-params '{"temperature": 0.5}'
--lora-paths a=path
--max-loras-per-batch 4
--lora-backend triton
--attention-backend flashinfer
--sampling-backend pytorch
--grammar-backend xgrammar
--speculative-algorithm EAGLE
--speculative-draft-model-path draft
--speculative-num-steps 3
--speculative-eagle-topk 1
--speculative-num-draft-tokens 4
--speculative-accept-threshold-single 1.0
--speculative-accept-threshold-acc 1.0
--speculative-token-map map.pt
--mm-attention-backend fa3
--expert-parallel-size 2
--enable-ep-moe
--enable-flashinfer-moe
--enable-flashinfer-allreduce-fusion
--enable-deepep-moe
--deepep-mode auto
--ep-num-redundant-experts 8
--ep-dispatch-algorithm static
--init-expert-location trivial
--enable-eplb
--eplb-algorithm auto
--eplb-rebalance-num-iterations 8
--eplb-rebalance-layers-per-chunk 8
--expert-distribution-recorder-mode stat
--expert-distribution-recorder-buffer-size 8
--enable-expert-distribution-metrics
--deepep-config d.json
--moe-dense-tp-size 8
--enable-double-sparsity
--ds-channel-config-path c.json
--ds-heavy-channel-num 32
--ds-heavy-token-num 256
--ds-heavy-channel-type qk
--ds-sparse-decode-threshold 4096
--disable-radix-cache
--cuda-graph-max-bs 32
--cuda-graph-bs 1 2 4
--disable-cuda-graph
--disable-cuda-graph-padding
--enable-profile-cuda-graph
--enable-nccl-nvls
--enable-tokenizer-batch-encode
--disable-outlines-disk-cache
--disable-custom-all-reduce
--enable-mscclpp
--disable-overlap-schedule
--disable-overlap-cg-plan
--enable-mixed-chunk
--enable-dp-attention
--enable-dp-lm-head
--enable-two-batch-overlap
--enable-torch-compile
--torch-compile-max-bs 8
--torchao-config int8dq
--enable-nan-detection
--enable-p2p-check
--triton-attention-reduce-in-fp32
--triton-attention-num-kv-splits 8
--num-continuous-decode-steps 8
--delete-ckpt-after-loading
--enable-memory-saver
--allow-auto-truncate
--enable-custom-logit-processor
--enable-hierarchical-cache
--hicache-ratio 1.0
--hicache-size 8
--hicache-write-policy write_through
--hicache-io-backend kernel
--flashinfer-mla-disable-ragged
--disable-shared-experts-fusion
--disable-chunked-prefix-cache
--disable-fast-image-processor
--enable-return-hidden-states
--enable-triton-kernel-moe
--warmups w
--debug-tensor-dump-output-folder d
--debug-tensor-dump-input-file f
--debug-tensor-dump-inject
--debug-tensor-dump-prefill-only
--disaggregation-mode prefill
--disaggregation-transfer-backend mooncake
--disaggregation-bootstrap-port 8
--disaggregation-decode-tp 1
--disaggregation-decode-dp 1
--disaggregation-prefill-pp 1
--disaggregation-ib-device mlx5_0
--num-reserved-decode-tokens 8
--pdlb-url http://lb
--custom-weight-loader w
--weight-loader-disable-mmap
--model m
--tp-size 2
--pp-size 2
--dp-size 2
--nccl-init-addr 10.0.0.1:29500
--ep-size 2
"""

# Every flag of the documents on vLLM: which of them name it, the flag, and a value that it may have.
VLLM = """
1    --additional-config '{"a": 1}'
B    --allow-credentials
B    --allowed-headers '["*"]'
1    --allowed-local-media-path /media
B    --allowed-methods '["*"]'
B    --allowed-origins '["*"]'
B    --api-key k
B14  --block-size 16
1    --calculate-kv-scales
B    --chat-template template.jinja
B    --chat-template-content-format auto
B14  --code-revision main
14   --collect-detailed-traces all
1    --compilation-config 3
14   --config-format auto
14   --cpu-offload-gb 4
B134 --device cuda
14   --disable-async-output-proc
B134 --disable-custom-all-reduce
B    --disable-fastapi-docs
B    --disable-frontend-multiprocessing
14   --disable-log-requests
B14  --disable-log-stats
14   --disable-logprobs-during-spec-decoding True
1    --disable-mm-preprocessor-cache
14   --disable-sliding-window
B    --disable-uvicorn-access-log
14   --distributed-executor-backend mp
B134 --download-dir d
B134 --dtype bfloat16
B    --enable-auto-tool-choice
B134 --enable-chunked-prefill True
1    --enable-expert-parallel
B    --enable-force-include-usage
B14  --enable-lora
1    --enable-lora-bias
B134 --enable-prefix-caching
B14  --enable-prompt-adapter
B    --enable-prompt-tokens-details
1    --enable-reasoning
B    --enable-request-id-headers
B    --enable-server-load-tracking
1    --enable-sleep-mode
B    --enable-ssl-refresh
B14  --enforce-eager
B14  --fully-sharded-loras
1    --generation-config auto
B134 --gpu-memory-utilization 0.9
14   --guided-decoding-backend xgrammar
1    --hf-config-path c
1    --hf-overrides '{"max_position_embeddings": 8192}'
B    --host 127.0.0.1
14   --ignore-patterns '*.bin'
B    --image-feature-size 576
B    --image-input-shape 1,3,336,336
B    --image-input-type pixel_values
B    --image-token-id 32000
B134 --kv-cache-dtype fp8_e5m2
1    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
14   --limit-mm-per-prompt image=2
B134 --load-format auto
B    --log-config-file log.json
1    --logits-processor-pattern .*
14   --long-lora-scaling-factors 2.0
1    --long-prefill-token-threshold 1024
B14  --lora-dtype auto
B14  --lora-extra-vocab-size 256
B    --lora-modules a=path
B4   --max-context-len-to-capture 8192
B14  --max-cpu-loras 8
B    --max-log-len 100
B14  --max-logprobs 20
1    --max-long-partial-prefills 1
B14  --max-lora-rank 16
B14  --max-loras 4
B134 --max-model-len 32k
B134 --max-num-batched-tokens 8192
1    --max-num-partial-prefills 1
B134 --max-num-seqs 256
B    --max-paddings 256
B14  --max-parallel-loading-workers 2
B14  --max-prompt-adapter-token 8
B14  --max-prompt-adapters 1
14   --max-seq-len-to-capture 8192
B    --middleware m.M
14   --mm-processor-kwargs '{"num_crops": 4}'
B134 --model m
1    --model-impl auto
B14  --model-loader-extra-config '{}'
14   --multi-step-stream-outputs True
B14  --ngram-prompt-lookup-max 4
B14  --ngram-prompt-lookup-min 1
1    --no-enable-prefix-caching
1    --no-use-tqdm-on-load
B14  --num-gpu-blocks-override 1024
B14  --num-lookahead-slots 0
14   --num-scheduler-steps 8
B14  --num-speculative-tokens 5
14   --otlp-traces-endpoint localhost:4317
1    --override-generation-config '{"temperature": 0.5}'
14   --override-neuron-config '{"cast_logits_dtype": "bfloat16"}'
1    --override-pooler-config '{"pooling_type": "mean", "normalize": false}'
B134 --pipeline-parallel-size 2
B    --port 8000
14   --preemption-mode recompute
B    --prompt-adapters a=path
14   --qlora-adapter-name-or-path a
B134 --quantization fp8
B4   --quantization-param-path scales.json
B14  --ray-workers-use-nsight
1    --reasoning-parser qwen3
B    --reorder-layers
B    --response-role assistant
B    --return-tokens-as-token-ids
B14  --revision main
B    --root-path /v1
B14  --rope-scaling '{"type": "dynamic", "factor": 2.0}'
B14  --rope-theta 1000000
1    --scheduler-cls vllm.core.scheduler.Scheduler
B14  --scheduler-delay-factor 0.5
14   --scheduling-policy fcfs
B14  --seed 7
134  --served-model-name a
1    --show-hidden-metrics-for-version 0.7
14   --skip-tokenizer-init
14   --spec-decoding-acceptance-method rejection_sampler
1    --speculative-config '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}'
14   --speculative-disable-by-batch-size 8
B    --speculative-disable-by-sequence_length 2048
14   --speculative-disable-mqa-scorer
14   --speculative-draft-tensor-parallel-size 1
B14  --speculative-max-model-len 2048
B14  --speculative-model draft
14   --speculative-model-quantization fp8
B    --ssl-ca-certs ca.pem
B    --ssl-cert-reqs 0
B    --ssl-certfile cert.pem
B    --ssl-keyfile key.pem
B14  --swap-space 4
1    --task embed
B134 --tensor-parallel-size 2
B134 --tokenizer t
B14  --tokenizer-mode auto
B14  --tokenizer-pool-extra-config '{}'
B14  --tokenizer-pool-size 0
B14  --tokenizer-pool-type ray
B14  --tokenizer-revision main
B    --tool-call-parser hermes
B    --tool-parser-plugin p.py
B134 --trust-remote-code
14   --typical-acceptance-sampler-posterior-alpha 0.3
14   --typical-acceptance-sampler-posterior-threshold 0.09
1    --use-tqdm-on-load
B14  --use-v2-block-manager
B    --uvicorn-log-level info
1    --worker-cls auto
1    --worker-extension-cls w.W
B4   --worker-use-ray
14   -O 3
14   -pp 2
14   -q fp8
14   -spec-draft-tp 1
14   -tp 2
"""

ASK = {
    "vllm": """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
def make():
    class Parser(FlexibleArgumentParser):
        def error(self, message):
            raise ValueError(message)
    return make_arg_parser(Parser())
""",
    "sglang": """
import argparse
from sglang.srt.server_args import ServerArgs
def make():
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise ValueError(message)
    parser = Parser()
    ServerArgs.add_cli_args(parser)
    return parser
""",
}
"""How an engine's parser is made."""

ANSWER = """
import json, sys
parser = make()
actions = [[a.option_strings, a.nargs == 0] for a in parser._actions if a.option_strings]
print("\\n@" + json.dumps(actions), flush=True)
for line in sys.stdin:
    try:
        found = vars(parser.parse_args(json.loads(line)))
        answer = {"values": json.loads(json.dumps(found, default=str))}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print("\\n@" + json.dumps(answer), flush=True)
"""


class Engine:
    """An engine's parser, asked in a process of its own."""

    def __init__(self, name):
        self.name = name
        self.table = TABLES[name]
        python = ROOT / ".engines" / name / "bin/python"
        self._process = subprocess.Popen(
            [python, "-c", ASK[name] + ANSWER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.parser = argparse.ArgumentParser(add_help=False)
        for options, stands_alone in self._read():
            self.parser.add_argument(*options, **({"action": "store_true"} if stands_alone else {}))

    def _read(self):
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise RuntimeError(f"the parser of {self.name} could not be made")

    def parse(self, words):
        """Return what the engine's parser makes of words: its values, or its error."""
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._read()

    def translate(self, words):
        """Return the steps, or the reason why the words are refused."""
        try:
            return translate(words, self.parser, self.table)
        except Exit as exit_:
            return str(exit_)

    def close(self):
        """End the process."""
        self._process.communicate()


@attrs.frozen
class Row:
    """A flag as it would be typed, and where it stands."""

    words: list[str]
    documents: str


def sglang_rows():
    """Return appendix A."""
    return [Row(shlex.split(line), "A") for line in SGLANG.split("\n") if line]


def vllm_rows():
    """Return the documents on vLLM."""
    split = [(line[:5].strip(), line[5:]) for line in VLLM.split("\n") if line]
    return [Row(shlex.split(words), documents) for documents, words in split]


def verdict(engine, words):
    """Return, for one table cell, what an engine makes of a flag."""
    found = engine.translate(words)
    if isinstance(found, str):
        return "refused: " + found.partition(f"{words[0]} ")[2].removeprefix("is refused: ")
    (step,) = found
    assert isinstance(step, FlagOutcome)
    if not step.why:
        return "accepted"
    return f"`{shown(step.passed)}`: {step.why}" if step.passed else f"left out: {step.why}"


def table(rows, engines):
    """Write rows as a table."""
    lines = ["| flag | in | SGLang | vLLM |", "|---|---|---|---|"]
    for row in rows:
        cells = [f"`{shown(row.words)}`", row.documents]
        cells += [verdict(engines[name], row.words) for name in ("sglang", "vllm")]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def counted(rows, engine):
    """Count the verdicts of one engine."""
    kinds = {"accepted": 0, "translated": 0, "left out": 0, "refused": 0}
    for row in rows:
        kind = verdict(engine, row.words).partition(":")[0]
        kinds[kind if kind in kinds else "translated"] += 1
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def text(engines):
    """Write the whole file."""
    ours, theirs = sglang_rows(), vllm_rows()
    parts = [
        "# What becomes of which flag",
        "Made by `python tests/engine/flags_table.py`; `tests/engine/test_flags.py` sees that it is what the engines say.",
        (
            "Each flag was given alone, as it stands here, to a worker of each engine. Where it says `accepted`, the"
            " engine's own parser gets it as it is. What is not there yet for one version of an engine, or not any more,"
            " is decided by that version's parser: the entries hold for flags that it does not know."
        ),
        (
            f"In: A is the reference of SGLang's flags ({COUNTS['A']}, and {ALIASES} other names), B that of vLLM's"
            f" ({COUNTS['B']}); 1 ({COUNTS['1']}), 3 ({COUNTS['3']}) and 4 ({COUNTS['4']}) describe vLLM's flags at"
            f" several times. Those four name {len([r for r in theirs if r.words[0][:2] == '--'])} long flags together."
        ),
        "## SGLang's flags",
        f"A worker with SGLang: {counted(ours, engines['sglang'])}. With vLLM: {counted(ours, engines['vllm'])}.",
        table(ours, engines),
        "## vLLM's flags",
        f"A worker with vLLM: {counted(theirs, engines['vllm'])}. With SGLang: {counted(theirs, engines['sglang'])}.",
        table(theirs, engines),
    ]
    return "\n\n".join(parts) + "\n"


def main():
    """Write the file, or say whether it is what would be written."""
    engines = {name: Engine(name) for name in TABLES}
    made = text(engines)
    for engine in engines.values():
        engine.close()
    if "--check" in sys.argv:
        return (
            0
            if FILE.read_text() == made
            else "ichat/engines/FLAGS.md is not what `python tests/engine/flags_table.py` makes"
        )
    FILE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
