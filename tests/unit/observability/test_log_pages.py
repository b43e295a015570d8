"""Pages of a worker's files: each line once, in order, however the files are renamed between two pages."""

import attrs
import pytest
import trio

from ichat.config.schema import Logs
from ichat.errors import ApiError
from ichat.observability.logs import page_files
from ichat.observability.logs.files import LogFiles
from ichat.observability.logs.page_files import FileBlocks, LogPages
from ichat.observability.logs.pages import PageQuery, Position, read_page_query

START = 1_700_000_000.0


@pytest.fixture
def files(tmp_path):
    """Files of 2000 bytes, of which many are kept."""
    return LogFiles(str(tmp_path), attrs.evolve(Logs(), file_bytes_max=2000, files_max=50))


def write(files, *texts, goes_on=True, worker_id="w", at=START):
    """Write lines a second apart, each as a batch of its own."""
    file = files.open(worker_id, goes_on=goes_on)
    for number, text in enumerate(texts):
        file.append([text if isinstance(text, bytes) else text.encode()], at + number)
        file.flush()
    file.close()


def texts(page):
    return [line.line for line in page.lines]


def read(files, query="", worker_id="w"):
    return LogPages(files).read(worker_id, read_page_query(query))


def all_back(files, query="limit=7", between=lambda: None):
    """Return the lines of all pages from the end to the beginning, oldest first, and how many pages there were."""
    found, pages, before = [], 0, ""
    while True:
        page = read(files, query + before)
        found = texts(page) + found
        pages += 1
        if page.before is None:
            return found, pages
        before = f"&before={page.before}"
        between()


LINES = [f"line {number} {'x' * (number % 90)}" for number in range(300)]


