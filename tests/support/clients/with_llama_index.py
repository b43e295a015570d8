"""Ask a model by LlamaIndex: `with_llama_index.py BASE_URL MODEL TEXT CALL` prints what came, as JSON.

TEXT and CALL are expressions of a text and of a call of the tool: a model of random numbers is made to say them.
"""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def weather(*, sunny: bool) -> str:
    """Note whether it is sunny."""
    return "noted"


def main(base_url, name, text, call):
    known = {"api_base": base_url, "model": name, "api_key": "none", "temperature": 0, "max_retries": 0}
    known |= {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048}
    said = {"extra_body": {"structured_outputs": {"regex": text}}}
    model = OpenAILike(**known, max_tokens=16, additional_kwargs=said)
    question = ChatMessage("What is the weather?")
    answer = model.chat([question])
    forced = {"extra_body": {"structured_outputs": {"regex": call}}}
    longer, tool = OpenAILike(**known, max_tokens=200, additional_kwargs=forced), FunctionTool.from_defaults(weather)
    asked = longer.chat_with_tools([tool], chat_history=[question])
    *_, streamed = longer.stream_chat_with_tools([tool], chat_history=[question])
    [first] = longer.get_tool_calls_from_response(asked)
    result = ChatMessage(
        role="tool", content=weather(**first.tool_kwargs), additional_kwargs={"tool_call_id": first.tool_id}
    )
    found = {
        "answer": answer.message.content,
        "tokens": answer.raw.usage.completion_tokens,
        "pieces": [piece.delta for piece in model.stream_chat([question])],
        "calls": [
            (one.tool_name, one.tool_kwargs)
            for response in (asked, streamed)
            for one in longer.get_tool_calls_from_response(response)
        ],
        "after": model.chat([question, asked.message, result]).message.content,
    }
    print(json.dumps(found))


main(*sys.argv[1:])
