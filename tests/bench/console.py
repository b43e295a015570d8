"""Measure the console in front of many workers: how soon it can be used, how smoothly it moves, what it costs.

A gateway of its own, workers that are no engines and clients at a steady rate (`console_site.py`), and Chromium.

usable    from the navigation to a picture of the workers, with a latency of 100 ms: the first time, and again
frames    of the Overview and of the list of workers, as the page's own animation frames count them
heap      of the tab after an hour of events: recorded ones again and again, as fast as the page takes them
gateway   its CPU by turns with no console, and with one that shows the Overview, or the requests
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request

from processes import HERE, ROOT, Failed, spent, threads_ns

sys.path.insert(0, str(ROOT / "tests"))

from support.browser import chromium
from support.console_state import told
from support.programs import Program, ichat

LATENCY_MS = 100
JOIN_S = 120.0
SETTLE_S = 3.0
RECORDED = 2
"""For how many times `--seconds` events are recorded."""
CONFIG = '[server_settings]\nport = 0\nstate_directory = "{directory}/state"\n'
USABLE = ".picture-box .node"
"""There are none before the gateway has told its state."""
WATCH = """
(selector) => {
  const look = () => {
    if (document.querySelector(selector)) window.usableAt = performance.now();
    else requestAnimationFrame(look);
  };
  look();
}
"""
"""Runs before the page's own scripts: notes when an element is there, in milliseconds since the navigation."""
FRAMES = """
async (seconds) => {
  const times = [], end = performance.now() + seconds * 1000;
  await new Promise((done) => {
    const step = (at) => {
      times.push(at);
      if (performance.now() < end) requestAnimationFrame(step);
      else done();
    };
    requestAnimationFrame(step);
  });
  const gaps = times.slice(1).map((at, index) => at - times[index]);
  return [(gaps.length * 1000) / (times.at(-1) - times[0]), Math.max(...gaps)];
}
"""
"""Returns frames a second, and the longest time between two in milliseconds."""
REPLAY = """
async ([events, turns, turn_s]) => {
  for (let turn = 1; turn <= turns; turn += 1) {
    for (const [name, data] of events) window.tell(name, data.at ? { ...data, at: data.at + turn * turn_s } : data);
    await new Promise((done) => setTimeout(() => requestAnimationFrame(done), 0));
  }
}
"""


def read_command_line(words):
    parser = argparse.ArgumentParser(
        prog="./build bench console", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=300, metavar="N", help="how many there are (300)")
    parser.add_argument("--models", type=int, default=60, metavar="N", help="how many models they serve (60)")
    parser.add_argument("--rate", type=float, default=200.0, metavar="R", help="requests a second (200)")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="of the gateway's CPU (4)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of each part of a round (10)")
    parser.add_argument("--hours", type=float, default=1.0, metavar="H", help="of events for the heap (1)")
    args = parser.parse_args(words)
    if min(args.workers, args.models, args.rounds) < 1 or min(args.rate, args.seconds, args.hours) <= 0:
        parser.error("--workers, --models and --rounds must be at least 1, --rate, --seconds and --hours more than 0")
    return args


def run(args, work):
    """Measure all, and print a table. Return the number of requests that failed. Raises Failed."""
    config = work / "ichat.toml"
    config.write_text(CONFIG.format(directory=work))
    program = Program(ichat("gateway", "-c", config), work / "gateway.log")
    site = None
    try:
        program.wait_for_port()
        site = start_site(args, program, work / "site.log")
        with chromium() as browser:
            for row in measure(args, browser, program):
                print("{:34}{:>10}  {}".format(*row), flush=True)
    finally:
        if site is not None:
            site.kill()
            site.wait()
        program.end()
    return (work / "site.log").read_text().count("failed: ")