def test_pages_backwards_have_every_line_once(files):
    """Over all files of the run, to the oldest line."""
    write(files, *LINES)
    found, pages = all_back(files)
    assert found == LINES
    assert pages == -(-len(LINES) // 7)


def test_pages_go_on_while_files_are_renamed(files):
    """New lines rotate the files between any two pages; lines before the position stay the same."""
    write(files, *LINES)
    found, _ = all_back(files, "limit=40", between=lambda: write(files, "n" * 900, "n" * 900, "n" * 900))
    assert found == LINES


def test_pages_forward_have_every_line_once(files):
    """From the oldest position to the end, and further lines when they are there."""
    write(files, *LINES)
    page = read(files, "limit=1000")
    assert page.before is None
    position, found = page.lines[0].position, []
    for _ in range(100):
        page = read(files, f"limit=7&after={position}")
        found += texts(page)
        position = page.after
    assert found == LINES
    write(files, "later")
    assert texts(read(files, f"after={position}")) == ["later"]


def test_the_run_before_stands_before_the_newest_run(files):
    """A page says of each line which run it belongs to; `previous` has the run before alone."""
    write(files, "old 1", "old 2", goes_on=False)
    write(files, "new 1", goes_on=False, at=START + 100)
    page = read(files)
    assert [(line.line, line.previous) for line in page.lines] == [("old 1", True), ("old 2", True), ("new 1", False)]
    assert texts(read(files, "previous=1")) == ["old 1", "old 2"]


@pytest.mark.parametrize("block_bytes", [64, 1000, page_files.BLOCK_BYTES])
def test_a_text_is_found_in_any_case_and_through_colours(files, block_bytes):
    """Lines are whole and in order wherever a block of the files ends; times are no part of the text."""
    lines = [f"\x1b[36mINFO\x1b[0m {number}" for number in range(200)]
    lines[17], lines[140] = "an \x1b[31mErr\x1b[1mor\x1b[0m here", "another error: ä"
    write(files, *lines)
    chain = page_files.worker_files(files, "w", is_previous_only=False)
    for text in ("error", "ERROR", "info 1"):
        query = read_page_query(f"limit=500&text={text}")
        found = page_files.Reading(chain, query, page_files.Budget(), block_bytes).page()
        wanted = (
            [17, 140] if text.lower() == "error" else [n for n in range(200) if str(n)[0] == "1" and n not in (17, 140)]
        )
        assert texts(found) == [lines[number] for number in wanted]
    assert texts(read(files, "text=2023-")) == []


def test_a_search_that_is_cut_says_where_to_go_on(files):
    """A page reads a bounded number of bytes; the pages after it find the rest."""
    write(files, "needle", *LINES)
    chain = page_files.worker_files(files, "w", is_previous_only=False)
    query, found, cuts = read_page_query("text=needle"), [], 0
    while True:
        page = page_files.Reading(chain, query, page_files.Budget(bytes_left=1500), 500).page()
        found += texts(page)
        if page.before is None:
            break
        cuts += 1
        assert cuts < 100
        query = read_page_query(f"text=needle&before={page.before}")
    assert found == ["needle"]
    assert cuts > 5


def test_a_page_before_a_time_leaves_out_known_lines(files):
    """A client that has some lines of a time gets the others of that time, and older lines."""
    file = files.open("w", goes_on=False)
    for number in range(50):
        file.append([f"{number}a".encode(), f"{number}b".encode(), f"{number}c".encode()], START + number)
    file.close()
    at = "2023-11-14T22:13:40.000Z"  # of the lines 20
    assert texts(read(files, f"before={at}&limit=4")) == ["19c", "20a", "20b", "20c"]
    assert texts(read(files, f"before={at}&known=2&limit=3")) == ["19b", "19c", "20a"]
    assert texts(read(files, "before=2023-11-15T00:13:40.000%2B02:00&limit=1")) == ["20c"]
    assert texts(read(files, "before=2000-01-01T00:00:00Z")) == []
    assert texts(read(files, f"before={at}&known=9&limit=1")) == ["19c"]
    assert texts(read(files, "before=2100-01-01T00:00:00Z&known=9&limit=1")) == ["49c"]


def test_known_lines_may_be_in_several_files(files):
    """Lines of a time go on over the ends of files."""
    file = files.open("w", goes_on=False)
    for number in range(100):
        file.append([f"{number} {'x' * 100}".encode()], START)
        file.flush()
    file.close()
    found = read(files, "before=2023-11-14T22:13:20Z&known=60&limit=2")
    assert [line.split()[0] for line in texts(found)] == ["38", "39"]
    assert read(files, "before=2023-11-14T22:13:20Z&known=100").lines == []


def test_every_millisecond_is_found(files):
    """A time is a text here: no rounding makes it the millisecond before."""
    file = files.open("w", goes_on=False)
    for number in range(1000):
        file.append([b"%d" % number], START + (number + 0.5) / 1000)
    file.close()
    for number in range(1000):
        assert texts(read(files, f"before=2023-11-14T22:13:20.{number:03d}Z&limit=1")) == [str(number)]


def test_times_are_found_in_large_files(tmp_path):
    """By halves, not line by line: the lines of a time in each of several files."""
    files = LogFiles(str(tmp_path), attrs.evolve(Logs(), file_bytes_max=700_000, files_max=9))
    write(files, *(f"{number} {'x' * 300}" for number in range(6000)))
    for number in (0, 1, 2999, 4321, 5999):
        moment = "before=2023-11-14T22:13:20Z&limit=1".replace("22:13:20", clock(number))
        assert texts(read(files, moment))[0].split()[0] == str(number)


def clock(seconds):
    hours, rest = divmod(22 * 3600 + 13 * 60 + 20 + seconds, 3600)
    return f"{hours:02d}:{rest // 60:02d}:{rest % 60:02d}"


def test_an_unfinished_line_waits_until_it_is_whole(files, tmp_path):
    """The newest file may be in the middle of being written."""
    write(files, "whole")
    with open(files.path_of("w"), "ab") as file:
        file.write(b"2023-11-14T22:13:21.000Z ha")
        file.flush()
        assert texts(page := read(files)) == ["whole"]
        file.write(b"lf\n")
    assert texts(read(files, f"after={page.after}")) == ["half"]


def test_lines_that_are_gone_are_refused(files):
    """Neither another file with the same inode nor an end beyond the file is taken for the position."""
    write(files, *LINES[:3])
    position = read(files).lines[1].position
    inode, began, offset = position.split(".")
    for wrong in (f"{inode}.{int(began) + 1}.{offset}", f"1.{began}.{offset}", f"{inode}.{began}.99999"):
        with pytest.raises(ApiError, match="not kept any more"):
            read(files, f"before={wrong}")
    assert texts(read(files, f"before={position}")) == LINES[:1]


def test_lines_without_a_time_have_none(files):
    """A remark about missing lines, and what another program has written."""
    write(files, "first")
    with open(files.path_of("w"), "ab") as file:
        file.write(b"[ichat: 3 lines are missing here: they could not be written]\n\xff\n")
    assert [(line.time, line.line) for line in read(files).lines] == [
        ("2023-11-14T22:13:20.000Z", "first"),
        (None, "[ichat: 3 lines are missing here: they could not be written]"),
        (None, "\ufffd"),
    ]


def test_a_worker_without_files_has_an_empty_page(files):
    """No position is before or after it."""
    page = read(files)
    assert (page.lines, page.before, page.after) == ([], None, None)


async def test_the_whole_run_is_read_in_order(files):
    """As the files have it, with its times; the run before has files of its own."""

    async def whole(*, previous):
        blocks = FileBlocks(LogPages(files).files_of("w", previous=previous), trio.CapacityLimiter(1))
        return b"".join([block async for block in blocks]).decode()

    write(files, *LINES)
    assert [line.partition(" ")[2] for line in (await whole(previous=False)).splitlines()] == LINES
    assert await whole(previous=True) == ""
    write(files, "new", goes_on=False)
    assert (await whole(previous=False)).endswith("Z new\n")
    assert [line.partition(" ")[2] for line in (await whole(previous=True)).splitlines()] == LINES


@pytest.mark.parametrize(
    "query",
    [
        "before=yesterday", "before=2023-11-14T22:13:40", "before=1.2", "before=1.2.3&known=1", "known=1", "after=x",
        "after=2023-11-14T22:13:40Z", "before=1.2.3&after=1.2.3", "limit=0", "limit=1001", "limit=x", "known=-1",
        f"text={'x' * 201}", "previous=maybe", "follow=1", "limit=1&limit=2", f"before={'9' * 400}",
    ],
)  # fmt: skip
def test_wrong_queries_are_refused_with_a_sentence(query):
    """Each names its parameter."""
    with pytest.raises(ApiError) as caught:
        read_page_query(query)
    assert caught.value.status == 400
    assert caught.value.message.endswith(".")


def test_a_query_is_read():
    """The defaults are the newest lines."""
    assert read_page_query("") == PageQuery()
    assert read_page_query("before=1.2.3&text=%C3%84b&limit=9&previous=1") == PageQuery(
        Position(1, 2, 3), None, 9, "Äb".encode().lower(), previous=True
    )
