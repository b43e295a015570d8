"""Where a request would go now, by its body: what is read of it, and the plan of a name that stands for models."""

from collections.abc import Container, Mapping, Sequence

import attrs
import trio

from ichat import errors
from ichat.config.schema import Routing
from ichat.http.json_body import Body, model_of, read_members
from ichat.proxy.targets import SEEMS_TOO_LONG, TargetWalk, continue_response, reason_of_refusal
from ichat.routing.aliases import Alias, Aliases, Plan
from ichat.routing.availability import Ready, Unknown
from ichat.routing.balancer import Balancer
from ichat.routing.endpoint import Endpoint
from ichat.routing.explain import RouteView, TargetView, explain
from ichat.routing.model_list import near_models
from ichat.routing.prefix_chain import PROMPTS, chain_of
from ichat.routing.prompt_lengths import PromptLengths, is_measurable
from ichat.routing.registry import Registry
from ichat.routing.request import RoutingRequest

_ABSENT = "no worker and no external route has it"


@attrs.frozen
class Question:
    """A request that is asked about."""

    path: bytes
    body: Body
    names: Sequence[str]
    """Of its members."""
    model: str
    session: bytes
    previous: str | None
    """The response that it continues."""


async def read_question(body: Body, args: Mapping[str, str]) -> Question:
    """Return the request that is asked about, by its body and the question's parameters. Raises ApiError 400."""
    members = await read_members(body, ("model", "previous_response_id"))
    path, model = args.get("path", "").encode() or _path_of(members), model_of(members)
    if path not in PROMPTS:
        known = ", ".join(sorted(one.decode() for one in PROMPTS))
        raise errors.bad_request(f"path must be one of {known}.", param="path")
    previous = members.get("previous_response_id") if path.endswith(b"/responses") else None
    session = args.get("session", "").encode()
    return Question(path, body, (*members,), model, session, None if previous is None else str(previous))


def _path_of(members: Container[str]) -> bytes:
    """Return the path of the route that takes a body with these members."""
    found = (path for path, member in PROMPTS.items() if member in members)
    return next(found, b"/v1/chat/completions")


async def explain_request(
    registry: Registry,
    balancer: Balancer,
    aliases: Aliases,
    question: Question,
    *,
    settings: Routing,
    lengths: PromptLengths,
) -> RouteView:
    """Return where a request would go now, and why. Raises ApiError 404 for a model or a response that is not there."""
    inquiry = _Inquiry(registry, balancer, settings, lengths, question)
    alias = aliases.by_name.get(question.model)
    view: RouteView | Unknown
    if alias is None:
        view = inquiry.explain(question.model)
    else:
        view = await inquiry.explain_plan(alias)
    if isinstance(view, Unknown):
        raise errors.model_not_found(question.model, near_models(question.model, registry, aliases, None))
    return view


@attrs.define
class _Inquiry:
    """One question, and what answers it."""

    registry: Registry
    balancer: Balancer
    settings: Routing
    lengths: PromptLengths
    question: Question
    only: Endpoint | None = None

    def routing(self, model: str, *, skips_open: bool = False) -> RoutingRequest:
        """Return what the balancer would know of the request."""
        asked, prefix = self.question, None
        if not asked.session and self.only is None and self.balancer.wants_prefix(model):
            prefix = chain_of(asked.path, asked.body, asked.names, model)
        return RoutingRequest(model, asked.session, only=self.only, prefix=prefix, skips_open=skips_open)

    def explain(self, model: str) -> RouteView | Unknown:
        """Return where a request for a model goes. Raises ApiError 404 for a response that is not there."""
        if self.question.previous is not None:
            _, self.only = continue_response(self.registry, self.question.previous, model, None)
        return self._view(self.routing(model))

    def _view(self, routing: RoutingRequest) -> RouteView | Unknown:
        return explain(self.registry, self.balancer, self.settings, routing, trio.current_time())

    async def explain_plan(self, alias: Alias) -> RouteView | Unknown:
        """Return where a request for a name goes that stands for models, with all of them."""
        asked = self.question
        heaviest = max(alias.targets, key=lambda one: one.weight).model
        chosen = alias.choose(asked.session, lambda: 0.0) if asked.session else heaviest
        plan: Plan | None = Plan(tuple(dict.fromkeys((chosen, *alias.fallbacks))), alias)
        if asked.previous is not None:
            plan, self.only = continue_response(self.registry, asked.previous, asked.model, plan)
        assert plan is not None
        tokens = self._tokens_if_too_long(alias, chosen)
        if tokens is not None and alias.longer is not None:
            plan = Plan((chosen, alias.longer), alias)
        models = plan.targets
        body, names = await TargetWalk(plan).fit(asked.body, {}, asked.names)
        self.question = attrs.evolve(asked, body=body, names=names)
        views, routings = list[TargetView](), dict[str, RoutingRequest]()
        longer = () if alias.longer is None else (alias.longer,)
        for model in dict.fromkeys((*(one.model for one in alias.targets), *models, *longer)):
            number = models.index(model) + 1 if model in models else None
            skips_open = "circuit" in alias.goes_on and number is not None and number < len(models)
            routing = routings[model] = self.routing(model, skips_open=skips_open)
            view, reason = self._view(routing), self._reason_to_go_on(routing, alias)
            target = _target_view(alias, model, number, view, reason)
            if tokens is not None and number == 1:
                why = f"the prompt probably has {tokens} tokens, which is too long"
                target = attrs.evolve(target, worker=None, reason=why, goes_on=SEEMS_TOO_LONG)
            views.append(target)
        order = sorted((one for one in views if one.place), key=lambda one: one.place or 0)
        answering = next((one for one in order if one.goes_on is None), None) or _waited_for(order)
        shown = self._view(routings[answering.model])
        if isinstance(shown, Unknown):
            waiting, has_session = 0, bool(asked.session)
            shown = RouteView(
                answering.model, self.settings.policy, "not_ready", None, _ABSENT, waiting, has_session, None, []
            )
        return attrs.evolve(shown, alias=alias.name, plan=views)

    def _tokens_if_too_long(self, alias: Alias, model: str) -> int | None:
        """Return how many tokens the prompt probably has, if it goes to the model for longer prompts for that."""
        asked, found = self.question, self.registry.availability(model)
        if alias.longer is None or alias.longer == model or asked.previous is not None or not isinstance(found, Ready):
            return None
        if not isinstance(self.registry.availability(alias.longer), Ready):
            return None
        if not is_measurable(asked.path, asked.names, asked.body):
            return None
        is_long = self.lengths.is_too_long(model, len(asked.body), found.endpoints)
        return self.lengths.tokens(model, len(asked.body)) if is_long else None

    def _reason_to_go_on(self, routing: RoutingRequest, alias: Alias) -> str | None:
        decided = self.balancer.rehearse(routing)
        if isinstance(decided, tuple):
            return None
        reason = reason_of_refusal(decided, self.settings.queue_max)
        return reason if reason in alias.goes_on else None


def _waited_for(order: Sequence[TargetView]) -> TargetView:
    """Return which model waits for a request that all others would pass on: the first that may, else the last."""
    return next((one for one in order if one.goes_on in ("busy", "loading")), order[-1])


def _target_view(
    alias: Alias, model: str, place: int | None, view: RouteView | Unknown, goes_on: str | None
) -> TargetView:
    share = alias.share_of(model)
    if isinstance(view, Unknown):
        return TargetView(model, share, place, "not_ready", None, _ABSENT, goes_on)
    return TargetView(model, share, place, view.rule, view.chosen, view.reason, goes_on)
