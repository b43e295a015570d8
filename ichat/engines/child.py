"""What an engine's child processes import first, so that none of them outlives the worker.

multiprocessing makes a spawned child import its parent's main module under the name `__mp_main__`. A zipapp's main
module is not imported there, so `adopt_children` puts this module in its place. In the child, the kernel is asked to
end it when the thread that started it ends: the engine's thread, which lasts as long as the worker, however the
worker ends. Grandchildren get the same treatment, since they inherit the main module.
"""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__mp_main__":
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_children() -> None:
    """Make every process that multiprocessing spawns from now on import this module first."""
    main = sys.modules["__main__"]
    main.__spec__ = None
    main.__file__ = __file__
