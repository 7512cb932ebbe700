"""A headless Chromium without a network, driven through chromedriver by its documented protocol (W3C WebDriver)."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--proxy-server=127.0.0.1:9"),  # where nobody listens
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # what the protocol calls the id of an element
KEYS = {"left": "\ue012", "up": "\ue013", "right": "\ue014", "down": "\ue015", "home": "\ue011", "end": "\ue010"}
KEYS |= {"enter": "\ue007", "escape": "\ue00c", "space": " ", "shift": "\ue008", "ctrl": "\ue009"}


def missing() -> list[str]:
    """The programs that are not installed."""
    return [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


class Browser:
    """A browser with one window; use it in a ``with`` statement.

    Args:
        width: Of the window, in CSS pixels.
        height: Of the window.
        scale: Pixels of the device for one of CSS.
        options: More options of the command line.
    """

    def __init__(self, width: int = 1440, height: int = 900, scale: float = 1, options: tuple[str, ...] = ()) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        try:
            self._url = f"http://127.0.0.1:{self._port()}/session"
            size = [f"--window-size={width},{height}", f"--force-device-scale-factor={scale}"]
            arguments = [*_OPTIONS, *options, *size, f"--user-data-dir={self._profile.name}"]
            wanted = {
                "goog:chromeOptions": {"args": arguments, "binary": shutil.which("chromium")},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            self._url += "/" + self._ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            self.size(width, height, scale)
        except BaseException:
            self._stop()
            raise

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := re.search(r"successfully on port (\d+)", line):
                return int(found[1])
        raise RuntimeError("chromedriver did not start")

    def _ask(self, method: str, path: str, content: Any = None) -> Any:
        data = None if method in ("GET", "DELETE") else json.dumps(content or {}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def size(self, width: int, height: int, scale: float = 1, *, is_phone: bool = False) -> None:
        """Give the page this size."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=is_phone,
        )

    def prefer(self, scheme: str) -> None:
        """Prefer "dark" or "light" pages."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, path: Path) -> None:
        """Open a page that ``to_html()`` has written, with the network off, and wait until it is complete."""
        self.command("Network.enable")
        self.command(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )
        self._ask("POST", "/url", {"url": "about:blank"})  # else the same page would go to another place in itself
        self._ask("POST", "/url", {"url": path.absolute().as_uri()})
        told = "document.getElementById('shown').textContent || document.getElementById('problem').textContent"
        self.wait(told)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body returns in the page."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": arguments})

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Wait until an expression is true in the page."""
        script = f"""
            const [seconds, done] = arguments, until = performance.now() + 1000 * seconds;
            const look = () =>
                ({condition}) ? done(true) : performance.now() > until ? done(false) : setTimeout(look, 9);
            look();
        """
        if not self._ask("POST", "/execute/async", {"script": script, "args": [seconds]}):
            raise TimeoutError(f"{condition} did not become true")

    def click(self, selector: str) -> None:
        """Click an element."""
        self._ask("POST", f"/element/{self._find(selector)}/click")

    def write(self, selector: str, text: str) -> None:
        """Write into an input, in place of what is there."""
        found = self._find(selector)
        self._ask("POST", f"/element/{found}/clear")
        self._ask("POST", f"/element/{found}/value", {"text": text})

    def _find(self, selector: str) -> str:
        found: str = self._ask("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]
        return found

    def press(self, *keys: str) -> None:
        """Press keys one after another, where the focus is: "a", "home", "shift left"."""
        actions = []
        for names in keys:
            values = [KEYS.get(name, name) for name in names.split()]
            actions += [{"type": "keyDown", "value": value} for value in values]
            actions += [{"type": "keyUp", "value": value} for value in reversed(values)]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def text(self, selector: str) -> str:
        """The text of an element as it is shown."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def problems(self) -> list[str]:
        """What the page has written to the console since this was last asked: errors and warnings."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def picture(self) -> bytes:
        """A PNG of what is seen."""
        return base64.b64decode(self._ask("GET", "/screenshot"))

    def close(self) -> None:
        """Close the browser."""
        try:
            self._ask("DELETE", "")
        finally:
            self._stop()

    def _stop(self) -> None:
        self._driver.terminate()
        self._driver.communicate()
        self._profile.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
