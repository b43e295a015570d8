"""How a gateway begins to listen, and its first lines in the log: its address, and settings that let strangers in.

The link to the console has the gateway's secret, so only a terminal gets the link.
A log gets a command that prints it.
"""

import logging
import os
import pathlib
import socket
import sys

import trio

from ichat.admin.reload import Reloader
from ichat.config.own_secret import GATEWAY, console_link, local_url
from ichat.config.schema import ServerSettings
from ichat.errors import EXIT_UNAVAILABLE, Exit
from ichat.http.listeners import adopt_listeners, close_all, open_listeners, port_of
from ichat.preflight.facts import port_holders
from ichat.preflight.obstacles import problems_of_port
from ichat.proxy.context import GatewayContext
from ichat.security.addresses import is_loopback
from ichat.service_manager import Notifier

log = logging.getLogger(__name__)


async def listen(settings: ServerSettings, notifier: Notifier, adopted: list[socket.socket]) -> list[socket.socket]:
    """Listen as configured: with the listeners of relays, or the service manager's where they have these addresses.

    Raises Exit 69 if another process has the address.
    """
    handed = adopt_listeners(notifier.descriptors)
    if adopted:
        close_all(handed)  # the same sockets, if they have these addresses
        return adopted
    try:
        listeners = await open_listeners(settings.host, settings.port, handed)
    except Exit:
        holders = await trio.to_thread.run_sync(port_holders, settings.port)  # noqa: ASYNC120 then the task ends
        if any(one.relay_of for one in holders):
            [sentence] = problems_of_port(settings.host, settings.port, "taken", holders)
            raise Exit(EXIT_UNAVAILABLE, sentence) from None
        raise
    for sock in handed:
        if sock not in listeners:
            log.warning(
                "the service manager's socket %s is not used: it has no address of server_settings.host and port",
                sock.getsockname(),
            )
            sock.close()
    return listeners


def announce(context: GatewayContext, listeners: list[socket.socket], file: pathlib.Path | None) -> None:
    """Log where the gateway listens, and warn of open access where no keys are configured.

    `file` is the file of its configuration.
    """
    host, port, auth = context.settings.host, port_of(listeners), context.auth
    log.info("the gateway listens on %s:%d", host, port)
    if "*" in context.settings.cors_origins and not auth.has_keys:
        log.warning(
            'server_settings.cors_origins is "*" and no keys are configured: ANY PAGE that a browser opens that reaches'
            " this gateway MAY USE EVERY MODEL. Name the origins of your pages, or give clients keys."
        )
    if context.settings.console:
        address = listeners[0].getsockname()[0]
        _show_console(context, local_url(address, port, has_tls=context.settings.tls_certificate is not None), file)
    if all(is_loopback(listener.getsockname()[0]) for listener in listeners) or (auth.has_keys and auth.has_admin_key):
        return
    if not auth.has_keys:
        log.info(
            "clients need no key, so they may ask by an address or by %s alone: server_settings.hosts adds names",
            ", ".join(auth.site.names),
        )
        log.warning(
            "no keys are configured: EVERY CLIENT THAT REACHES %s:%d MAY USE EVERY MODEL. Give each client one in"
            " [[security.keys]] (`./ichat.pyz key` makes it), or let server_settings.host be 127.0.0.1.",
            host,
            port,
        )
    if auth.is_bare:
        log.warning("every client that reaches %s may also read logs and states: see security.admin_key_env", host)
    if not auth.has_admin_key:
        log.info("only this user of this machine may change anything: see security.admin_key_env")


def announce_emptiness(reloader: Reloader) -> None:
    """Log what to do with a gateway that was started without a configuration."""
    if reloader.path is not None and not os.path.lexists(reloader.path):
        log.info(
            "no %s here: launch a model on the console or with `./ichat.pyz run MODEL`; the gateway loads the file"
            " as soon as it is there",
            reloader.path,
        )


def _show_console(context: GatewayContext, url: str, file: pathlib.Path | None) -> None:
    """Print the console's link, with its secret if any, to a terminal; others read a log too, so it gets none."""
    if not sys.stderr.isatty():
        place = "" if url == GATEWAY else f" -c {file}" if file and context.settings.port else f" --gateway {url}"
        log.info("`./ichat.pyz console%s` prints the console's link", place)
        return
    log.info("the console: %s", console_link(url, "" if context.auth.has_admin_key else context.auth.secret))