def start_site(args, program, log):
    """Start the workers and the clients; return their process once all workers have joined. Raises Failed."""
    command = [sys.executable, HERE / "console_site.py", program.port, f"--workers={args.workers}"]
    command += [f"--models={args.models}", f"--rate={args.rate}"]
    with log.open("wb") as output:
        site = subprocess.Popen(
            list(map(str, command)),
            stdout=output,
            stderr=output,
            env={**os.environ, "ICHAT_SECRET": program.own_secret()},
        )
    deadline = time.monotonic() + JOIN_S
    while "ready" not in log.read_text():
        if site.poll() is not None or time.monotonic() > deadline:
            site.kill()
            site.wait()
            raise Failed(f"the workers did not join:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)
    return site


def measure(args, browser, program):
    """Yield rows: what was measured, the figure, and how it was come to."""
    url, secret = f"http://127.0.0.1:{program.port}/console/", program.own_secret()
    page = browser.new_context(viewport={"width": 1280, "height": 1100}).new_page()
    page.add_init_script(f"({WATCH})({json.dumps(USABLE)})")
    network = page.context.new_cdp_session(page)
    network.send("Network.enable")
    limits = {"offline": False, "downloadThroughput": -1, "uploadThroughput": -1}
    network.send("Network.emulateNetworkConditions", {**limits, "latency": LATENCY_MS})
    page.goto(f"{url}#key={secret}")
    yield (
        "usable, first visit",
        f"{usable_ms(page):.0f} ms",
        f"{LATENCY_MS} ms of latency, an empty cache, the key given",
    )
    found = []
    for _ in range(args.rounds):
        page.reload()
        found.append(usable_ms(page))
    yield "usable, again", f"{statistics.median(found):.0f} ms", f"{LATENCY_MS} ms of latency; {spread(found)}"
    network.send("Network.emulateNetworkConditions", {**limits, "latency": 0})
    for name, selector in (("overview", ".node"), ("workers", "table")):
        page.goto(f"{url}#/{name}")
        page.wait_for_selector(selector)
        time.sleep(SETTLE_S)
        frames, longest_ms = page.evaluate(FRAMES, args.seconds)
        yield f"frames, {name}", f"{frames:.0f}/s", f"the longest {longest_ms:.0f} ms"
    yield from cost(args, page, program, url)
    page.context.close()
    yield heap_of(browser, url, secret, record(program, args.seconds * RECORDED), args)


def usable_ms(page):
    page.wait_for_function("() => window.usableAt !== undefined")
    return page.evaluate("window.usableAt")


def cost(args, page, program, url):
    """Yield the gateway's CPU in per cent of a core: with no console, and how much more each page costs."""
    places = {"no console": "about:blank", "Overview": f"{url}#/overview", "requests": f"{url}#/requests"}
    used = {name: [] for name in places}
    for number in range(args.rounds):
        for name in list(places)[:: -1 if number % 2 else 1]:
            page.goto(places[name])
            if name != "no console":
                page.wait_for_selector("[data-connection=live]", state="attached")
            time.sleep(SETTLE_S)
            before, began = dict(threads_ns(program.family)), time.monotonic()
            time.sleep(args.seconds)
            ns = spent(before, dict(threads_ns(program.family)))
            used[name].append(ns / 1e7 / (time.monotonic() - began))
    alone = used.pop("no console")
    yield "gateway, no console", f"{statistics.median(alone):.1f} %", f"of a core; {spread(alone)}"
    for name, found in used.items():
        more = [one - other for one, other in zip(found, alone, strict=True)]
        yield f"gateway, {name} open: more", f"{statistics.median(more):.1f} %", f"of a core; {spread(more)}"


def record(program, seconds):
    """Return the gateway's events of so many seconds, as names and values."""
    address = f"http://127.0.0.1:{program.port}/v1/admin/events"
    request = urllib.request.Request(address, headers={"authorization": f"Bearer {program.own_secret()}"})
    events, name, deadline = [], "", time.monotonic() + seconds
    with urllib.request.urlopen(request, timeout=JOIN_S) as stream:
        while time.monotonic() < deadline and (line := stream.readline()):
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                events.append((name, json.loads(value)))
    return events


def heap_of(browser, url, secret, events, args):
    """Return the row of the tab's heap after hours of events."""
    firsts, rest = events[:1], events[1:]
    turn_s = args.seconds * RECORDED
    turns = max(1, round(args.hours * 3600 / turn_s))
    page = told(browser.new_context(viewport={"width": 1280, "height": 1100}).new_page(), *firsts)
    page.goto(f"{url}#key={secret}")
    page.wait_for_selector(USABLE)
    devtools = page.context.new_cdp_session(page)
    page.evaluate(REPLAY, [rest, 1, turn_s])
    before = heap_mb(devtools)
    page.evaluate(REPLAY, [rest, turns, turn_s])
    after = heap_mb(devtools)
    page.context.close()
    return (
        f"heap after {args.hours:g} h of events",
        f"{after:.0f} MB",
        f"{len(rest) * turns} events; before them {before:.0f} MB",
    )


def heap_mb(devtools):
    devtools.send("HeapProfiler.collectGarbage")
    return devtools.send("Runtime.getHeapUsage")["usedSize"] / 1e6


def spread(values):
    return f"{min(values):.1f} to {max(values):.1f} in {len(values)}"
