"""A process that downloads a model (`ichat.pyz download`); `pull` and the gateway start it in an engine's environment.

It writes a report a line to standard output, and ends with the process that has started it: at the end of standard
input. Its exit code is 0 if the model is here, and whole.
"""

import contextlib
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import attrs

from ichat.config.command_line import CommandLineParser
from ichat.config.hubs import HUBS, Hub
from ichat.config.schema import ManagedWorkerConfig
from ichat.downloads.hub_client import (
    DownloadFailed,
    HubClient,
    HubIndex,
    HubWait,
    lack_of_room,
    sentence_of_disk,
    wanted,
)
from ichat.downloads.huggingface import HuggingFace
from ichat.downloads.model_lock import ModelLock, NoLocks, pause, write_json
from ichat.downloads.modelscope import ModelScope
from ichat.downloads.place import PACKAGES, USUAL, ModelPlace, place_of, read_list, whole_version
from ichat.downloads.report import DownloadReport, Rate
from ichat.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from ichat.preflight.hub import HubFacts, read_hub

REPORT_S = 1.0
"""Seconds between two reports."""
RATE_S = 10.0
"""The seconds over which the rate is measured."""
POLL_S = 0.5
"""Seconds between two looks at a lock that another process has."""
HUB_WAIT_S_MAX = 60.0
"""The longest pause that a hub may ask for; after a longer pause the download has failed."""
HUB_WAITS_MAX = 3
MODELSCOPE = "https://modelscope.cn"


@attrs.frozen
class DownloadWish:
    """The model that is wanted."""

    place: ModelPlace
    revision: str
    facts: HubFacts
    stall_s: float
    """The seconds without a new byte after which the download has failed."""
    wants_all: bool = False
    """Whether all files are wanted, also those that engines do not read."""
    is_fresh: bool = False
    """Whether the hub is asked although the model is here."""


def parser() -> CommandLineParser:
    """Return the parser of the process' command line."""
    usage = CommandLineParser(
        prog="ichat.pyz download", description="Download a model; `pull` and the gateway start this themselves."
    )
    usage.add_argument("model")
    usage.add_argument("--hub", choices=HUBS, required=True)
    usage.add_argument("--revision", default="")
    usage.add_argument("--cache", default=None)
    usage.add_argument("--stall-s", type=float, required=True)
    usage.add_argument("--all-files", action="store_true")
    usage.add_argument("--fresh", action="store_true")
    return usage


def run(argv: Sequence[str]) -> int:
    """Download a model, and return the exit code."""
    args = parser().parse_args(list(argv))
    output = os.dup(1)
    os.dup2(2, 1)  # nothing else writes to the pipe
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    hub: Hub = args.hub
    place = place_of(hub, args.model, os.environ, args.cache)
    wish = DownloadWish(
        place, args.revision or USUAL[hub], facts_of(place, os.environ), args.stall_s, args.all_files, args.fresh
    )

    def show(report: DownloadReport) -> None:
        with contextlib.suppress(OSError):
            os.write(output, f"{report.line()}\n".encode())

    try:
        directory = _pull(wish, show)
    except (DownloadFailed, HubWait) as error:
        show(DownloadReport("failed", str(error)))
        code = EXIT_UNAVAILABLE
    except OSError as error:
        sentence = sentence_of_disk(error, place.name, place.cache)
        show(DownloadReport("failed", sentence or f"{place.name} was not downloaded: {error}."))
        code = EXIT_UNAVAILABLE
    else:
        show(DownloadReport("done", directory=directory))
        code = 0
    sys.stderr.flush()
    os._exit(code)  # threads of the library may still wait for the network


def facts_of(place: ModelPlace, environment: Mapping[str, str]) -> HubFacts:
    """Return the facts about a model's hub, by the environment."""
    named = ManagedWorkerConfig(place.name, place.name, backend_args={"download_dir": place.cache})
    without = {name: value for name, value in environment.items() if not name.endswith("_USE_MODELSCOPE")}
    facts = read_hub(named, without)
    assert facts is not None
    if place.hub == "huggingface":
        return facts
    hub = environment.get("MODELSCOPE_ENDPOINT") or MODELSCOPE
    return attrs.evolve(facts, hub=hub.rstrip("/"), token=environment.get("MODELSCOPE_API_TOKEN", ""))


