"""The live page in a real browser: no error, real clicks."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import eata.serve
from serve_net import HEADERS, NET, images, learner, small_net, tensor

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
PAGE = Path(eata.serve.__file__).parent / "page.html"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    if BROWSER is None or DRIVER is None:
        pytest.skip("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", *quiet):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd("Network.setExtraHTTPHeaders", {"headers": HEADERS})  # as a browser does once it was told
    yield driver
    driver.quit()


def wait_for(what: Callable[[], object], told: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, told()
        time.sleep(0.1)


def test_the_page_is_one_file_without_addresses():
    for page in (PAGE, PAGE.with_name("docs.html")):
        text = page.read_text()
        assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"<script[^>]+src|@import|url\(", text)


def test_an_operator_looks_and_clicks(served, browser):
    server = served(learner(), batch=8, save_every=1, source=small_net())
    address = f"http://127.0.0.1:{server.port}"

    def text(selector: str) -> str:
        return str(browser.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def click(selector: str) -> None:
        wait_for(lambda: browser.find_elements("css selector", selector))
        browser.execute_script("document.querySelector(arguments[0]).click()", selector)

    browser.get(f"{address}/")
    wait_for(lambda: text("#model") == "net")
    assert "No request yet" in browser.find_element("id", "quiet").text  # empty, and not broken
    for number in range(3):
        server.client.post(f"{NET}/infer", json=tensor(images(8, number)))
    wait_for(lambda: "Version 3 answers" in text("#lead"), lambda: text("#lead"))
    wait_for(lambda: browser.find_elements("css selector", "#chart-throughput .curve"))
    for chart in ("throughput", "entropy", "chosen"):
        assert browser.find_elements("css selector", f"#chart-{chart} .curve"), chart
    assert "does not measure" in text("#chart-drift .none")
    assert len(browser.find_elements("css selector", "#balance rect.now")) == 3
    pictures = browser.find_elements("css selector", "#images img")
    assert len(pictures) == 12
    assert all(picture.get_property("naturalWidth") == 16 for picture in pictures)
    assert "serves now" in text("#versions tr.served")

    click('#versions button[data-version="1"]')
    assert server.engine.mark.version == 3  # the first click only asks
    wait_for(lambda: "Sure?" in text('#versions button[data-version="1"]'))
    click('#versions button[data-version="1"]')
    wait_for(lambda: server.engine.mark.version == 1)
    wait_for(lambda: "Back from version 3 to 1." in text("#events"))
    click("#freeze")
    click("#freeze")
    wait_for(lambda: server.engine.mark.frozen)
    wait_for(lambda: "switched off" in text("#lead"))
    click("#freeze")
    wait_for(lambda: not server.engine.mark.frozen)
    browser.get(f"{address}/docs")
    wait_for(lambda: "/v1/adaptation/rollback" in text("#list"))
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_without_a_token_the_page_can_only_look(served, browser):
    server = served(learner(), batch=8, save_every=1, token=None)
    server.client.post(f"{NET}/infer", json=tensor(images(8)))
    browser.get(f"http://127.0.0.1:{server.port}/")
    wait_for(lambda: browser.find_elements("css selector", "#versions button"))
    assert all(not button.is_enabled() for button in browser.find_elements("css selector", "button"))
    assert browser.find_element("id", "operated").is_displayed()
