"""A linear expression for header lines in place of h11's own.

h11's expression can give blanks back to what follows them. A line of many blanks that does not match costs quadratic
time: half a minute of the only thread for one head of 64 KiB, which any client can send. Ours differs in its possessive
blanks only, and reads the same lines in the same way (tests/unit/http/test_heads.py). It can go with h11's expression.
"""

import re

import h11._readers

_TOKEN = rb"[-!#$%&'*+.^_`|~0-9a-zA-Z]+"
_TEXT = rb"[^\x00\s]+"
HEADER_FIELD = re.compile(
    rb"(?P<field_name>%b):[ \t]*+(?P<field_value>(%b(?:[ \t]+%b)*)?)[ \t]*+" % (_TOKEN, _TEXT, _TEXT)
)
_REPLACED = HEADER_FIELD.pattern.replace(rb"[ \t]*+", rb"[ \t]*")


def apply() -> None:
    """Make h11 read header lines in linear time, in the whole process; a version with another expression keeps that."""
    if h11._readers.header_field_re.pattern == _REPLACED:
        h11._readers.header_field_re = HEADER_FIELD
