#!/usr/bin/env python3
"""Ask a model a question on llama-server's chat page in headless Chromium, and take a screenshot of the answer.

    chat_screenshot.py -m model.gguf -o docs/chat-page.png "What is the capital of France?" [llama-server's options]

Requires the Python packages selenium and pillow, and the programs chromium and chromedriver (Debian: chromium, chromium-driver).
"""
from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException, TimeoutException, WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

from ggml_ext._console.cli import Parser, run_script
from server import running_server

ANSWER = '[aria-label="Assistant message with actions"] .markdown-content'
STOP = '[aria-label="Stop generation"]'
# headless, without background network traffic
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars")


@contextlib.contextmanager
def browser(width: int = 1000, height: int = 700) -> Iterator[WebDriver]:
    """Run a headless Chromium with a temporary profile for the duration of the block; RuntimeError if it is not installed."""
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, path in programs.items() if not path]
    if missing:
        raise RuntimeError(f"{' and '.join(missing)} not found; install chromium and chromium-driver (Debian's package names)")
    os.environ["SE_OFFLINE"] = "true"  # otherwise selenium looks for a newer browser online
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, webdriver.ChromeService(programs["chromedriver"]))
        try:
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                   {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})
            yield driver
        finally:
            driver.quit()


def ask(driver: WebDriver, url: str, question: str, seconds: float = 60) -> str:
    """Ask the question on the page at `url` and return the complete answer; RuntimeError if it takes longer than `seconds`."""
    def find(selector: str) -> list:
        return driver.find_elements(By.CSS_SELECTOR, selector)

    wait = WebDriverWait(driver, seconds, poll_frequency=0.1, ignored_exceptions=[StaleElementReferenceException])
    missing = "a field for a message"
    try:
        driver.get(url)
        field = wait.until(lambda _: [e for e in find("textarea") if e.is_displayed() and e.is_enabled()])[0]
        missing = "an answer"
        field.send_keys(question, Keys.ENTER)
        # a complete answer has its token count, and the stop button is gone
        return wait.until(lambda _: not find(STOP) and " ".join(e.text.strip() for e in find(ANSWER)))
    except WebDriverException as e:
        detail = "" if isinstance(e, TimeoutException) else f": {(e.msg or type(e).__name__).splitlines()[0]}"
        raise RuntimeError(f"the page at {url} did not show {missing} within {seconds:g} s{detail}") from None


def save_screenshot(driver: WebDriver, path: Path) -> None:
    """Save a screenshot as PNG with a palette, which takes a third of the size."""
    with Image.open(io.BytesIO(driver.get_screenshot_as_png())) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, "PNG", optimize=True)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True, help="PNG file to write")
    parser.add_argument("--size", type=int, nargs=2, default=(1000, 700), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--seconds", type=float, default=120, help="time limit of the answer (default: 120)")
    parser.add_argument("question")
    args, options = parser.parse_known_args()
    with running_server(args.model, "--temp", 0, *options) as url, browser(*args.size) as driver:
        print(ask(driver, url, args.question, args.seconds))
        time.sleep(1)  # until the page's animations end
        save_screenshot(driver, args.output)
    print(f"{args.output}: {args.output.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    sys.exit(run_script(main))
