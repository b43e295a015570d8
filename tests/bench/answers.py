"""What the upstream and the engine of the benchmark answer: texts of the size that real engines send.

A request says in its body what it wants: `stream`, the number of `events`, and `gap_s` between two of them.
"""

import json

_SAME = {"id": "chatcmpl-5f2b8c1e9a7d4036", "created": 1_700_000_000, "model": "tiny"}
_CHOICE = {"index": 0, "logprobs": None, "finish_reason": None}

COMPLETION = json.dumps(
    {
        **_SAME,
        "object": "chat.completion",
        "choices": [{**_CHOICE, "message": {"role": "assistant", "content": "word " * 50}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 60, "completion_tokens": 50, "total_tokens": 110},
    }
).encode()
"""The body of a plain answer."""
EVENT = (
    b"data: %b\n\n"
    % json.dumps(
        {**_SAME, "object": "chat.completion.chunk", "choices": [{**_CHOICE, "delta": {"content": " word"}}]}
    ).encode()
)
"""One event of a streamed answer."""
DONE = b"data: [DONE]\n\n"
PLAIN_TYPE = b"application/json"
STREAM_TYPE = b"text/event-stream; charset=utf-8"
