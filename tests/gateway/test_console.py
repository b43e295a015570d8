"""The console's files: what is served, with which headers, and what is not."""

import gzip
import json
import pathlib
import re

import pytest

from ichat.console.files import HERE, read_file

ROOT = pathlib.Path(__file__).parents[2]
OWN = sorted(path for path in HERE.rglob("*") if path.suffix in (".js", ".html", ".css"))


async def get(client, path, headers=b""):
    await client.send(b"GET %b HTTP/1.1\r\nhost: localhost\r\n%b\r\n" % (path, headers))
    return await client.response()


async def test_the_root_redirects_browsers_and_describes_itself_to_programs(gateway_to, connect):
    """`/` is a redirect where HTML is accepted, and JSON otherwise."""
    client = await connect(await gateway_to({}))
    status, headers, _ = await get(client, b"/", b"accept: text/html,*/*\r\n")
    assert (status, headers[b"location"], headers[b"vary"]) == (303, b"/console/", b"accept")
    status, headers, body = await get(client, b"/", b"accept: */*\r\n")
    assert status == 200
    assert json.loads(body) == {
        "name": "ichat", "version": "0.1.0", "console": "/console/", "openapi": "/openapi.json", "api_base": "/v1",
    }  # fmt: skip
    status, headers, _ = await get(client, b"/console")
    assert (status, headers[b"location"]) == (308, b"/console/")


async def test_the_page_has_a_strict_policy(gateway_to, connect):
    """Scripts and requests stay with the gateway, no page may frame it, and its import map is the one that is let in."""
    client = await connect(await gateway_to({}))
    status, headers, body = await get(client, b"/console/")
    assert status == 200
    policy = dict(part.strip().partition(" ")[::2] for part in headers[b"content-security-policy"].decode().split(";"))
    assert policy["default-src"] == "'none'"
    assert re.fullmatch(r"'self' 'sha256-[A-Za-z0-9+/]{43}='", policy["script-src"])
    assert policy["connect-src"] == policy["style-src"] == "'self'"
    assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert headers[b"referrer-policy"] == b"no-referrer"
    assert headers[b"cross-origin-opener-policy"] == headers[b"cross-origin-resource-policy"] == b"same-origin"
    assert body.count(b"<script") == body.count(b"<script src=") + 1, "only the import map is inline"


async def test_a_file_that_has_not_changed_is_not_sent_again(gateway_to, connect):
    """A browser asks each time, with the tag of what it has."""
    client = await connect(await gateway_to({}))
    status, headers, body = await get(client, b"/console/app.js")
    assert (status, headers[b"cache-control"]) == (200, b"no-cache")
    assert headers[b"content-type"].startswith(b"text/javascript")
    assert body == (HERE / "app.js").read_bytes()
    again = await get(client, b"/console/app.js", b"if-none-match: %b\r\n" % headers[b"etag"])
    assert again[0] == 304
    assert again[2] == b""


async def test_files_of_a_revision_are_kept_and_compressed(gateway_to, connect):
    """The page names them so; a file of another revision, or at its plain path, is asked for each time."""
    client = await connect(await gateway_to({}))
    page = (await get(client, b"/console/"))[2].decode()
    named = re.findall(r"""(?:(?:src|href)="|"\./)(v/[^"]+)\"""", page)
    assert len(named) == 13
    for name in named:
        status, headers, body = await get(client, f"/console/{name}".encode(), b"accept-encoding: br, gzip\r\n")
        assert (status, headers[b"cache-control"]) == (200, b"public, max-age=31536000, immutable"), name
        assert (headers[b"content-encoding"], headers[b"vary"]) == (b"gzip", b"accept-encoding")
        plain = await get(client, f"/console/{name}".encode())
        assert gzip.decompress(body) == plain[2]
        assert b"content-encoding" not in plain[1]
        assert headers[b"etag"] != plain[1][b"etag"]
    assert sum(len(path.read_bytes()) for path in OWN) > 2 * sum(
        len(read_file(path.relative_to(HERE).as_posix()).gzipped) for path in OWN
    )
    other = re.sub(r"^v/\w+/", f"v/{'0' * 16}/", named[-1])
    assert (await get(client, f"/console/{other}".encode()))[1][b"cache-control"] == b"no-cache"
    assert (await get(client, b"/console/v/0123456789abcdef/../files.py"))[0] == 404
    refused = await get(client, b"/console/app.js", b"accept-encoding: gzip;q=0\r\n")
    assert b"content-encoding" not in refused[1]


@pytest.mark.parametrize(
    "path",
    ["files.py", "../files.py", "%2e%2e/files.py", "..%2f..%2fpyproject.toml", "vendor/.stamp", "pages", "pages/", "no.js",
     "pages/%00.js", "vendor/../files.py", "__init__.py"],
)  # fmt: skip
async def test_nothing_else_is_served(gateway_to, connect, path):
    """No other file of the gateway's, and none outside the folder."""
    client = await connect(await gateway_to({}))
    status, _, body = await get(client, b"/console/" + path.encode())
    assert status == 404
    assert b"import " not in body


async def test_the_console_can_be_switched_off(gateway_to, connect):
    """Without the console there is no page, and no browser is led to one."""
    client = await connect(await gateway_to({}, "console = false\n"))
    for path in (b"/console", b"/console/", b"/console/app.js"):
        assert (await get(client, path))[0] == 404
    status, _, body = await get(client, b"/", b"accept: text/html\r\n")
    assert (status, json.loads(body)["console"]) == (200, None)


def test_every_imported_or_linked_file_is_served():
    """Every file that the page and its modules import, or that the page links, is served."""
    for path in OWN:
        text = path.read_text()
        named = re.findall(r"""(?:from|import) "(\.[^"]+)";?$""", text, re.MULTILINE)
        if path.suffix == ".html":
            named = re.findall(r"""(?:src|href)="([^"#]+)\"""", text) + re.findall(r'"(\./[^"]+)"', text)
        for name in named:
            found = (path.parent / name).resolve().relative_to(HERE)
            assert read_file(str(found)) is not None, f"{path.name} names {name}"


def test_the_console_keeps_the_house_rules():
    """Short lines and files, no markup from text but that of `markdown.js`, no address of elsewhere."""
    for path in OWN:
        text = path.read_text()
        lines = text.splitlines()
        if path.name != "texts.zh.js":  # a line for each text
            assert len(lines) <= 400, path.name
            assert not [line for line in lines if len(line) > 120 and "importmap" not in line], path.name
        assert not re.search(r"TODO|FIXME|XXX|eval\(|new Function|document\.write|style=\"", text), path.name
        if path.name != "markdown.js":
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML", text), path.name
