# pyright: basic, reportMissingImports=false, reportArgumentType=false
"""The `__main__.py` of ichat.pyz: it runs before anything of the archive is unpacked or imported.

Any Python runs it, Python 2 too, so that each can name the missing thing in a sentence. It is no module of the package.
"""

try:
    import _signal as signal  # it is loaded already; the import of `signal` is slow enough to be interrupted
except ImportError:  # Python 2
    import signal
import os
import sys

NEEDED = (3, 10)
"""The oldest version of Python that runs iChat."""
BUILT_FOR = ""
"""The machine's architecture, which `./build` writes here: psutil is compiled for it."""
EXIT_UNAVAILABLE = 69
EXIT_INTERRUPTED = 130


def _end(*_):
    """End at once at Ctrl-C."""
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)  # until a command has its own way to end


def main():
    """Unpack the archive if necessary, and run its command line."""
    if sys.version_info < NEEDED:
        _fail(
            "ichat.pyz needs CPython %d.%d or newer, and %s is Python %d.%d: run it with a newer Python, such as"
            " `python3.12 ichat.pyz`."
            % (NEEDED[0], NEEDED[1], sys.executable, sys.version_info[0], sys.version_info[1])
        )
    if BUILT_FOR and os.uname()[4] != BUILT_FOR:
        _fail(
            "ichat.pyz was built for %s, and this machine is %s: build it here (`./build`), or install the wheel of the"
            " same release." % (BUILT_FOR, os.uname()[4])
        )
    if not os.environ.get("SHIV_ROOT"):
        root = next(filter(_can_unpack, _roots()), None)
        if root is None:
            _fail(
                "ichat.pyz unpacks itself once, and none of these directories can be written: %s: set SHIV_ROOT to"
                " a directory that can." % ", ".join(_roots())
            )
        if root != _roots()[0]:
            os.environ["SHIV_ROOT"] = root

    import _bootstrap  # shiv's

    extract = _bootstrap.extract_site_packages

    def extract_or_fail(archive, target, *args):
        try:
            extract(archive, target, *args)
        except OSError as error:
            _fail(
                "ichat.pyz cannot unpack itself under %s (%s): set SHIV_ROOT to a directory that can be written, on a"
                " disk with 20 MB of room." % (target.parent, error.strerror or error)
            )

    _bootstrap.extract_site_packages = extract_or_fail
    try:
        _bootstrap.bootstrap()
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end)


def _roots():
    """Return the directories under which it may be unpacked, shiv's own first; without a home it has none."""
    import tempfile

    roots = [os.path.expanduser(os.path.join("~", ".shiv"))]
    if os.environ.get("XDG_CACHE_HOME"):
        roots.append(os.path.join(os.environ["XDG_CACHE_HOME"], "shiv"))
    roots.append(os.path.join(tempfile.gettempdir(), "ichat-shiv-%d" % os.getuid()))
    return roots


def _can_unpack(root):
    """Return whether the archive can be unpacked under a directory, or has been already. A missing directory is made.

    If others can write beside it, it must be this user's alone.
    """
    import stat

    if not os.path.isabs(root):  # it has no home
        return False
    try:
        if not os.path.isdir(root):
            os.makedirs(root, 0o700)
        found, above = os.lstat(root), os.stat(os.path.dirname(root))
    except OSError:
        return False
    if above.st_mode & stat.S_IWOTH and (found.st_uid != os.getuid() or found.st_mode & 0o077):
        return False
    return os.access(root, os.W_OK | os.X_OK) or _is_unpacked(root)


def _is_unpacked(root):
    """Return whether this archive has been unpacked under a directory that cannot be written, as in an image."""
    import json
    import zipfile

    with zipfile.ZipFile(sys.argv[0]) as archive:
        build_id = json.loads(archive.read("environment.json").decode())["build_id"]
    name = os.path.basename(os.path.realpath(sys.argv[0]))
    return os.path.isdir(os.path.join(root, "%s_%s" % (name, build_id), "site-packages"))


def _fail(sentence):
    sys.stderr.write(sentence + "\n")
    sys.exit(EXIT_UNAVAILABLE)


if __name__ == "__main__":
    main()
