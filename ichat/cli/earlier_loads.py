"""The memory of earlier loads, for commands that start nothing: read from a gateway's state directory."""

import os
import pathlib

from ichat.cli.gateway_address import USUAL_FILE
from ichat.cli.screen import note
from ichat.config import load as configuration
from ichat.config.own_secret import directory_for
from ichat.config.schema import ServerSettings
from ichat.errors import EXIT_USAGE, Exit
from ichat.placement.learnt import LearntMemories
from ichat.preflight.learnt_file import read_learnt


def read_earlier_loads(config: str | None, directory: str | None = None) -> LearntMemories:
    """Return the figures that a gateway has learnt; a note says why they cannot be read.

    The gateway is that of a file or of a state directory; without both, that of the usual file here, or the usual
    gateway of this user. Raises Exit 64.
    """
    found, why = read_learnt(_state_directory(config, directory))
    if why:
        note(why)
    return found


def _state_directory(config: str | None, directory: str | None) -> str | None:
    if directory is not None:
        if not os.path.isdir(directory):
            raise Exit(EXIT_USAGE, f"There is no directory {directory}: correct --state-directory.")
        return directory
    file = config or (USUAL_FILE if os.path.isfile(USUAL_FILE) else None)
    if file is None:
        return directory_for(ServerSettings())
    try:
        return directory_for(configuration.load(pathlib.Path(file)).server_settings)
    except Exit:
        settings = configuration.settings_of_refused(pathlib.Path(file))
        if settings is None:
            raise
        return directory_for(settings)
