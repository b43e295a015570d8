"""Headers that end at the gateway: those that no upstream gets, and those that no client gets of a model's answer."""

from collections.abc import Callable, Collection

from ichat.http.heads import RememberedLines
from ichat.protocol.messages import INTERNAL
from ichat.security.addresses import FORWARDED

IsLeftOut = Callable[[bytes], bool]
"""Returns whether a header of this name, in lower case, goes no further."""

_OF_BROWSERS = frozenset((b"origin", b"referer", b"cookie", b"cookie2", b"proxy-authorization"))
"""Headers in which a browser describes the page that asks, and its secrets for this origin or a proxy."""
_CLIENTS = frozenset((
    b"cf-connecting-ip", b"cf-connecting-ipv6", b"cf-ipcountry", b"cf-pseudo-ipv4", b"client-ip", b"do-connecting-ip",
    b"fastly-client-ip", b"fly-client-ip", b"forwarded-for", b"incap-client-ip", b"proxy-client-ip",
    b"remote-addr", b"remote-email", b"remote-groups", b"remote-name", b"remote-user", b"true-client-ip",
    b"wl-proxy-client-ip", b"x-azure-clientip", b"x-azure-socketip", b"x-client-cert", b"x-client-ip",
    b"x-cluster-client-ip", b"x-envoy-downstream-service-cluster", b"x-envoy-downstream-service-node",
    b"x-envoy-external-address", b"x-envoy-peer-metadata", b"x-envoy-peer-metadata-id", b"x-forwarded",
    b"x-nf-client-connection-ip", b"x-original-forwarded-for", b"x-originating-ip", b"x-real-client-ip",
    b"x-remote-addr", b"x-remote-ip", b"x-remote-user", b"x-sucuri-clientip", b"x-true-client-ip",
    b"x-vercel-forwarded-for", b"x-vercel-proxied-for",
))  # fmt: skip
"""Headers in which proxies, load balancers and CDNs describe their client's identity and place."""
_CLIENTS_BEGIN = (
    b"cf-access-", b"cloudfront-viewer-", b"ssl-client-", b"tailscale-user-", b"x-amzn-mtls-", b"x-amzn-oidc-",
    b"x-appengine-", b"x-auth-request-", b"x-authentik-", b"x-forwarded-", b"x-goog-authenticated-user-",
    b"x-goog-iap-", b"x-ms-client-principal", b"x-ms-token-", b"x-pomerium-", b"x-ssl-client-", b"x-vercel-ip-",
    b"x-webauth-",
)  # fmt: skip
"""The same: those of proxies that sign people in carry their tokens and certificates, too."""
NOT_OF_REQUESTS = FORWARDED | _OF_BROWSERS | _CLIENTS
NOT_OF_REQUESTS_BEGIN = (INTERNAL, b"sec-", *_CLIENTS_BEGIN)
"""`sec-` is the browser's word on the page that asks. The gateway has judged it (`handler.py`), and a worker
that found it would refuse requests that the gateway let in."""

_ORDERS_TO_BROWSERS = frozenset((
    b"accept-ch", b"activate-storage-access", b"alt-svc", b"clear-site-data", b"critical-ch", b"document-policy",
    b"document-policy-report-only", b"expect-ct", b"feature-policy", b"integrity-policy", b"link", b"nel",
    b"no-vary-search", b"observe-browsing-topics", b"origin-agent-cluster", b"origin-trial", b"permissions-policy",
    b"referrer-policy", b"refresh", b"report-to", b"reporting-endpoints", b"secure-session-registration",
    b"service-worker-allowed", b"service-worker-navigation-preload", b"set-cookie", b"set-cookie2", b"set-login",
    b"sourcemap", b"speculation-rules", b"strict-transport-security", b"supports-loading-mode",
    b"timing-allow-origin", b"use-as-dictionary", b"x-content-security-policy", b"x-content-type-options",
    b"x-dns-prefetch-control", b"x-frame-options", b"x-permitted-cross-domain-policies", b"x-sourcemap",
    b"x-webkit-csp",
))  # fmt: skip
"""With these an upstream could make a browser keep, open or send something for the gateway's (console's) origin."""
_ORDERS_BEGIN = (
    INTERNAL, b"access-control-", b"attribution-reporting-", b"content-security-policy", b"cross-origin-",
    b"public-key-pins", b"sec-session-",
)  # fmt: skip
"""The same, and headers that only the gateway nearest to the client sends."""
_ORDERS_TO_PROXIES = frozenset((
    b"x-accel-charset", b"x-accel-expires", b"x-accel-limit-rate", b"x-accel-redirect", b"x-lighttpd-send-file",
    b"x-lighttpd-send-tempfile", b"x-reproxy-file", b"x-reproxy-url", b"x-sendfile", b"x-sendfile2",
))  # fmt: skip
"""Headers by which an upstream has a proxy before the gateway send other pages or files. `x-accel-buffering` passes:
a stream needs it."""
_LEADS_AWAY = frozenset((b"location", b"proxy-authenticate", b"proxy-authentication-info", b"www-authenticate"))
"""Clients follow a redirect with the request's body and with keys that are not in `Authorization`; browsers ask people
for a password in the gateway's name."""
NOT_OF_ANSWERS = _ORDERS_TO_BROWSERS | _ORDERS_TO_PROXIES | _LEADS_AWAY | {b"x-request-id"}
NOT_OF_ANSWERS_BEGIN = _ORDERS_BEGIN


def left_out(names: Collection[bytes], beginnings: tuple[bytes, ...]) -> IsLeftOut:
    """Return whether a name is one of `names`, or begins so, as a function that remembers its answers."""
    known = frozenset(names)

    def judge(name: bytes) -> bool:
        return name in known or name.startswith(beginnings)

    return RememberedLines(judge).__getitem__
