"""llama-server's chat page in headless Chromium."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

ANSWER = '[aria-label="Assistant message with actions"] .markdown-content'
STOP = '[aria-label="Stop generation"]'
# headless, without background network traffic
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars")


@contextlib.contextmanager
def browser() -> Iterator[WebDriver]:
    """Run a headless Chromium with a temporary profile for the duration of the block, or skip the test if it is not installed."""
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if missing := [name for name, path in programs.items() if not path]:
        pytest.skip(f"{' and '.join(missing)} not found; install chromium and chromium-driver (Debian's package names)")
    os.environ["SE_OFFLINE"] = "true"  # otherwise selenium looks for a newer browser online
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1000,700"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, webdriver.ChromeService(programs["chromedriver"]))
        try:
            yield driver
        finally:
            driver.quit()


def ask(driver: WebDriver, url: str, question: str, seconds: float) -> str:
    """Ask the question on the page at `url` and return the complete answer; TimeoutException after `seconds`."""
    def find(selector: str) -> list:
        return driver.find_elements(By.CSS_SELECTOR, selector)

    wait = WebDriverWait(driver, seconds, poll_frequency=0.1, ignored_exceptions=[StaleElementReferenceException])
    driver.get(url)
    field = wait.until(lambda _: [e for e in find("textarea") if e.is_displayed() and e.is_enabled()], "no field for a message")[0]
    field.send_keys(question, Keys.ENTER)
    # a complete answer has its token count, and the stop button is gone
    return wait.until(lambda _: not find(STOP) and " ".join(e.text.strip() for e in find(ANSWER)), "no answer")
