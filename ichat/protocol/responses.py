"""The agreement of gateway and workers about responses: their ids, and which are made in the background."""

import hashlib
import re
import secrets

RESPONSE_ID = re.compile(r"resp_([0-9a-f]{12})_[0-9a-f]{32}")
"""An id, with the tag of the worker that keeps the response (`messages.response_tag`)."""
_SECRET_BYTES = 13
_MARK_BYTES = 3


def is_background(value: object) -> bool:
    """Return whether the value of a request's `background` asks for a response that is made after its end.

    Engines read more values than `true` as true. So every value counts but false, 0, and null (an absent value).
    """
    return value is not None and value != 0


def new_response_id(tag: str, model: str) -> str:
    """Return an id for a response of a model, kept by the worker of this tag: 104 random bits and the model's mark."""
    secret = secrets.token_hex(_SECRET_BYTES)
    return f"resp_{tag}_{secret}{_mark_of(secret, model)}"


def is_of_model(response_id: str, model: str) -> bool:
    """Return whether a response is of this model, by its id."""
    digits = 2 * _MARK_BYTES
    return response_id[-digits:] == _mark_of(response_id[-32:-digits], model)


def _mark_of(secret: str, model: str) -> str:
    text = f"{secret}\0{model}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=_MARK_BYTES).hexdigest()
