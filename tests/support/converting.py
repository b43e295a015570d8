"""Conversions of other gateways' files, for tests: each result is a configuration that iChat accepts."""

import tomllib

from ichat.config import load as configuration
from ichat.convert.command import convert


def converted(text, product=None):
    """Return the TOML of a YAML text, which iChat accepts."""
    written = convert(text, "config.yaml", product).text()
    check(written)
    return written


def check(text):
    """Raise Exit if iChat refuses a configuration."""
    return configuration.parse(text, "result")


def table_of(text):
    """Return the tables of TOML."""
    return tomllib.loads(text)
