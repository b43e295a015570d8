"""Checks of single values of the configuration: each says in a few words how the value must look."""

import ipaddress
import re
import urllib.parse
from collections.abc import Mapping
from typing import Literal

from ichat.config.openai_params import KNOWN
from ichat.config.strict import Fits, matches

_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?|")
_PATH = re.compile(r"[!-~]*")
_TARGET = re.compile(r"/[!-\"$-~]{0,1023}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?")
_HOST_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_USUAL_PORTS = {"http": ":80", "https": ":443"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
KEY_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
"""The names that keys may have."""
_KEY_HASH = re.compile(r"sha256:[0-9a-f]{64}")
MEDIA_FILES = "file:"
"""Means, among the domains of media, the files of the worker's machine, if the engine itself restricts none."""
_MEDIA_DOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_FRAMING_HEADERS = frozenset(("host", "content-length", "transfer-encoding", "connection", "expect", "x-request-id"))

WORKER_ID = re.compile(r"(?!\.{1,2}$|external:)[A-Za-z0-9._:-]{1,128}")
"""The ids that workers and machines may have: no step of a path, and not like an external route's."""
MODEL_NAME_CHARACTERS_MAX = 256
RELAYS_MAX = 64
"""The most processes that may move bytes for a gateway."""
Relays = int | Literal["cores"]
"""A number of processes; "cores": as many as this process may use."""
Gpus = int | float | Literal["auto"]
"""Whole GPUs; as a float, a share of a GPU; "auto": the fewest GPUs of the same kind that hold the model."""
GPUS_MAX, GPU_SHARE_LEAST = 64, 0.05


def slug_of(model_name: str) -> str:
    """Return the readable beginning of the ids of a model's workers; a number follows."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model_name)[:100].strip("-") or "worker"


def _is_http(value: str) -> bool:
    try:
        url = urllib.parse.urlsplit(value)
        is_right = url.scheme in ("http", "https") and url.hostname and url.port != 0
        is_right = is_right and all(0 < len(label) < 64 for label in str(url.hostname).removesuffix(".").split("."))
    except ValueError:
        return False
    return bool(is_right and not (url.query or url.fragment or url.username) and _PATH.fullmatch(url.path))


not_empty = Fits(bool, "must not be empty", {"minLength": 1})
is_path = Fits(lambda value: value and "\0" not in value, "must be a path", {"minLength": 1})
is_target = matches(_TARGET, "must be a path that begins with a slash, such as /health")
is_http = Fits(
    _is_http,
    "must be like https://host/v1 or http://host:8000/v1, without a user, a query or a fragment",
    {"pattern": "^https?://"},
)
is_worker_id = matches(
    WORKER_ID, "must be 1 to 128 letters, digits or any of . _ : -, not a dot or two, nor external:…"
)
is_variable = matches(_VARIABLE, "must be the name of an environment variable, which holds the key")
is_devices = matches(
    _VARIABLE,
    "must be the name of an environment variable, such as HIP_VISIBLE_DEVICES, ASCEND_RT_VISIBLE_DEVICES or"
    " ZE_AFFINITY_MASK",
)
is_key_name = matches(KEY_NAME, "must be 1 to 128 letters, digits or any of . _ : @ -")
is_key_hash = matches(
    _KEY_HASH, "must be like sha256:… (64 hexadecimal digits): `./ichat.pyz key` makes a key and its hash"
)
is_model_name = Fits(
    lambda value: 0 < len(value) <= MODEL_NAME_CHARACTERS_MAX and value.isprintable(),
    f"must be 1 to {MODEL_NAME_CHARACTERS_MAX} printable characters",
    {"minLength": 1, "maxLength": MODEL_NAME_CHARACTERS_MAX},
)


def are_networks(values: list[str]) -> None:
    """Raise ValueError unless these are addresses or networks."""
    for value in values:
        try:
            ipaddress.ip_network(value, strict=False)
        except ValueError:
            raise ValueError(f"{value!r} is no address or network, such as 10.0.0.7 or 10.0.0.0/8") from None


def are_params(values: list[str]) -> None:
    """Raise ValueError unless these are parameters of OpenAI's that could be dropped."""
    unknown = sorted(set(values) - KNOWN)
    if unknown:
        raise ValueError(f"{', '.join(map(repr, unknown))} is no parameter of OpenAI's that could be dropped")


def are_headers(headers: Mapping[str, str]) -> None:
    """Raise ValueError unless these are headers that may be added to a request."""
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"{name!r} is not the name of a header, or has a value that cannot be sent")
        if name.lower() in _FRAMING_HEADERS:
            raise ValueError(f"{name!r} is made by the gateway")


