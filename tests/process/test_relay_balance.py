"""The few kept connections of a proxy are shared by all relays, also if it has opened all of them at once."""

import collections

import trio
from support.deployments import free_port
from support.peers import until
from support.programs import LIMIT_S
from support.relay_site import Result, ask, clients_of, site_of

RELAYS, CONNECTIONS = 3, 32
WITHIN = 0.12
"""Of the mean."""


class Proxy:
    """A client with a fixed number of connections, all in use, of which each is replaced when it ends."""

    def __init__(self, site):
        self._site = site
        self.ports = {}
        """Of its connections."""
        self.answered = collections.Counter()
        """Its requests, by the connection."""

    async def run(self, number):
        while True:
            result = Result()
            async with await self._site.connect(result) as stream:
                self.ports[number] = result.port
                while not result.is_last:
                    result = Result()
                    await ask(stream, {"model": "m"}, result)
                    assert result.status == 200
                    self.answered[number] += 1

    def shares(self):
        """Return how many of the connections each relay has."""
        ports = {*self.ports.values()}
        return [len(clients_of(relay) & ports) for relay in self._site.relays().values()]

    def is_even(self):
        mean, shares = CONNECTIONS / RELAYS, self.shares()
        return sum(shares) == CONNECTIONS and all(abs(share - mean) <= WITHIN * mean for share in shares)

    async def stays_even(self):
        """Wait until the shares are even; return whether no connection ends then, for ten requests of each."""
        await until(self.is_even)
        ports, answered = dict(self.ports), self.answered.total()
        await until(lambda: self.answered.total() > answered + 10 * CONNECTIONS)
        return self.ports == ports


async def test_kept_connections_of_a_proxy_become_even(gateway):
    """Relays with more than their share end some, each with a whole response, and no request fails."""
    async with site_of(gateway, free_port(), RELAYS) as site, trio.open_nursery() as nursery:
        site.upstream.hold_s = 0.02
        proxy = Proxy(site)
        for number in range(CONNECTIONS):
            nursery.start_soon(proxy.run, number)
        await until(lambda: len(proxy.answered) == CONNECTIONS)
        with trio.fail_after(LIMIT_S):  # connections that were told to end when the shares became even still end
            while not await proxy.stays_even():
                pass
        nursery.cancel_scope.cancel()
