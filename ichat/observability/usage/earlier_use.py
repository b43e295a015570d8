"""The usage before this process, for limits: the tokens of a month and a day, and the use of the last minute."""

import logging
import time
from collections.abc import Awaitable, Callable

import trio

from ichat.observability.usage.queries import UsageQuestion
from ichat.observability.usage.rows import CACHED, INPUT, MINUTE_S, OUTPUT, REQUESTS, Groups, Sums, minute_of
from ichat.observability.usage.store import OK, TooManyGroups
from ichat.security.period_limits import ModelTokens
from ichat.security.rate_limits import EarlierUse, Quotas

log = logging.getLogger(__name__)


async def restore_windows(
    read: Callable[[UsageQuestion], Awaitable[tuple[Groups, str]]],
    quotas: Quotas,
    wall: Callable[[], float] = time.time,
) -> None:
    """Pass the rows of this minute and of the last to the limits of a minute, as if all of it was used now.

    So a restart lets no key exceed such a limit. A client may be refused for up to a minute too long. `read` is that of
    the ledger.
    """
    if not quotas.has_windows:
        return
    minute, second = minute_of(wall()), int(trio.current_time())
    try:
        groups, storage = await read(UsageQuestion((minute - 1) * MINUTE_S, (minute + 1) * MINUTE_S, ("key",)))
    except TooManyGroups:
        groups, storage = {}, "the ledger cannot be added up in time"
    if storage != OK:
        log.error("%s: limits of a minute begin without the earlier usage", storage)
    quotas.restore_windows(
        EarlierUse(second, one.key, int(sums[REQUESTS]), int(sums[INPUT] + sums[OUTPUT]))
        for one, sums in groups.items()
    )


def tokens_by_model(month: Groups, today: Groups) -> list[ModelTokens]:
    """Return the tokens of each key and model today, and on the other days of the month."""
    sums = {(one.key, one.model): _tokens_of(found) for one, found in today.items()}
    used = [ModelTokens(*series, True, *tokens) for series, tokens in sums.items()]
    for one, found in month.items():
        before = sums.get((one.key, one.model), (0, 0, 0))
        rest = (all_ - part for all_, part in zip(_tokens_of(found), before, strict=True))
        used.append(ModelTokens(one.key, one.model, False, *rest))
    return used


def _tokens_of(sums: Sums) -> tuple[int, int, int]:
    return int(sums[INPUT]), int(sums[OUTPUT]), int(sums[CACHED])
