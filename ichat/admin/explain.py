"""Where a request would go now, by its body: the reading of the body, and the plan of a name that stands for models."""

import functools
from collections.abc import Container, Mapping, Sequence

import attrs

from ichat import errors
from ichat.config.models import TargetConfig
from ichat.config.schema import Routing
from ichat.fleet.explain import RouteView, TargetView, explain
from ichat.fleet.model_directory import ModelDirectory
from ichat.fleet.model_list import near_models
from ichat.fleet.worker_table import WorkerTable
from ichat.http.json_body import Body
from ichat.http.request_body import RequestBody, read_model_body
from ichat.proxy.kept_responses import continue_response
from ichat.proxy.steps import SEEMS_TOO_LONG, BodyEdits
from ichat.proxy.targets import body_for, reason_of_refusal, route_along, seems_too_long
from ichat.routing.aliases import Alias, Aliases, Plan
from ichat.routing.availability import Unknown
from ichat.routing.balancer import Balancer
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import PROMPTS, PrefixChain, chain_of, sums_of
from ichat.routing.prompt_lengths import PromptLengths, is_measurable
from ichat.routing.request import RoutingRequest

_ABSENT = "no worker and no external route has it"


@attrs.frozen
class Question:
    """A request that is asked about."""

    path: bytes
    body: RequestBody
    model: str
    session: bytes
    previous: str | None
    """The response that it continues."""


async def read_question(data: Body, args: Mapping[str, str]) -> Question:
    """Return the request that is asked about, by its body and the question's parameters. Raises ApiError 400."""
    model, body, members = await read_model_body(data, ("model", "previous_response_id"))
    path = args.get("path", "").encode() or _path_of(members)
    if path not in PROMPTS:
        known = ", ".join(sorted(one.decode() for one in PROMPTS))
        raise errors.bad_request(f"path must be one of {known}.", param="path")
    previous = members.get("previous_response_id") if path.endswith(b"/responses") else None
    session = args.get("session", "").encode()
    return Question(path, body, model, session, None if previous is None else str(previous))


def _path_of(members: Container[str]) -> bytes:
    """Return the path of the route that accepts a body with these members."""
    found = (path for path, member in PROMPTS.items() if member in members)
    return next(found, b"/v1/chat/completions")


async def explain_request(
    directory: ModelDirectory,
    table: WorkerTable,
    balancer: Balancer,
    aliases: Aliases,
    question: Question,
    *,
    settings: Routing,
    lengths: PromptLengths,
) -> RouteView:
    """Return where a request would go now, and why. Raises ApiError 404 for a model or a response that is not there."""
    inquiry = _Inquiry(directory, table, balancer, settings, lengths, question)
    alias = aliases.by_name.get(aliases.name_for(question.model, directory.has))
    if alias is not None:
        return await inquiry.explain_plan(alias)
    view = inquiry.explain(question.model)
    if view is None:
        raise errors.model_not_found(question.model, near_models(question.model, directory, aliases, None))
    return view


