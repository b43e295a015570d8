"""When a certificate ends. Python's TLS module has that only for a peer, so the DER form (X.690) is read here."""

import datetime as dt
import ssl

_SEQUENCE, _INTEGER, _VERSION = 0x30, 0x02, 0xA0
_UTC_TIME = 0x17
_PEM_BEGIN, _PEM_END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def validity_of(pem: str) -> tuple[dt.datetime, dt.datetime]:
    """Return from when to when the first certificate of a PEM text is valid. Raises ValueError."""
    begin, end = pem.find(_PEM_BEGIN), pem.find(_PEM_END)
    if begin < 0 or end < begin:
        raise ValueError("there is no certificate")
    try:
        certificate, _ = _value_of(ssl.PEM_cert_to_DER_cert(pem[begin : end + len(_PEM_END)]), _SEQUENCE)
        inner, _ = _value_of(certificate, _SEQUENCE)
        if inner[0] == _VERSION:
            _, inner = _value_of(inner, _VERSION)
        for tag in (_INTEGER, _SEQUENCE, _SEQUENCE):  # number, algorithm, issuer
            _, inner = _value_of(inner, tag)
        validity, _ = _value_of(inner, _SEQUENCE)
        first, rest = _time_of(validity)
        return first, _time_of(rest)[0]
    except IndexError as error:
        raise ValueError("the certificate is cut short") from error


def _value_of(data: bytes, tag: int | None) -> tuple[bytes, bytes]:
    """Return the content of the first element, and the rest of the data."""
    if tag is not None and data[0] != tag:
        raise ValueError("this is no certificate")
    size, start = data[1], 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(data[2:start], "big")
    return data[start : start + size], data[start + size :]


def _time_of(data: bytes) -> tuple[dt.datetime, bytes]:
    """Return the time at the beginning (RFC 5280, 4.1.2.5), and the rest of the data."""
    value, rest = _value_of(data, None)
    text = value.decode("ascii")
    if data[0] == _UTC_TIME:
        text = ("20" if int(text[:2]) < 50 else "19") + text
    return dt.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=dt.timezone.utc), rest
