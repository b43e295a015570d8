"""Ask a model by LangChain: `with_langchain.py BASE_URL MODEL TEXT CALL` prints what came, as JSON.

TEXT and CALL are expressions of a text and of a call of the tool: a model of random numbers is made to say them.
"""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(*, sunny: bool) -> str:
    """Note whether it is sunny."""
    return "noted"


def main(base_url, name, text, call):
    known = {"base_url": base_url, "model": name, "api_key": "none", "temperature": 0, "max_retries": 0}
    model = ChatOpenAI(**known, max_tokens=16, extra_body={"structured_outputs": {"regex": text}})
    question = HumanMessage("What is the weather?")
    answer = model.invoke([question])
    pieces = list(model.stream([question]))
    forced = {"structured_outputs": {"regex": call}}
    with_tool = ChatOpenAI(**known, max_tokens=200, extra_body=forced).bind_tools([weather])
    asked = with_tool.invoke([question])
    streamed = sum_of(with_tool.stream([question]))
    result = ToolMessage(weather.invoke(asked.tool_calls[0]["args"]), tool_call_id=asked.tool_calls[0]["id"])
    responses = ChatOpenAI(**known, max_tokens=16, use_responses_api=True)
    found = {
        "answer": answer.content,
        "tokens": answer.usage_metadata["output_tokens"],
        "pieces": [piece.content for piece in pieces],
        "calls": [(found["name"], found["args"]) for one in (asked, streamed) for found in one.tool_calls],
        "after": model.invoke([question, asked, result]).content,
        "responses": [piece.text for piece in responses.stream([question])],
    }
    print(json.dumps(found))


def sum_of(pieces):
    whole = None
    for piece in pieces:
        whole = piece if whole is None else whole + piece
    return whole


main(*sys.argv[1:])
