"""A gateway with a converted file serves what the other program served: names, upstreams, keys and fallbacks."""

import json

from support.converting import converted
from support.peers import plain, post_of

from ichat.config import load as configuration
from ichat.roles import gateway

CLIENT = "sk-0123456789abcdef"
FAILURE = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}"


def recorder(answer):
    """Make an upstream's reply, and the list of the requests that it gets: their model, key and parameters."""
    seen = []

    async def reply(stream, head, body):
        if body:  # a health check has none
            fields, key = json.loads(body), dict(head.headers).get(b"authorization", b"")
            seen.append((fields["model"], key, fields.get("temperature"), fields.get("top_k")))
        await stream.send_all(answer)

    return seen, reply


async def started(nursery, text, **values):
    config = f"[server_settings]\nport = 0\n\n{converted(text.format(**values))}"
    return await nursery.start(gateway.run, configuration.parse(config, "test.toml"))


async def status_of(connect, port, model, key=CLIENT, **fields):
    client = await connect(port)
    body = json.dumps({"model": model, "messages": [], **fields}).encode()
    await client.send(post_of(body, b"/v1/chat/completions", b"authorization: Bearer %b\r\n" % key.encode()))
    return (await client.response())[0]


LITELLM = """
model_list:
  - {{model_name: gpt, litellm_params: {{model: openai/a, api_base: "http://127.0.0.1:{broken}/v1", api_key: sk-one, temperature: 0.5}}}}
  - {{model_name: spare, litellm_params: {{model: hosted_vllm/b, api_base: "http://127.0.0.1:{well}/v1", api_key: sk-two}}}}
router_settings: {{fallbacks: [{{gpt: [spare]}}], model_group_alias: {{gpt-4: gpt}}, num_retries: 0}}
general_settings: {{master_key: {client}}}
"""


async def test_a_converted_litellm_file_routes_as_before(nursery, serve, connect):
    """The alias leads to its model with that upstream's key, and a failure there to the fallback."""
    first, failing = recorder(FAILURE)
    second, answering = recorder(plain(b"{}"))
    (_, broken), (_, well) = await serve(failing), await serve(answering)
    port = await started(nursery, LITELLM, broken=broken, well=well, client=CLIENT)
    assert await status_of(connect, port, "gpt-4") == 200
    assert first == [("a", b"Bearer sk-one", 0.5, None)]
    assert second == [("b", b"Bearer sk-two", 0.5, None)]
    assert await status_of(connect, port, "gpt-4", key="sk-of-a-stranger") == 401


SWAP = """
apiKeys: [{client}]
models:
  big: {{cmd: "llama-server --port 1", proxy: "http://127.0.0.1:{well}", useModelName: org/big, aliases: [gpt-4o],
         filters: {{stripParams: top_k, setParams: {{temperature: 0.2}}}}}}
peers: {{far: {{proxy: "http://127.0.0.1:{well}", models: [m], apiKey: sk-two}}}}
"""


async def test_a_converted_llama_swap_file_routes_as_before(nursery, serve, connect):
    """An alias has its model's filters, and a peer's model is known by both names."""
    seen, answering = recorder(plain(b"{}"))
    _, well = await serve(answering)
    port = await started(nursery, SWAP, well=well, client=CLIENT)
    for name in ("gpt-4o", "far/m", "m"):
        assert await status_of(connect, port, name, temperature=1, top_k=3) == 200
    assert seen == [
        ("org/big", b"", 0.2, None),
        ("m", b"Bearer sk-two", 1, 3),
        ("m", b"Bearer sk-two", 1, 3),
    ]
    assert await status_of(connect, port, "big", key="sk-of-a-stranger") == 401
