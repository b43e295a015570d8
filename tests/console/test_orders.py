"""Copies and orders in the console: the launch form, the scale of a model, and workers for other machines."""

import re
import shlex

import pytest
from console.conftest import WORKER
from playwright.sync_api import expect
from support.programs import LIMIT_S, Program, ichat


def states(site):
    return {one["worker_id"]: one["state"] for one in site.program.get("/v1/admin/workers")[1]["data"]}


@pytest.fixture
def guard(tmp_path):
    """Start the line of an order, as typed on another machine."""
    programs = []

    def run(line):
        programs.append(Program(ichat(*shlex.split(line)[2:]), tmp_path / "guard.log", {}))
        return programs[-1]

    yield run
    for program in programs:
        program.end()


def new_order(page, **fields):
    page.get_by_role("button", name="New order").click()
    dialog = page.get_by_role("dialog")
    for label, text in fields.items():
        dialog.get_by_label(re.compile(f"^{label}")).fill(text)
    return dialog


def test_an_order_is_made_by_the_keyboard_and_starts_its_worker(make_site, page, guard):
    """Enter sends the form; the line is shown once, and starts the worker; the list says so, and stops it."""
    site = make_site()
    site.open(page, "overview")
    page.keyboard.press("g")
    page.keyboard.press("t")
    expect(page.locator("main h1")).to_have_text("Orders")
    expect(page.locator("main")).to_contain_text("No orders")
    dialog = new_order(page, Model="/models/m", Engine="fake")
    dialog.get_by_label(re.compile("^Name")).press("Enter")
    expect(dialog).to_contain_text("Worker m-order-0 is ordered")
    page.keyboard.press("Escape")
    line = dialog.locator("[data-line] pre").text_content()
    assert line.startswith("python3 ichat.pyz worker --order order-")
    assert line.endswith(f" --gateway-address http://127.0.0.1:{site.program.port}")
    dialog.get_by_role("button", name="Done").click()
    row = page.get_by_role("row").filter(has_text="m-order-0")
    expect(row).to_contain_text("waits")
    first = guard(line)
    site.program.wait_until_ready("m-order-0")
    expect(row).to_contain_text("fetched")
    page.get_by_role("button", name="Stop m-order-0").click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    expect(row).to_contain_text("was stopped")
    assert first.process.wait(LIMIT_S) == 0


def test_an_unused_order_is_withdrawn_and_a_refusal_is_shown(make_site, page):
    """The sentence is the gateway's own, or the form's; the line is of no use any more."""
    site = make_site()
    page.context.watched.allowed.append("400")
    site.open(page, "orders")
    dialog = new_order(page, Model="/models/m", Engine="fake", GPUs="one")
    dialog.get_by_role("button", name="Order").click()
    expect(dialog.locator(".notice")).to_contain_text("GPUs are numbers such as 0,1, and not: one")
    dialog.get_by_label(re.compile("^GPUs")).fill("0, 1")
    dialog.get_by_label(re.compile("^Ports")).fill("20000")
    dialog.get_by_role("button", name="Order").click()
    expect(dialog.locator(".notice")).to_contain_text('must be a range of ports, such as "20000-20999"')
    dialog.get_by_label(re.compile("^Ports")).fill("20000-20999")
    dialog.get_by_role("button", name="Order").click()
    code = dialog.locator("[data-line] pre").text_content().split()[4]
    dialog.get_by_role("button", name="Done").click()
    page.get_by_role("button", name="Withdraw m-order-0").click()
    page.get_by_role("dialog").get_by_role("button", name="Withdraw").click()
    expect(page.get_by_role("row").filter(has_text="m-order-0")).to_contain_text("was stopped")
    assert site.program.ask("/v1/workers/order", {"code": code, "start_id": "a"})[0] == 410


def test_the_number_of_copies_is_changed(make_site, page):
    """The button is named after the model; a refused number is said where it was typed."""
    site = make_site(WORKER.format(name="alpha", more="gpu_ids = []"))
    site.program.wait_until_ready("alpha-0")
    page.context.watched.allowed.append("400")
    site.open(page, "models")
    page.get_by_role("button", name="Scale alpha").click()
    dialog = page.get_by_role("dialog")
    copies = dialog.get_by_label(re.compile("^Replicas"))
    copies.fill("many")
    copies.press("Enter")
    expect(dialog.locator(".notice")).to_contain_text("Replicas are a number such as 3, or a range such as 1-4")
    copies.fill("3-2")
    copies.press("Enter")
    expect(dialog.locator(".notice")).to_contain_text("below")
    copies.fill("2")
    copies.press("Enter")
    expect(page.locator(".toast")).to_have_text("alpha: alpha-1 starts.")
    expect(page.locator("tr[data-key=alpha]")).to_contain_text("2 / 2")
    site.program.until(lambda: states(site) == {"alpha-0": "ready", "alpha-1": "ready"})
