"""Reloads, crashes and ends of the gateway at random, in virtual time, for minutes.

    ./build test slow -k gateway_lives

`ICHAT_CHAOS_MINUTES` says how long it goes on (10). A life that ends badly says its seed: `live(seed, monkeypatch)` of
`tests/support/gateway_lives.py` repeats it.
"""

import os
import secrets
import time

from support.gateway_lives import live


def test_gateway_lives(monkeypatch):
    """In the end the wanted workers run, each with one record, and nothing else is left."""
    ends_at = time.monotonic() + 60 * float(os.environ.get("ICHAT_CHAOS_MINUTES", "10"))
    first = number = secrets.randbelow(1_000_000_000)
    while time.monotonic() < ends_at:
        with monkeypatch.context() as patches:
            live(number, patches)
        number += 1
    print(f"{number - first} lives")
