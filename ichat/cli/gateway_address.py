"""Where the gateway of a command is: by the flags, the environment, or `ichat.toml` in the current directory."""

import argparse
import os
import re
import ssl
import urllib.parse
from typing import NamedTuple

from ichat.config.own_secret import GATEWAY
from ichat.errors import EXIT_USAGE, Exit

USUAL_FILE = "ichat.toml"
"""The configuration that is used if it is in the current directory, and nothing else says where the gateway is."""


class GatewayAddress(NamedTuple):
    """Where a gateway is."""

    url: str
    tls: ssl.SSLContext | None = None
    state_directory: str | None = None
    """Where the gateway keeps its secret, if its configuration was named."""

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine, so that paths mean the same to it."""
        return urllib.parse.urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")


def add_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags that every command has."""
    common = usage.add_argument_group("the gateway")
    place = common.add_mutually_exclusive_group()
    place.add_argument("--gateway", "-g", metavar="URL", help=f"where it is (or ICHAT_GATEWAY; {GATEWAY})")
    place.add_argument("--config", "-c", metavar="FILE", help=f"its configuration; else {USUAL_FILE} here")
    common.add_argument("--api-key", metavar="KEY", help="better in ICHAT_ADMIN_KEY (chat, bench: ICHAT_API_KEY)")
    common.add_argument("--ca-certificates", metavar="FILE", help="authorities to believe, for https (PEM)")
    usage.add_argument("--json", action="store_true", help="write JSON, for programs")
    usage.add_argument("--wide", action="store_true", help="in tables, leave out no column and cut no name")


def config_for(args: argparse.Namespace) -> str | None:
    """Return the configuration that says where the gateway is; None: something else does.

    It is the file that the flags name, else USUAL_FILE if neither flags nor environment give an address.
    """
    if args.config or args.gateway or os.environ.get("ICHAT_GATEWAY"):
        return args.config
    return USUAL_FILE if os.path.isfile(USUAL_FILE) else None


def find_gateway(args: argparse.Namespace) -> GatewayAddress:
    """Return the gateway's address: by the flags, the environment or the file here, else the usual address.

    Raises Exit 64.
    """
    if config := config_for(args):
        return _configured(config, args.ca_certificates)
    url = args.gateway or os.environ.get("ICHAT_GATEWAY") or GATEWAY
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urllib.parse.urlsplit(url)
        is_right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        is_right = is_right and re.fullmatch(r"[!-~]+", url) and not (parts.query or parts.fragment or parts.username)
    except ValueError:
        is_right = False
    if not is_right:
        raise Exit(EXIT_USAGE, f"The gateway's address must be like {GATEWAY} or https://gw.example, not {url!r}.")
    url = url.rstrip("/").removesuffix("/v1")
    return GatewayAddress(url, _context(args.ca_certificates) if url.startswith("https:") else None)


def _configured(path: str, ca_certificates: str | None) -> GatewayAddress:
    """Return where a gateway with this configuration listens; its own certificate is trusted for any name.

    A file with mistakes, which a running gateway refuses, is still enough to find it.
    """
    import pathlib

    from ichat.config import load as configuration
    from ichat.config.own_secret import directory_for, is_running, local_url

    try:
        settings = configuration.load(pathlib.Path(path)).server_settings
    except Exit:
        found = configuration.settings_of_refused(pathlib.Path(path))
        if found is None or not is_running(directory_for(found)):
            raise
        settings = found
    if settings.port == 0:
        raise Exit(EXIT_USAGE, f"{path} lets the gateway choose any free port: use --gateway http://HOST:PORT instead.")
    url = local_url(settings.host, settings.port, has_tls=settings.tls_certificate is not None)
    if settings.tls_certificate is None:
        return GatewayAddress(url, None, directory_for(settings))
    context = _context(ca_certificates) if ca_certificates else _context_for(settings.tls_certificate)
    return GatewayAddress(url, context, directory_for(settings))


def _context(ca_certificates: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_certificates)
    except (ssl.SSLError, OSError) as error:
        raise Exit(EXIT_USAGE, f"The certificates {ca_certificates} cannot be used: {error}.") from error


def _context_for(certificate: str) -> ssl.SSLContext:
    """Return a context that trusts only this certificate. It may be self-signed or for other names."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        with open(certificate, encoding="ascii", errors="replace") as file:
            first = file.read().partition("-----END CERTIFICATE-----")
        context.load_verify_locations(cadata=first[0] + first[1])
    except (ssl.SSLError, OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Exit(EXIT_USAGE, f"The certificate {certificate} cannot be used: {why}.") from error
    return context
