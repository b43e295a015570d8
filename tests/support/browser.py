"""The system's Chromium, driven by Playwright."""

import contextlib
import os
import shutil

import pytest
from support.programs import LIMIT_S

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def chromium(*flags):
    """Start Chromium, without a window, with these flags; where there is none, the test is skipped."""
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"there is no Chromium on this machine ({', '.join(PROGRAMS)}): on Debian, apt install chromium")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=LIMIT_S * 1000)
    with sync_playwright() as playwright:
        of_root = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=program, args=[*of_root, *flags])
        yield browser
        browser.close()
