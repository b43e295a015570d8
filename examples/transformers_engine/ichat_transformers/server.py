"""What `transformers serve` runs, for one model that stays, and without its HTTP server.

Written against transformers 5.19: `Serve` makes the application and everything behind it, but does not load or serve.
"""

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import prometheus_client
import typer
from fastapi import Response
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import GenerateManager, split_model_id

from ichat.engines.engine import Exit, Message, ModelCard, Progress, Receive, Scope, Send
from ichat.engines.engine import Serve as ServeUntilTheEnd

REFUSED: Any = typer.BadParameter.__base__
"""What the parser raises for any wrong argument (`UsageError`, which has no public name)."""
_NOT_OPTIONS = ("force_model", "host", "port", "non_blocking")
"""Parameters of `Serve` that are not for an operator of a worker."""
_NO_ROUTES = ("/load_model", "/reset")
_gone: contextvars.ContextVar[threading.Event] = contextvars.ContextVar("gone")
"""Set when the client of the current request has gone."""


def read_options(argv: Sequence[str]) -> dict[str, Any]:
    """Return the options as `transformers serve` reads them. Raises `REFUSED`, or Exit 0 for ``--help``."""
    signature = inspect.signature(Serve)
    options = [parameter for name, parameter in signature.parameters.items() if name not in _NOT_OPTIONS]

    def serve(**found: Any) -> dict[str, Any]:
        """Serve one model, whose path or name --model gives."""
        return found

    serve.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    program = typer.Typer(add_completion=False)
    program.command()(serve)
    command = typer.main.get_command(program)
    words = ["--help" if word in {"-h", "--help=all"} else word for word in argv]
    found = command.main(words, prog_name="ichat.pyz worker --backend transformers", standalone_mode=False)
    if not isinstance(found, dict):
        raise Exit(int(found or 0), "")
    return found


class Server(Serve):
    """The application, the model behind it, and the counts of what it does."""

    def __init__(self, model_path: str, names: Sequence[str], options: Mapping[str, Any]) -> None:
        super().__init__(None, non_blocking=True, **options)
        self.model_path = model_path
        self._names = names
        self._max_model_len: int | None = None
        self._generation = Generation()
        self._generation_state._generate_managers[names[0]] = self._generation
        self._app = self.server.config.app
        routes = self._app.router.routes
        routes[:] = [route for route in routes if getattr(route, "path", "") not in _NO_ROUTES]
        self._app.add_api_route("/metrics", _metrics)

    def start_server(self) -> None:
        """Start nothing: the worker serves the application."""

    def load(self, phase: Callable[[str], None]) -> None:
        """Load the model, under its first name and for good."""
        models = self._model_manager
        models.model_timeout = -1
        repository, gguf_file = split_model_id(self.model_path)
        path = models.process_model_name(repository)
        model, processor = models.load_model_and_processor(path, gguf_file=gguf_file)
        self._max_model_len = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        [loaded] = models.loaded_models.values()
        name = self._names[0]
        models.loaded_models = {name: loaded}
        models.force_model = name
        models.process_model_name = str  # not every name is one of a hub, with a revision
        state = self._generation_state
        if state.use_continuous_batching(model, models.get_model_modality(model, processor)):
            phase("making the KV cache")
            # The first request would do this, and its parameters would be everybody's.
            defaults = self._chat_handler._build_generation_config({}, model.generation_config, use_cb=True)
            state.get_manager(name, use_cb=True).init_cb(model, defaults)

    async def serve(self, serve: ServeUntilTheEnd) -> None:
        """Serve until that is to end, then unload."""
        try:
            async with self._app.router.lifespan_context(self._app):
                await serve(self.answer)
        finally:
            self._generation_state.shutdown()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and notice its client's disconnect even if the application does not listen.

        The application gives it an id of its own: continuous batching mixes up two requests of the same id.
        """
        gone = threading.Event()
        _gone.set(gone)
        listening: list[asyncio.Task[None]] = []

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        async def receive_and_listen() -> Message:
            message = await receive()
            if not listening and not message.get("more_body"):
                listening.append(asyncio.ensure_future(listen()))
            return message

        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _without_id(message.get("headers", ()))
            await send(message)

        try:
            scope = {**scope, "headers": _without_id(scope["headers"])}
            await self._app(scope, receive_and_listen, send_without_id)
        finally:
            for task in listening:
                task.cancel()

    def why_dead(self) -> str | None:
        """Return the reason why no request can be served any more, or None."""
        if not self._generation.is_alive():
            return "the thread that generates has ended"
        if not self._generation_state.is_cb_alive():
            return "continuous batching has stopped; the log above has the cause"
        return None

    def progress(self) -> Progress:
        """Return what is being worked on; with continuous batching, only the numbers of requests."""
        batching = self._generation_state._cb_manager
        if batching is None:
            one = self._generation
            return Progress(running=one.running, waiting=one.waiting, steps=one.steps, tokens_out=one.tokens_out)
        try:
            scheduler = batching.scheduler
        except RuntimeError:  # it is being made
            return Progress()
        return Progress(running=len(scheduler.active_requests), waiting=len(scheduler.waiting_requests))

    def models(self) -> Sequence[ModelCard]:
        """Return the model under each of its names."""
        return [ModelCard(name, root=self.model_path, max_model_len=self._max_model_len) for name in self._names]


async def _metrics() -> Response:
    """Return the metrics of the process, which the server does not; the worker adds its own."""
    return Response(prometheus_client.generate_latest(), media_type=prometheus_client.CONTENT_TYPE_LATEST)


def _without_id(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [header for header in headers if header[0].lower() != b"x-request-id"]


class Generation(GenerateManager):
    """The thread that generates for one request after the other; it counts, and stops when a client disconnects."""

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.steps = 0
        self.tokens_out = 0

    @property
    def waiting(self) -> int:
        """How many requests are in the queue."""
        return self._thread._queue.qsize()

    def is_alive(self) -> bool:
        """Return whether requests are still taken from the queue."""
        return self._thread._thread.is_alive()

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """See `BaseGenerateManager`."""
        return super().generate_streaming(model, processor, self._watched(inputs), *args, **kwargs)

    async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """See `BaseGenerateManager`."""
        return await super().generate_non_streaming(model, processor, self._watched(inputs), *args, **kwargs)

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
        """See `GenerateManager`."""
        return super().submit(self._counted(fn), *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> "asyncio.Future[Any]":
        """See `GenerateManager`."""
        return super().async_submit(self._counted(fn), *args, **kwargs)

    def _watched(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of `generate` with one more that is called after each step."""
        return {**inputs, "stopping_criteria": StoppingCriteriaList([EachStep(self, _gone.get())])}

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.running += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.running -= 1

        return counted


class EachStep(StoppingCriteria):
    """Counts the steps of one call of `generate`, and ends it once its client has disconnected."""

    def __init__(self, generation: Generation, gone: threading.Event) -> None:
        self._generation = generation
        self._gone = gone

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Return whether all sequences of the batch end here."""
        self._generation.steps += 1
        self._generation.tokens_out += len(input_ids)
        return self._gone.is_set()
