"""The start of a process that asked for a gateway which ends meanwhile."""

import contextlib
import fcntl

import pytest
import trio

from ichat.config.schema import Config, ServerSettings
from ichat.roles.gateway import LOCK_LOOK_S, LOCK_LOOKS, state_of
from ichat.supervisor.state import DirectoryTaken


async def entered(directory, stack):
    config = Config(server_settings=ServerSettings(state_directory=str(directory)))
    return await state_of(config, None, stack, waits=True)


async def test_the_lock_of_a_process_that_ends_is_waited_for(tmp_path, autojump_clock):
    """It is got at the first try after that process has left it, and is refused after the last."""
    began_at = trio.current_time()
    with contextlib.ExitStack() as stack:
        await entered(tmp_path, stack)
        assert trio.current_time() == began_at
    with (tmp_path / "lock").open("rb") as lock, contextlib.ExitStack() as stack:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DirectoryTaken):
            await entered(tmp_path, stack)
        assert trio.current_time() >= began_at + LOCK_LOOKS * LOCK_LOOK_S
        async with trio.open_nursery() as nursery:
            nursery.start_soon(entered, tmp_path, stack)
            await trio.sleep(1.5 * LOCK_LOOK_S)
            released_at = trio.current_time()
            fcntl.flock(lock, fcntl.LOCK_UN)
        assert trio.current_time() < released_at + LOCK_LOOK_S
