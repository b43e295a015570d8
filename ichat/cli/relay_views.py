"""How a gateway's process and its relays look: their states, and how the processes before have ended."""

from collections import Counter
from collections.abc import Sequence

from ichat.cli.json_values import Json, object_of, objects_of
from ichat.cli.screen import NONE, Screen, duration, one_line, size

SECONDS_MAX = 2**36
"""A limit for times that a calendar can show, in seconds since 1970."""


def time_of(at: object) -> str | None:
    """Return a time in seconds since 1970 as operators read it; None if it is no such time."""
    if not isinstance(at, int | float) or not 0 <= at <= SECONDS_MAX:
        return None
    import datetime as dt

    return dt.datetime.fromtimestamp(at).astimezone().isoformat(" ", "seconds")


def summary_of(gateway: Json) -> str:
    """Return the states of a gateway's relays, and how much they have to do; "" if there are none."""
    relays = objects_of(gateway.get("relays"))
    counts = Counter(one_line(relay.get("state")) for relay in relays)
    parts: list[str] = []
    for state, count in sorted(counts.items()):
        own = [relay for relay in relays if one_line(relay.get("state")) == state]
        load = [_counted(own, name) for name in ("connections", "requests")]
        parts.append(f"{count} {state} with {' and '.join(load)}")
    return ", ".join(parts)


def _counted(relays: Sequence[Json], name: str) -> str:
    values = [relay.get(name) for relay in relays]
    count = sum([value for value in values if isinstance(value, int)])
    return f"{count} {name[:-1] if count == 1 else name}"


def facts_of(gateway: Json) -> list[tuple[str, str | None]]:
    """Return the facts about this start of a gateway, about its relays, and about the processes before."""
    crash, takeover = object_of(gateway.get("last_crash")), object_of(gateway.get("last_takeover"))
    relay, retiring = object_of(gateway.get("last_relay_crash")), gateway.get("retiring_pid")
    return [
        ("term", one_line(gateway["term"]) if gateway.get("term") else None),
        ("relays", summary_of(gateway) or None),
        ("last takeover", _told(takeover, "from ", _waited(takeover))),
        ("retiring", f"process {retiring} ends its connections" if retiring else None),
        ("last crash", _told(crash, "of ", _waited(crash) or "no relay was left")),
        (
            "relay crash",
            f"{time_of(relay.get('at')) or NONE}, relay {relay.get('number')} (process {relay.get('pid')})"
            f" {one_line(relay.get('how'))}" if relay else None,
        ),
    ]  # fmt: skip


def _told(event: Json, word: str, more: str) -> str | None:
    """Return when something happened to a process of the gateway; None if it did not happen."""
    if not event:
        return None
    process = f"process {event['pid']}" if event.get("pid") else "an unknown process"
    version = f" ({one_line(event['version'])})" if event.get("version") else ""
    return ", ".join(filter(None, (time_of(event.get("at")), f"{word}{process}{version}", more)))


def _waited(event: Json) -> str:
    waited_s = event.get("waited_s")
    return f"requests waited {waited_s:.2f} s" if isinstance(waited_s, int | float) else ""


def show_relays(screen: Screen, gateway: Json) -> None:
    """Show each relay in a line, if there are any."""
    relays = objects_of(gateway.get("relays"))
    if not relays:
        return
    screen.line("")
    keys = ("number", "pid", "state", "connections", "requests")
    screen.table(
        ("relay", "process", *keys[2:], "cpu", "memory", "restarts", "up"),
        (
            [*(relay.get(key) for key in keys), duration(relay.get("cpu_s")), size(relay.get("rss_bytes") or None),
             relay.get("restarts"), duration(relay.get("age_s"))]
            for relay in relays
        ),
    )  # fmt: skip