@attrs.define
class _Inquiry:
    """A question, and the parts of the gateway that answer it."""

    directory: ModelDirectory
    table: WorkerTable
    balancer: Balancer
    settings: Routing
    lengths: PromptLengths
    question: Question
    only: Endpoint | None = None
    edits: BodyEdits = BodyEdits()
    """Those that the request's name makes in its body."""

    def routing(self, model: str, *, skips_open: bool = False) -> RoutingRequest:
        """Return the request as the balancer would see it."""
        asked = self.question
        request = RoutingRequest(model, asked.session, only=self.only, skips_open=skips_open)
        if not asked.session and self.only is None:
            request.make_prefix = functools.partial(self._chain_for, model)
        self.balancer.rehearse(request)  # makes the prefix if the choice depends on it
        return request

    def _chain_for(self, model: str) -> PrefixChain | None:
        """Return the chain of the request's prefix for a model."""
        sums = sums_of(self.question.path, self.question.body.data, self.question.body.names)
        return None if sums is None else chain_of(sums, model, self.edits.set, self.edits.drop)

    def explain(self, model: str) -> RouteView | None:
        """Return where a request for a model goes; None: there is no such model. Raises ApiError 404 for a response."""
        if self.question.previous is not None:
            _, self.only = continue_response(self.directory, self.table, self.question.previous, model, None)
        return self._view(self.routing(model))

    def _view(self, routing: RoutingRequest) -> RouteView | None:
        view = explain(self.directory, self.table, self.balancer, self.settings, routing)
        return None if isinstance(view, Unknown) else view

    async def explain_plan(self, alias: Alias) -> RouteView:
        """Return where a request for a name that stands for models goes, with all its models."""
        asked, counted = self.question, alias.counted(self.balancer.prospect)
        plan = self._plan_of(alias, counted)
        first, tokens = plan.targets[0], self._tokens_if_too_long(plan)
        if tokens is not None and alias.longer is not None:
            plan = Plan((first, alias.longer), alias)
        models = plan.targets
        self.edits = route_along(plan).edits
        await body_for(asked.body, self.edits, alias.name)  # raises for a body that cannot be edited
        shown, views = dict[str, RouteView](), list[TargetView]()
        longer = () if alias.longer is None else (alias.longer,)
        for model in dict.fromkeys((*(one.model for one in alias.targets), *models, *longer)):
            routing = self.routing(model, skips_open="circuit" in alias.goes_on and model in models[:-1])
            shown[model] = view = self._view(routing) or self._view_of_absent(model)
            place = models.index(model) + 1 if model in models else None
            worker, reason, goes_on = view.chosen, view.reason, place and self._reason_to_go_on(routing, alias)
            if tokens is not None and model == first:
                reason = f"the prompt probably has {tokens} tokens, which is too long"
                worker, goes_on = None, SEEMS_TOO_LONG
            share = alias.share_of(model, counted)
            views.append(TargetView(model, share, place, view.rule, worker, reason, goes_on or None))
        order = sorted((one for one in views if one.place), key=lambda one: one.place or 0)
        answering = next((one for one in order if one.goes_on is None), None) or _waited_for(order)
        return attrs.evolve(shown[answering.model], alias=alias.name, plan=[_without_end(one, order) for one in views])

    def _plan_of(self, alias: Alias, counted: Sequence[TargetConfig]) -> Plan:
        """Return the models that the request goes to: without a session first to the target with the most weight."""
        asked = self.question
        heaviest = max(counted, key=lambda one: one.weight).model
        plan = alias.plan(alias.choose(asked.session, lambda: 0.0, counted) if asked.session else heaviest)
        if asked.previous is not None:
            left, self.only = continue_response(self.directory, self.table, asked.previous, asked.model, plan)
            assert left is not None
            return left
        return plan

    def _tokens_if_too_long(self, plan: Plan) -> int | None:
        """Return how many tokens the prompt probably has, if it goes to the model for longer prompts for that."""
        asked, model, longer = self.question, plan.targets[0], plan.alias.longer
        if longer is None or longer == model:
            return None
        data = asked.body.data
        bytes_in = len(data) if is_measurable(asked.path, asked.body.names, data) else 0
        is_long = seems_too_long(self.directory, self.lengths, model, longer, bytes_in)
        return self.lengths.tokens(model, bytes_in) if is_long else None

    def _view_of_absent(self, model: str) -> RouteView:
        """Return the view of a model that no endpoint has."""
        has_session = bool(self.question.session)
        return RouteView(model, self.settings.policy, "not_ready", None, _ABSENT, 0, has_session, None, [])

    def _reason_to_go_on(self, routing: RoutingRequest, alias: Alias) -> str | None:
        decided = self.balancer.rehearse(routing)
        if isinstance(decided, tuple):
            return None
        reason = reason_of_refusal(decided, self.settings.queue_max)
        return reason if reason in alias.goes_on else None


def _waited_for(order: Sequence[TargetView]) -> TargetView:
    """Return the model that waits for room if all others pass the request on: the first that may, else the last."""
    return next((one for one in order if _may_wait(one)), order[-1])


def _may_wait(one: TargetView) -> bool:
    """Return whether a request passes over a model that it would wait for if no other model could answer."""
    return one.goes_on is not None and one.rule in ("queued", "loading")


def _without_end(one: TargetView, order: Sequence[TargetView]) -> TargetView:
    """Return a model's view that does not say that the request goes on if no model follows.

    From the last model, the request goes back to the first passed-over model that it may wait for.
    """
    is_end = one.model == order[-1].model and not any(_may_wait(other) for other in order[:-1])
    return attrs.evolve(one, goes_on=None) if is_end else one
