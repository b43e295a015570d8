"""Prefixes: the messages between the gateway and its workers about the contents of the engines' caches.

A *prefix* is the beginning of the source of a request's prompt, as bytes of its body. Its *chain* is the digests of
its first 256 bytes, its first 512, and so on: see BOUNDARIES. The gateway sends the chain of a request to the worker,
and the worker reports later which of the digests its engine no longer holds. Neither needs the model's tokenizer.
"""

import re
from collections.abc import Sequence

import attrs
from cattrs.errors import BaseValidationError

from ichat import errors
from ichat.config.strict import checked, problems_of, section_hook, strict_converter

PREFIX_HEADER = b"x-ichat-prefix"
"""In a response: the bytes of the prefix that the worker was expected to have cached, and all of them: `6144/8190`.

In a request of the gateway to a worker: the length of the prefix in bytes and its chain in hexadecimal, `8190;d41d8c…`.
"""
PREFIXES_PATH = b"/v1/workers/prefixes"
"""Where the gateway receives workers' reports."""
DIGEST_BYTES = 8
BOUNDARIES: Sequence[int] = tuple(
    boundary
    for start, end, step in (
        (256, 2048, 256), (2560, 4096, 512), (5120, 8192, 1024), (10240, 32768, 2048), (36864, 65536, 4096),
        (73728, 73728 + 59 * 8192, 8192),
    )
    for boundary in range(start, end + 1, step)
)  # fmt: skip
"""The lengths in bytes that have digests: a chain ends at the last, and its n-th digest is of the n-th length."""
REPORTED_MAX = 4096
"""The most digests of each kind in a report."""
_CHAIN = re.compile(rb"([0-9]{1,12});((?:[0-9a-f]{16}){1,%d})" % len(BOUNDARIES))
_DIGESTS = re.compile(r"(?:[0-9a-f]{16} )*")


@attrs.frozen
class SentChain:
    """The chain of a request, as a worker gets it."""

    length: int
    """Of the whole prefix, in bytes."""
    digests: Sequence[bytes]


def chain_header(length: int, digests: Sequence[bytes]) -> bytes:
    """Return the value of PREFIX_HEADER in a request for a worker."""
    return b"%d;%b" % (length, b"".join(digests).hex().encode())


def parse_chain(value: bytes) -> SentChain | None:
    """Return the chain in the value of PREFIX_HEADER in a request; None for anything else."""
    match = _CHAIN.fullmatch(value)
    if match is None:
        return None
    data = bytes.fromhex(match[2].decode())
    return SentChain(int(match[1]), [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)])


def _are_digests(values: list[str]) -> None:
    """Raise ValueError for anything but digests; thousands of them are checked as a single text, as that is quick."""
    try:
        text = " ".join([*values, ""])
    except TypeError:
        text = "?"
    is_right = len(text) == len(values) * 17 and _DIGESTS.fullmatch(text)  # so no value has a space
    if len(values) > REPORTED_MAX or not is_right:
        raise ValueError(f"must be at most {REPORTED_MAX} digests of 16 hexadecimal digits")


@attrs.frozen
class PrefixReport:
    """A worker's report of its engine's cache. The parts apply in the order `cleared`, `have`, `gone`."""

    worker_id: str
    start_id: str
    """Identifies the start of the worker, as in its heartbeats."""
    cleared: bool = False
    """Whether the gateway must forget its knowledge of the cache."""
    have: list[str] = checked(_are_digests, attrs.Factory(list[str]), {"maxItems": REPORTED_MAX})
    """Digests in hexadecimal of prefixes that the cache holds."""
    gone: list[str] = checked(_are_digests, attrs.Factory(list[str]), {"maxItems": REPORTED_MAX})
    """Digests of prefixes that it no longer holds."""


_converter = strict_converter(forbid_extra_keys=False)
_converter.register_structure_hook_func(lambda kind: kind == list[str], lambda values, _: values)  # see _are_digests
_structure = section_hook(PrefixReport, _converter)


def parse_report(body: object) -> PrefixReport:
    """Return the report in parsed JSON; unknown keys are ignored. Raises ApiError 400."""
    try:
        return _structure(body, PrefixReport)
    except BaseValidationError as error:
        raise errors.bad_request(f"This is not a report of prefixes: {'; '.join(problems_of(error))}.") from error
    except ValueError as error:
        raise errors.bad_request(f"A report of prefixes is a JSON object: {error}.") from error