def are_hosts(values: list[str]) -> None:
    """Raise ValueError unless these are names of hosts, "*.", and a name, or "*"."""
    for value in values:
        if value != "*" and not _HOST_NAME.fullmatch(value):
            raise ValueError(
                f'{value!r} is neither a name of this gateway, such as "gw.example" or "*.gw.example", nor "*": names'
                " only, in lower case, without a scheme or a port (addresses need not be named)"
            )


def are_origins(values: list[str]) -> None:
    """Raise ValueError unless these are origins as browsers send them, or "*"."""
    for value in values:
        usual_port = _USUAL_PORTS.get(value.partition(":")[0], "/")
        if value != "*" and (not _ORIGIN.fullmatch(value) or value.endswith(usual_port)):
            raise ValueError(
                f'{value!r} is neither "*" nor an origin as browsers send it, such as "https://chat.example": scheme,'
                " host and a port that is not the usual one, in lower case, without a path or a slash at the end"
            )


def is_header_name(value: str) -> None:
    """Raise ValueError unless this is the name of a header, or empty."""
    if value and not _HEADER_NAME.fullmatch(value):
        raise ValueError(f"must be the name of a header, not {value!r}")


def are_relays(value: int | str) -> None:
    """Raise ValueError unless this is a number of relays, or "cores"."""
    if value != "cores" and not (isinstance(value, int) and 0 <= value <= RELAYS_MAX):
        raise ValueError(f'must be from 0 to {RELAYS_MAX}, or "cores", not {value!r}')


def are_gpus(value: Gpus) -> None:
    """Raise ValueError unless these are GPUs for a worker."""
    if isinstance(value, float) and 1 < value < GPUS_MAX:
        raise ValueError(f"A worker has whole GPUs, or a share of a GPU: {value:g} is neither")
    is_right = GPU_SHARE_LEAST <= value < 1 if isinstance(value, float) else value == "auto" or 0 <= value <= GPUS_MAX
    if not is_right:
        raise ValueError(
            f'must be "auto", a share from {GPU_SHARE_LEAST:g} to 1, or a whole number from 0 to {GPUS_MAX},'
            f" not {value!r}"
        )


def are_named_models(tables: Mapping[str, object]) -> None:
    """Raise ValueError unless the keys of these tables are names of models."""
    for name in tables:
        is_model_name(name)


def are_model_names(values: list[str]) -> None:
    """Raise ValueError unless these are names of models: not empty, and no name twice."""
    if not values:
        raise ValueError("must name a model")
    for value in values:
        is_model_name(value)
    twice = next((value for index, value in enumerate(values) if value in values[:index]), None)
    if twice is not None:
        raise ValueError(f"must name each model once, and has {twice!r} twice")


def is_one_line(value: str) -> None:
    """Raise ValueError unless this is a single line of printable characters."""
    if not value.isprintable():
        raise ValueError("must be one line of printable characters")


def are_media_domains(values: list[str]) -> None:
    """Raise ValueError unless each is the name of a host, or `MEDIA_FILES`."""
    for value in values:
        if value != MEDIA_FILES and not _MEDIA_DOMAIN.fullmatch(value):
            raise ValueError(f'must be domains in lower case, such as "example.com", and not {value!r}')
