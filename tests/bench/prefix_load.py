"""The clients of `./build bench prefix`: each takes the next open conversation, asks, and puts it back with the answer."""

import asyncio
import collections
import json
import time

import attrs
from load import Connection
from response import Broken, Response

ANSWER_TOKENS = 12
REQUEST_S = 120.0
"""How long one request may take."""


@attrs.frozen
class Asked:
    """One request that has ended: when it began, when its first word came, and why it failed, if it did."""

    messages: list[dict]
    began: float
    ttft_s: float = 0.0
    failure: str = ""


class Answer(Response):
    """A streamed response, of which the words are kept, and the time of the first."""

    def __init__(self):
        super().__init__(0, is_stream=True)
        self.words = ""
        self.words_at = 0.0
        self._partial = b""

    def _take(self, text):
        super()._take(text)
        *events, self._partial = (self._partial + text).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: {"):
                continue
            choices = json.loads(event[6:]).get("choices")
            if choices and (words := choices[0]["delta"].get("content")):
                self.words_at = self.words_at or time.perf_counter()
                self.words += words


@attrs.define
class Play:
    """What some clients have asked of one port, in the order in which it ended."""

    port: int
    clients: int
    asked: list[Asked] = attrs.field(factory=list)
    seconds: float = 0.0

    def all_turns(self, conversations):
        """Let every conversation take all its turns; the one that has waited longest goes on first."""
        waiting = collections.deque(conversations)
        asyncio.run(self._play(waiting, waiting))  # uvloop's transports swallow the exit that a signal asks for

    def one_turn(self, conversations, called=lambda _ended: None):
        """Let every conversation take one turn, and return those that have another.

        `called` is told after each request how many have ended.
        """
        later = collections.deque()
        asyncio.run(self._play(collections.deque(conversations), later, called))
        return list(later)

    async def _play(self, waiting, later, called=lambda _ended: None):
        began = time.perf_counter()
        before = len(self.asked)
        await asyncio.gather(*(self._client(waiting, later, before, called) for _ in range(self.clients)))
        self.seconds += time.perf_counter() - began

    async def _client(self, waiting, later, before, called):
        connection = None
        while waiting:
            conversation = waiting.popleft()
            connection, words = await self._ask(connection, conversation.messages)
            if conversation.has_next():
                conversation.go_on(words)
                later.append(conversation)
            called(len(self.asked) - before)
        if connection is not None:
            connection.transport.abort()

    async def _ask(self, connection, messages):
        """Make one request. Return the connection, unless it is at its end, and the words of the answer."""
        answer, began, failure, reasons = Answer(), time.perf_counter(), "", []
        try:
            async with asyncio.timeout(REQUEST_S):
                if connection is None or connection.is_lost:
                    loop = asyncio.get_running_loop()
                    _, connection = await loop.create_connection(lambda: Connection(reasons), "127.0.0.1", self.port)
                await connection.ask(self._request(messages), answer)
        except (Broken, ValueError, OSError, TimeoutError) as error:
            failure = str(error) or repr(error)
        ttft_s = answer.words_at - began if answer.words_at else 0.0
        self.asked.append(Asked(messages, began, ttft_s, failure))
        if connection is not None and (failure or answer.closes):
            connection.transport.abort()
            connection = None
        return connection, answer.words

    def _request(self, messages):
        wanted = {"model": "tiny", "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        body = json.dumps({**wanted, "ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\n"
        return b"%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (head.encode(), len(body), body)
