"""How the gateway addresses a server that is not iChat's own: where its paths begin, and which key it gets."""

import re

import attrs

from ichat.errors import not_found
from ichat.http.heads import Headers

_AT_ROOT = re.compile(rb"/(v2/|tokenize|detokenize|pooling|classify)")
"""Paths of engines that stand beside `/v1`, not below it."""
_CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"api-key", b"openai-organization", b"openai-project"))
"""Headers in which clients send credentials."""
_INFERENCE = re.compile(
    rb"/(v1/)?(chat/completions|completions|embeddings|rerank|score|classify|pooling|responses|messages|tokenize|detokenize"
    rb"|moderations|images/[a-z]+|audio/[a-z]+)|/v2/rerank"
)
"""The paths that a client may use with the gateway's own key for an upstream: no files, no fine-tuning, no batches."""


@attrs.define(eq=False)
class Access:
    """The paths and the headers of a server that the configuration names."""

    prefix: bytes
    """The part of the upstream's paths that stands for the gateway's `/v1`."""
    _headers: Headers = attrs.field(repr=False, alias="headers")
    names: frozenset[bytes] = attrs.field(default=frozenset[bytes](), kw_only=True)
    """The names of the headers that each request gets; their values may be sent with each request."""
    has_key: bool = attrs.field(init=False)
    """Whether the gateway has a key of its own for the upstream."""
    _left_out: frozenset[bytes] = attrs.field(init=False, repr=False)
    """Headers of the client that its upstream does not get."""

    def __attrs_post_init__(self) -> None:
        self.names = own = self.names.union(name for name, _ in self._headers)
        self.has_key = not own.isdisjoint(_CREDENTIALS)
        self._left_out = own | _CREDENTIALS if self.has_key else own

    @property
    def own_headers(self) -> Headers:
        """The headers that each request gets."""
        return self._headers

    def target_for(self, target: bytes) -> bytes:
        """Return the request target for the upstream."""
        if target.startswith(b"/v1/"):
            return self.prefix + target[3:]
        return self.at_root(target) if _AT_ROOT.match(target) else self.prefix + target

    def at_root(self, path: bytes) -> bytes:
        """Return the target of a path that stands beside `/v1`."""
        return self.prefix.removesuffix(b"/v1") + path

    def headers_for(self, headers: Headers) -> Headers:
        """Return the headers of a request with the server's own in place of the client's of the same names.

        A client's credentials for the gateway do not go to the upstream; others pass if the gateway has no key for it.
        """
        left_out = self._left_out
        return [header for header in headers if header[0] not in left_out] + self._headers

    def check_path(self, path: bytes) -> None:
        """Raise ApiError 404 for a path that the gateway's key there is not for."""
        if self.has_key and not _INFERENCE.fullmatch(path):
            raise not_found(path.decode("latin-1"))