def _end_with_parent() -> None:
    """Wait for the end of standard input, and end this process."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(EXIT_USAGE)


def _pull(wish: DownloadWish, show: Callable[[DownloadReport], None]) -> str:
    """Return the directory of the model, once all its files are here. Raises DownloadFailed, HubWait and OSError."""
    lock = ModelLock(wish.place.locks)
    try:
        while True:
            if not wish.is_fresh and (directory := whole_version(wish.place, wish.revision)) is not None:
                return directory
            if wish.facts.is_offline:
                raise DownloadFailed(
                    f"{wish.place.name} is not whole in {wish.place.cache}, and HF_HUB_OFFLINE keeps the rest away:"
                    " unset it, or copy the model there."
                )
            with lock.held() as holder:
                if holder is None:
                    return _download(wish, lock, show)
                found = lock.shown()
                words = f"waiting for {holder.words}, which downloads the same model"
                show(
                    DownloadReport("waiting", words) if found is None else attrs.evolve(found, why=f"by {holder.words}")
                )
            pause(POLL_S)
    except NoLocks as error:
        raise DownloadFailed(
            f"The file system of {wish.place.cache} has no locks ({error}): name a directory on another disk"
            " (--cache, HF_HOME)."
        ) from error


def _download(wish: DownloadWish, lock: ModelLock, show: Callable[[DownloadReport], None]) -> str:
    """Download the files that are missing, and return the directory. Raises DownloadFailed, HubWait and OSError."""
    place = wish.place
    show(DownloadReport("starting", f"asking {wish.facts.place} for the files of {place.name}"))
    client = _client_of(wish)
    index = wanted(_index_of(client, wish, show), wants_all=wish.wants_all)
    total = sum(one.size for one in index.files)
    missing = total - client.arrived_bytes(index)
    disk = os.statvfs(_existing(place.cache))
    if lack := lack_of_room(place.name, place.cache, missing, disk.f_bavail * disk.f_frsize):
        raise DownloadFailed(lack)
    earlier = read_list(place.list_of(index.version)) or {}
    write_json(place.list_of(index.version), {**earlier, **{one.path: one.size for one in index.files}})
    ended = threading.Event()
    meter = threading.Thread(target=_measure, args=(wish, client, index, ended, partial(_show_both, lock, show)))
    meter.daemon = True
    meter.start()
    try:
        directory = client.fetch(index)
    finally:
        ended.set()
        meter.join(POLL_S)
    if place.hub == "huggingface" and wish.revision != index.version:
        _note_revision(place, wish.revision, index.version)
    if whole_version(place, wish.revision) is None:
        raise DownloadFailed(f"{place.name} is not whole after its download: ask again.")
    return directory


def _client_of(wish: DownloadWish) -> HubClient:
    """Return the hub's library. Raises DownloadFailed if it is not installed."""
    try:
        if wish.place.hub == "huggingface":
            return HuggingFace(wish.place, wish.facts)
        return ModelScope(wish.place, wish.facts, wish.revision)
    except ImportError as error:
        package = PACKAGES[wish.place.hub]
        raise DownloadFailed(
            f"{sys.executable} has no {package} ({error}): `uv pip install --python {sys.executable} {package}`, or"
            " name another interpreter (--python)."
        ) from error


def _index_of(client: HubClient, wish: DownloadWish, show: Callable[[DownloadReport], None]) -> HubIndex:
    """Return the model's files; a short pause that the hub asks for is kept. Raises DownloadFailed and HubWait."""
    for _ in range(HUB_WAITS_MAX):
        try:
            return client.index(wish.revision)
        except HubWait as wait:
            if wait.seconds > HUB_WAIT_S_MAX:
                raise
            show(DownloadReport("waiting", f"waiting for {wait.seconds:g} s, as {wish.facts.place} asks (429)"))
            pause(wait.seconds)
    return client.index(wish.revision)


def _existing(path: str) -> str:
    """Return a directory, or its nearest parent that is there."""
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def _note_revision(place: ModelPlace, revision: str, version: str) -> None:
    """Note which version a revision is, as `huggingface_hub` does."""
    path = pathlib.Path(place.directory, "refs", revision)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(version, encoding="ascii")


def _show_both(lock: ModelLock, show: Callable[[DownloadReport], None], report: DownloadReport) -> None:
    lock.show(report)
    show(report)


def _measure(
    wish: DownloadWish,
    client: HubClient,
    index: HubIndex,
    ended: threading.Event,
    show: Callable[[DownloadReport], None],
) -> None:
    """Show how far the download is until it has ended; end this process if no byte arrives for too long."""
    rate, total = Rate(RATE_S), sum(one.size for one in index.files)
    while not ended.is_set():
        now, arrived = time.monotonic(), client.arrived_bytes(index)
        speed = rate.add(arrived, now)
        if rate.still_s(now) >= wish.stall_s:
            what = client.waits_for or f"{wish.facts.place} has sent nothing of {wish.place.name}"
            show(
                DownloadReport(
                    "failed", f"No byte for {wish.stall_s:g} s ({what}): ask again, the download goes on then."
                )
            )
            os._exit(EXIT_UNAVAILABLE)
        show(DownloadReport("downloading", client.waits_for, arrived, total, speed))
        ended.wait(REPORT_S)
