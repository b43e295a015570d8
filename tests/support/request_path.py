"""Which modules of the project one request passes through, and how often it goes from one into another.

An entry is a call from one module into another. Calls within a module do not count, nor do comprehensions, nor a
coroutine that continues where it waited.
"""

import dis
import inspect
import pathlib
import sys

import ichat

_ROOT = str(pathlib.Path(ichat.__file__).parent) + "/"
_NOT_CALLS = frozenset(("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<module>"))
PLUMBING = frozenset(("http/hub.py", "http/trio_wait.py", "http/h11_patch.py"))
"""The event loop's own modules: what they call counts, and how often they are called depends on the machine."""


class RequestPath:
    """Counts, in this thread, from `with` on until its end."""

    def __init__(self):
        self.entries = []
        """Each as (module that was left, module that was entered, function), in their order."""
        self._open = {}

    def __enter__(self):
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    @property
    def modules(self):
        """The modules that were entered, in their order."""
        return list(dict.fromkeys(module for _, module, _ in self.entries))

    def text(self):
        """Return the list of entries, and how many there are."""
        lines = [f"{source:>32} -> {module:<32} {name}" for source, module, name in self.entries]
        return "\n".join([*lines, f"{len(self.entries)} entries into {len(self.modules)} modules"])

    def _profile(self, frame, event, _):
        if event != "call" or not frame.f_code.co_filename.startswith(_ROOT) or frame.f_code.co_name in _NOT_CALLS:
            return
        module = frame.f_code.co_filename.removeprefix(_ROOT)
        if module in PLUMBING or self._goes_on(frame):
            return
        source, outermost = self._callers(frame)
        if source != module and outermost.startswith("http/"):  # other tasks do not belong to the request
            self.entries.append((source, module, getattr(frame.f_code, "co_qualname", frame.f_code.co_name)))

    def _goes_on(self, frame):
        """Return whether a coroutine goes on where it waited, which is no call."""
        if not frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_GENERATOR):
            return False
        seen = self._open.get(id(frame))
        self._open[id(frame)] = frame
        return seen is frame or frame.f_lasti > _first_instruction(frame.f_code)

    @staticmethod
    def _callers(frame):
        """Return the nearest module of the project that has called ("" for none), and the outermost one of the task."""
        found = []
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(_ROOT):
                found.append(name.removeprefix(_ROOT))
            frame = frame.f_back
        return found[1] if len(found) > 1 else "", found[-1]


def _first_instruction(code):
    """Return where the first line of a coroutine's own code begins, behind what makes it one."""
    begins = ("RETURN_GENERATOR", "RESUME")
    return max(
        (one.offset for one in dis.get_instructions(code) if one.opname in begins and one.offset < 16), default=0
    )
