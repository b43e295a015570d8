"""Ask a model by pydantic-ai: `with_pydantic_ai.py BASE_URL MODEL TEXT CALL` prints what came, as JSON.

TEXT and CALL are expressions of a text and of a call of the tool: a model of random numbers is made to say them.
"""

import asyncio
import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the weather?"


class Weather(BaseModel):
    """What the model is made to say by a call of a tool."""

    sunny: bool


async def main(base_url, name, text, call):
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=base_url, api_key="none"))
    by_choice = OpenAIChatModel(
        name,
        provider=OpenAIProvider(base_url=base_url, api_key="none"),
        profile=OpenAIModelProfile(supports_forced_tool_choice=False),
    )
    said = {"max_tokens": 16, "temperature": 0, "extra_body": {"structured_outputs": {"regex": text}}}
    agent = Agent(model, model_settings=said)
    forced = {"max_tokens": 200, "temperature": 0, "extra_body": {"structured_outputs": {"regex": call}}}
    typed = Agent(by_choice, output_type=ToolOutput(Weather, name="weather", strict=False), model_settings=forced)
    answer = await agent.run(QUESTION)
    async with agent.run_stream(QUESTION) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    asked = await typed.run(QUESTION)
    async with typed.run_stream(QUESTION) as stream:
        streamed = await stream.get_output()
    found = {
        "answer": answer.output,
        "tokens": answer.usage.output_tokens,
        "pieces": pieces,
        "calls": [("weather", one.model_dump()) for one in (asked.output, streamed)],
        "after": (await agent.run("And now?", message_history=asked.all_messages())).output,
    }
    print(json.dumps(found))


asyncio.run(main(*sys.argv[1:]))
