"""What each route of the control plane asks for."""

from collections.abc import Mapping
from typing import Literal

Rule = Literal["open", "data", "models", "metrics", "read", "write", "join"]
"""What a route asks for.

`open`: nothing. `data`: a client's key, if there are any. `models`: that, or the operator's. `write`: the operator's
key, or the gateway's own secret. `read`: the same, but nothing where no key of any kind is configured. `metrics`: as
`read`, unless `security.open_metrics`. `join`: the token, or the secret.
"""

ROUTES: Mapping[tuple[str, str], Rule] = {
    ("GET", "/health"): "open",
    ("GET", "/openapi.json"): "open",
    ("GET", "/"): "open",
    ("GET", "/console"): "open",
    ("GET", "/console/"): "open",
    ("GET", "/console/<path:file>"): "open",
    ("GET", "/metrics"): "metrics",
    ("GET", "/v1/models"): "models",
    ("GET", "/v1/models/<path:name>"): "models",
    ("POST", "/v1/workers/heartbeat"): "join",
    ("POST", "/register"): "join",
    ("POST", "/v1/workers/prefixes"): "join",
    ("GET", "/v1/logs/stream/<worker_id>"): "read",
    ("GET", "/v1/admin/workers"): "read",
    ("GET", "/v1/admin/workers/<worker_id>"): "read",
    ("POST", "/v1/admin/route"): "read",
    ("POST", "/v1/admin/workers/launch"): "write",
    ("DELETE", "/v1/admin/workers/<worker_id>"): "write",
    ("POST", "/v1/admin/models/load"): "write",
    ("POST", "/v1/admin/models/unload"): "write",
    ("POST", "/v1/admin/models/sleep"): "write",
    ("POST", "/v1/admin/models/wake"): "write",
    ("GET", "/v1/admin/cluster/status"): "read",
    ("GET", "/v1/admin/cluster/version"): "read",
    ("GET", "/v1/admin/engines"): "read",
    ("GET", "/v1/admin/engines/<backend>/flags"): "write",
    ("GET", "/v1/admin/config"): "read",
    ("GET", "/v1/admin/events"): "read",
    ("GET", "/v1/admin/history"): "read",
    ("GET", "/v1/admin/requests"): "read",
    ("DELETE", "/v1/admin/requests/<path:request_id>"): "write",
    ("POST", "/v1/admin/config/reload"): "write",
    ("GET", "/v1/admin/usage"): "read",
    ("GET", "/v1/usage"): "data",
    ("GET", "/v1/admin/keys"): "read",
    ("POST", "/v1/admin/keys"): "write",
    ("PATCH", "/v1/admin/keys/<name>"): "write",
    ("DELETE", "/v1/admin/keys/<name>"): "write",
}
"""The control plane's routes; all others are refused."""
