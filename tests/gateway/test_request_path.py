"""How many modules one streaming request passes through, and how often it goes from one to another."""

import json

import pytest
import trio.testing
from support.exposition import heartbeat
from support.peers import SSE_END, SSE_HEAD, event, post_of
from support.request_path import RequestPath

ENTRIES_MAX = 118
MODULES_MAX = 44
"""116 entries into 44 modules, and room for two that depend on the time. The numbers only fall."""
SITE = """
[routing]
policy = "prefix_aware"
[[security.keys]]
name = "k"
key_hash = "sha256:2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"
tokens_per_minute = 100000
"""
MESSAGES = [{"role": "user", "content": "How are you? " * 200}]


@pytest.mark.one_process("counts the calls between modules in one process")
async def test_a_stream_passes_through_few_modules(serve, gateway_to, connect):
    """One streaming chat request of a client with a key, to one of two workers, from its head to its record."""

    async def reply(stream, head, body):
        if head.method == b"GET":  # the gateway follows the log of each worker, which is silent here
            await trio.sleep_forever()
        await stream.send_all(SSE_HEAD + event(0))
        await stream.send_all(event(1) + SSE_END)

    port = await gateway_to({}, SITE)
    for name in ("a", "b"):
        _, worker = await serve(reply)
        await heartbeat(connect, port, worker, worker_id=name, heartbeat_interval=3600, usage_reports=True)
    client = await connect(port)
    body = json.dumps({"model": "m", "messages": MESSAGES, "stream": True}).encode()
    request = post_of(body, b"/v1/chat/completions", b"authorization: Bearer key\r\ncontent-type: application/json\r\n")
    for _ in range(2):  # connections are kept, and the caller and the chain are known
        await client.send(request)
        assert (await client.response())[0] == 200
    await trio.testing.wait_all_tasks_blocked()
    with RequestPath() as path:
        await client.send(request)
        assert (await client.response())[0] == 200
        await trio.testing.wait_all_tasks_blocked()
    print(path.text())
    assert len(path.entries) <= ENTRIES_MAX
    assert len(path.modules) <= MODULES_MAX
