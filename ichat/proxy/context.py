"""The objects that all exchanges of a gateway share."""

from collections.abc import Callable

from ichat.config.schema import Config
from ichat.fleet.fleet_view import DirectoryView, TableView
from ichat.http.body_mover import ChunkGapHistogram
from ichat.http.pool import Pool
from ichat.proxy.engine_control import DropNotices
from ichat.proxy.late_usage import LateUsageBook
from ichat.proxy.shadow import Shadows
from ichat.routing.aliases import Aliases
from ichat.routing.balancer import Balancer
from ichat.routing.endpoint import Endpoint
from ichat.routing.prompt_lengths import PromptLengths
from ichat.security.auth import Auth
from ichat.security.keys import Seal
from ichat.security.rate_limits import Quotas


class GatewayContext:
    """The objects that all exchanges share; another configuration changes them while they run."""

    def __init__(
        self,
        config: Config,
        auth: Auth,
        quotas: Quotas,
        *,
        directory: DirectoryView,
        table: TableView,
        balancer: Balancer,
        pool: Pool,
        gaps: Callable[[str], ChunkGapHistogram],
        shadows: Shadows,
    ) -> None:
        """`gaps` returns the histogram for the gaps in a model's streams."""
        self.directory = directory
        self.table = table
        self.balancer = balancer
        self.pool = pool
        self.gaps = gaps
        self.shadows = shadows
        self.prompt_lengths = PromptLengths()
        self.quotas = quotas
        self.late_usage = LateUsageBook(table)
        self.drop_notices = DropNotices()
        self.auth = auth
        self.seal = Seal()
        """Signs the callers of requests for the control plane."""
        self.reconfigure(config)

    def __repr__(self) -> str:
        return f"<GatewayContext {self.balancer!r}, {self.pool!r}>"

    def endpoint_of(self, endpoint_id: str) -> Endpoint | None:
        """Return the endpoint of this id; None if it is not known, or not known yet."""
        worker = self.table.get(endpoint_id)
        if worker is not None:
            return self.table.endpoint_of(worker)
        routes = (route for routes in self.directory.external.values() for route in routes)
        return next((route for route in routes if route.id == endpoint_id.encode()), None)

    def provider_of(self, endpoint_id: str) -> str:
        """Return the name of an endpoint's provider in spans: a worker's engine, or the API of an external route."""
        worker = self.table.get(endpoint_id)
        return "openai" if worker is None else worker.engine

    def reconfigure(self, config: Config) -> None:
        """Go on with the timeouts and settings of another configuration."""
        self.aliases = Aliases.from_config(config)
        aliases = self.aliases.by_name.values()
        self.prompt_lengths.keep_only({model for one in aliases if one.longer is not None for model in one.models})
        self.timeouts = config.timeouts
        self.endpoint_timeouts = (config.timeouts.first_byte_s, config.timeouts.stream_stall_s)
        """How long an endpoint without its own timeouts may need for its first byte, and between two, in seconds."""
        self.settings = config.server_settings
        self.session_header = config.routing.session_header.lower().encode()
        """Requests with the same value of this header go to the same endpoint; empty: none do."""
