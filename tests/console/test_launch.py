"""The launch form in a browser: the engine's arguments explained, objections as one types, and a worker that starts."""

import re
import sys

import pytest
from playwright.sync_api import expect

from ichat.config import load as configuration

FAKE = f'[engines.fake]\npython = "{sys.executable}"\n'


@pytest.fixture
def form(make_site, page):
    """Open the form of a gateway that has the fake engine."""
    site = make_site(FAKE)
    site.open(page, "launch?backend=fake")
    page.site = site
    expect(page.get_by_role("heading", name=re.compile(r"All \d+ arguments"))).to_be_visible()
    return page


def check_is(page, state):
    expect(page.locator(f"[data-check={state}]")).to_be_visible()


def test_arguments_are_explained_and_found(form):
    """Each argument has its name, kind, default and help; the search finds by name and by help."""
    argument = form.locator("[data-flag=load_s]")
    expect(argument).to_contain_text("--load-s")
    expect(argument).to_contain_text("number")
    expect(argument.get_by_role("textbox")).to_have_attribute("placeholder", "0")
    form.get_by_label("Find an argument").fill("without a parent")
    expect(form.locator("[data-flag]")).to_have_count(1)
    expect(form.locator("[data-flag=leftovers]")).to_contain_text("processes without a parent")
    form.get_by_label("Find an argument").fill("")
    form.locator("[data-flag=sleeps]").get_by_role("combobox").select_option("true")
    form.get_by_label("Only those that are set").check()
    expect(form.locator("[data-flag]")).to_have_count(1)


def test_objections_come_as_one_types_and_go(form):
    """What keeps the worker from starting is said without a click, and the button waits until nothing does."""
    form.context.watched.allowed.append("/v1/admin/workers/launch?dry_run=1")
    check_is(form, "empty")
    form.get_by_placeholder("Qwen/Qwen3-0.6B").fill("/no/such/model")
    form.get_by_text("Advanced").click()
    form.get_by_role("textbox", name=re.compile("^Port")).fill(str(form.site.program.port))
    check_is(form, "objections")
    expect(form.locator("[data-check]")).to_contain_text(f"Port {form.site.program.port} of 127.0.0.1 is taken by")
    expect(form.get_by_role("button", name="Launch")).to_be_disabled()
    form.get_by_role("textbox", name=re.compile("^Port")).fill("many")
    expect(form.locator("[data-check]")).to_contain_text("port: must be a whole number")
    form.get_by_role("textbox", name=re.compile("^Port")).fill("")
    check_is(form, "ready")
    expect(form.get_by_role("button", name="Launch")).to_be_enabled()
    form.get_by_label("Environment").fill("nothing")
    expect(form.locator("[data-check=wrong]")).to_contain_text("A variable is NAME=value")


def test_a_worker_is_launched_and_shown(form):
    """What was typed is what starts, and what the text for ichat.toml says; then comes the worker's own page."""
    form.get_by_placeholder("Qwen/Qwen3-0.6B").fill("/models/Some Model/")
    form.locator("[data-flag=load_s]").get_by_role("textbox").fill("0.5")
    form.locator("[data-flag=sleeps]").get_by_role("combobox").select_option("true")
    form.get_by_label("Another argument").fill("--rank")
    form.get_by_role("button", name="Add", exact=True).click()
    form.locator("[data-flag=rank]").last.get_by_role("textbox").fill("0")
    check_is(form, "ready")
    expect(form.locator(".code pre").first).to_have_text(
        '[[managed_workers]]\nmodel_name = "Some Model"\nmodel_path = "/models/Some Model/"\nbackend = "fake"\n'
        "load_s = 0.5\nsleeps = true\nrank = 0"
    )
    form.get_by_role("button", name="Launch").click()
    expect(form).to_have_url(re.compile(r"#/workers/Some-Model-0$"))
    program = form.site.program.wait_until_ready("Some-Model-0")
    arguments = program.get("/v1/admin/workers/Some-Model-0")[1]["args"]
    assert (arguments["load_s"], arguments["sleeps"], arguments["rank"]) == (0.5, True, 0)


def test_copies_are_launched_on_gpus_that_the_gateway_chooses(form):
    """The text for the file has the same numbers; a number that cannot be read is said."""
    form.get_by_placeholder("Qwen/Qwen3-0.6B").fill("/models/m")
    form.get_by_label(re.compile("^Replicas")).fill("one or two")
    expect(form.locator("[data-check=wrong]")).to_contain_text(
        "Replicas are a number such as 3, or a range such as 1-4"
    )
    form.get_by_label(re.compile("^Replicas")).fill("1-3")
    form.get_by_label(re.compile("^Number of GPUs")).fill("0")
    expect(form.get_by_role("group", name="GPUs")).to_have_count(0)
    expect(form.locator(".code pre").first).to_contain_text("gpus = 0\nreplicas = { min = 1, max = 3 }")
    form.get_by_label(re.compile("^Replicas")).fill("2")
    check_is(form, "ready")
    form.get_by_role("button", name="Launch").click()
    expect(form).to_have_url(re.compile(r"#/workers/m-0$"))
    program = form.site.program.wait_until_ready("m-0").wait_until_ready("m-1")
    assert program.get("/v1/admin/workers/m-1")[1]["gpus"] == 0


def test_an_engine_that_does_not_tell_its_arguments(make_site, page):
    """The form says why, and can still be filled in by hand."""
    site = make_site('[engines.fake]\npython = "/no/such/python"\n')
    page.context.watched.allowed.append("/flags")
    site.open(page, "launch?backend=fake&model_path=org/m")
    expect(page.locator(".notice", has_text="/no/such/python cannot be run")).to_be_visible()
    page.get_by_label("Another argument").fill("--max-model-len")
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.locator("[data-flag=max_model_len]")).to_be_visible()
    expect(page.locator("[data-check=objections]")).to_contain_text("There is no interpreter /no/such/python")


def test_arguments_that_could_not_be_checked_are_said(make_site, page):
    """The form never says that nothing is wrong where it did not look."""
    site = make_site()
    answer = {"objections": [], "unchecked": "The flags of fake cannot be had.", "command": "", "settings": {}}
    page.route("**/v1/admin/workers/launch?dry_run=1", lambda route: route.fulfill(json=answer))
    page.context.watched.allowed.append("/flags")
    site.open(page, "launch?backend=fake&model_path=org/m")
    check_is(page, "ready")
    expect(page.locator("[data-check]")).to_contain_text("Its arguments could not be checked.The flags of fake cannot")
    expect(page.locator("[data-check]")).to_contain_text("Nothing that is known keeps it from starting now.")


def test_the_toml_is_what_the_gateway_reads(form):
    """The text to copy, put into a file, makes the worker that the form describes."""
    form.get_by_placeholder("Qwen/Qwen3-0.6B").fill('/m "1"\\x')
    form.get_by_text("Advanced").click()
    form.get_by_label("Environment").fill("A-B=x=y\nC=\u00fc")
    form.get_by_label("Another argument").fill("--any-table")
    form.get_by_role("button", name="Add", exact=True).click()
    form.locator("[data-flag=any_table]").get_by_role("textbox").fill('{"a": [1, true, {"b c": "d"}]}')
    text = form.locator(".code pre").first.text_content()
    [worker] = configuration.parse(FAKE + text, "test.toml").managed_workers
    assert worker.model_path == '/m "1"\\x'
    assert worker.env == {"A-B": "x=y", "C": "\u00fc"}
    assert worker.backend_args == {"any_table": {"a": [1, True, {"b c": "d"}]}}
