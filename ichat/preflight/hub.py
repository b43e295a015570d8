"""Models that are named as on the Hugging Face hub: whether they are cached here, and the hub's answer about them."""

import os
import pathlib
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import attrs
import trio

from ichat.config.schema import ManagedWorkerConfig
from ichat.engines.load_phases import hub_cache
from ichat.preflight.model_files import lack_of

HUB_S = 4.0
"""The limit on the hub's answer, in seconds; after it the hub counts as silent."""

BREAKS_MAX = 3
"""Attempts to ask the hub, if the connection is reset before the answer."""
_HUB = "https://huggingface.co"
_USER = re.compile(r"//[^/@]*@")
"""A name and a password in an address."""
_TRUE = ("1", "on", "true", "yes")
_OTHER_HUBS = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")
"""Variables that have an engine fetch models from another hub, of which nothing is known here."""
_SCHEMES = ("http", "https")

HubAnswer = Literal["there", "gated", "absent", "silent", "unreachable"]


@attrs.frozen
class HubFacts:
    """The facts about a model that is named as on the Hugging Face hub."""

    name: str
    cache: str
    is_cached: bool
    is_offline: bool
    answer: HubAnswer | None = None
    """The hub's answer; None: it was not asked."""
    why: str = ""
    """The reason why the hub is unreachable, in the system's words."""
    hub: str = _HUB
    token: str = attrs.field(default="", repr=False)
    lack: str = ""
    """The part of the model that the cache lacks, in a few words; empty if nothing is known to be missing."""

    @property
    def place(self) -> str:
        """Where the hub is, without a password."""
        return _USER.sub("//", self.hub)


async def ask_hub(facts: HubFacts, environment: Mapping[str, str], limit_s: float = HUB_S) -> HubFacts:
    """Return the facts with the hub's answer, if it must be asked and answers within the limit in seconds."""
    if facts.answer != "silent":
        return facts
    with trio.move_on_after(limit_s):
        ask = partial(_ask_hub, facts, _proxies(environment))
        answer, why = await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
        return attrs.evolve(facts, answer=answer, why=why)
    return facts


def problems_of_hub(facts: HubFacts) -> list[str]:
    """Return why an engine would not get its model, in a sentence that says what to do."""
    name, place, absent = facts.name, facts.place, f"{facts.name} is not in {facts.cache}"
    if facts.is_cached:
        lack = f"{name} in {facts.cache} is not whole ({facts.lack}), and HF_HUB_OFFLINE keeps the rest away."
        return [lack] if facts.lack and facts.is_offline else []
    if facts.is_offline:
        return [f"{absent}, and HF_HUB_OFFLINE keeps the engine from fetching it."]
    private = "" if facts.token else ", or log in if it is private"
    why = "refuses this token" if facts.token else "asks for a token (HF_TOKEN)"
    sentences = {
        "absent": f"There is no model {name} on {place} and no such directory here: correct model_path{private}.",
        "gated": f"{place} {why} for {name}: accept the model's terms there, and log in.",
        "silent": f"{absent}, and {place} did not answer within {HUB_S:g} s: try again, or fetch it before.",
        "unreachable": f"{absent}, and {place} cannot be reached ({facts.why}): fetch it where it can.",
    }
    return [sentences[facts.answer]] if facts.answer in sentences else []


def read_hub(worker: ManagedWorkerConfig, environment: Mapping[str, str]) -> HubFacts | None:
    """Look for a model in the hub's cache; None: it is no name on the hub.

    If the hub must be asked, the answer is `silent` until it arrives.
    """
    name = worker.model_path.partition(":")[0]
    elsewhere = worker.hub == "modelscope" or any(environment.get(one, "").lower() in _TRUE for one in _OTHER_HUBS)
    if "://" in worker.model_path or name.count("/") > 1 or elsewhere:
        return None
    given = worker.backend_args.get("download_dir") or worker.backend_args.get("download-dir")
    cache = str(given) if given else hub_cache(environment)
    snapshots = os.path.join(cache, f"models--{name.replace('/', '--')}", "snapshots")
    is_cached = os.path.isdir(snapshots) and bool(os.listdir(snapshots))
    is_offline = any(environment.get(one, "").lower() in _TRUE for one in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    hub = (environment.get("HF_ENDPOINT") or _HUB).rstrip("/")
    token = _token_of(environment)
    lack = _lack_in_cache(cache, name) if is_cached and "revision" not in worker.backend_args else ""
    facts = HubFacts(name, cache, is_cached, is_offline, hub=hub, token=token, lack=lack)
    return facts if is_cached or is_offline else attrs.evolve(facts, answer="silent")


def snapshot_in(cache: str, name: str, revision: str = "main") -> str | None:
    """Return the directory of a version of a model in the hub's cache; None: it is not there."""
    place = pathlib.Path(cache, f"models--{name.replace('/', '--')}")
    try:
        reference = place / "refs" / revision
        commit = reference.read_text(encoding="ascii").strip() if reference.is_file() else revision
        directory = place / "snapshots" / commit
        return str(directory) if directory.is_dir() else None
    except (OSError, ValueError):
        return None


def _lack_in_cache(cache: str, name: str) -> str:
    """Return the part of the newest version of a model that the hub's cache lacks."""
    try:
        directory = snapshot_in(cache, name)
        return "" if directory is None else lack_of(directory)
    except (OSError, ValueError):
        return ""


def _token_of(environment: Mapping[str, str]) -> str:
    if token := environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN"):
        return token.strip()
    home = os.path.dirname(hub_cache({name: environment[name] for name in ("HF_HOME",) if name in environment}))
    try:
        with open(environment.get("HF_TOKEN_PATH") or os.path.join(home, "token"), encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as the answer: the token is for the hub alone."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return no other request."""


def _proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the proxies that a worker with these variables uses, by their schemes."""
    found = {one: environment.get(f"{one}_proxy") or environment.get(f"{one.upper()}_PROXY") for one in _SCHEMES}
    return {scheme: url for scheme, url in found.items() if url}


def _ask_hub(facts: HubFacts, proxies: Mapping[str, str]) -> tuple[HubAnswer, str]:
    """Ask for the model's config.json; return the answer, and why there is none. Retry after a reset."""
    for _ in range(BREAKS_MAX):
        try:
            return _ask_once(facts, proxies)
        except ConnectionResetError:
            continue
    return "unreachable", "Connection reset by peer"


def _ask_once(facts: HubFacts, proxies: Mapping[str, str]) -> tuple[HubAnswer, str]:
    """Ask without reading the file. Raises ConnectionResetError."""
    url = f"{facts.hub}/{urllib.parse.quote(facts.name)}/resolve/main/config.json"
    headers = {"authorization": f"Bearer {facts.token}"} if facts.token else {}
    try:
        request = urllib.request.Request(url, headers=headers, method="HEAD")
        opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler(dict(proxies)))
        with opener.open(request, timeout=HUB_S):
            return "there", ""
    except urllib.error.HTTPError as error:
        with error:
            answers: dict[int, HubAnswer] = {401: "gated", 403: "gated"}
            if error.code == 404 and error.headers.get("x-error-code") == "EntryNotFound":
                return "there", ""
            is_no_model = error.headers.get("x-error-code") == "RepoNotFound" or error.code == 404
            return "absent" if is_no_model else answers.get(error.code, "there"), ""
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, TimeoutError):
            return "silent", ""
        if isinstance(cause, ConnectionResetError):
            raise cause from error
        return "unreachable", getattr(cause, "strerror", None) or str(cause)
