"""The page of a gateway without models: a first worker by one field, and what a worker of another machine needs."""

import re
import sys

from playwright.sync_api import expect
from support.console_state import busy_cluster, gpu, machine, told

FAKE = f'[engines.fake]\npython = "{sys.executable}"\n'


def test_a_model_is_started_from_the_first_page(make_site, page):
    """A path and Launch: the page leads to the worker that loads, and what keeps one from starting is said before."""
    page.context.watched.allowed.append("/v1/admin/workers/launch")
    site = make_site(FAKE)
    site.open(page)
    expect(page.locator("main h1")).to_have_text("Welcome")
    launch = page.get_by_role("button", name="Launch")
    expect(launch).to_be_disabled()
    expect(page.locator("main")).to_contain_text(f"curl http://127.0.0.1:{site.program.port}/v1/chat/completions")
    page.get_by_label("Engine").select_option("fake")
    page.get_by_label("Model").fill("/models/some-model")
    expect(page.locator("main")).to_contain_text('"model": "some-model"')
    expect(page.locator("main")).to_contain_text('model_path = "/models/some-model"')
    launch.click()
    expect(page).to_have_url(re.compile(r"#/workers/some-model-0$"))
    site.program.wait_until_ready("some-model-0")


def test_obstacles_of_a_model_are_shown_before_its_launch(make_site, page):
    """The gateway's own sentences, before anything is launched."""
    page.context.watched.allowed.append("/v1/admin/workers/launch")
    site = make_site('[engines.fake]\npython = "/no/such/python"\n')
    site.open(page)
    page.get_by_label("Engine").select_option("fake")
    page.get_by_label("Model").fill("org/m")
    expect(page.locator(".notice").first).to_contain_text("There is no interpreter /no/such/python")
    expect(page.get_by_role("button", name="Launch")).to_be_disabled()


def test_no_gpu_is_asked_for_where_none_is_seen(make_site, page):
    """The sample for ichat.toml has `gpu_ids` where the gateway's machine has GPUs, and nowhere else."""
    state = {**busy_cluster(), "workers": [], "models": [], "machines": [machine("gw", has_gateway=True)]}
    told(page, ["state", state])
    make_site().open(page)
    expect(page.locator("main")).to_contain_text("[[managed_workers]]")
    expect(page.locator("main")).not_to_contain_text("gpu_ids")
    seen = machine("gw", has_gateway=True, gpus=[gpu(0, 0, {})])
    page.evaluate("one => window.tell('machines', { machines: [one], gone: [] })", seen)
    expect(page.locator("main")).to_contain_text("gpu_ids = [0]")


def test_a_gateway_that_none_reaches_says_what_it_lacks(make_site, page):
    """The settings and the variable that a worker elsewhere needs, the interpreter, and an address that is no loopback."""
    site = make_site(FAKE)
    site.open(page)
    page.get_by_label("Engine").select_option("fake")
    join = page.locator(".card", has_text="a worker of another machine")
    expect(join).to_contain_text("This gateway listens on 127.0.0.1: no other machine reaches it.")
    expect(join.locator("pre").first).to_have_text(
        '[server_settings]\nhost = "0.0.0.0"\n\n[security]\njoin_token_env = "ICHAT_JOIN_TOKEN"'
    )
    command = join.locator("pre").last
    expect(command).to_contain_text(f"ICHAT_JOIN_TOKEN=… {sys.executable} ichat.pyz worker -be fake")
    expect(command).not_to_contain_text("127.0.0.1:")
    for code in page.locator(".code").all():
        text, button = code.locator("pre").bounding_box(), code.locator("button").bounding_box()
        assert text["x"] + text["width"] <= button["x"], "a button covers the text"
