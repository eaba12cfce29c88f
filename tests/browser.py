"""A headless Chromium driven from Python: the DevTools protocol over a pair of pipes, so nothing else need be installed."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "no Chromium here (Debian: apt-get install chromium)"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-extensions",
         "--no-first-run", "--disable-sync", "--disable-component-update", "--remote-debugging-pipe")
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35, "Enter": 13}
LIMIT = 300  # seconds; generous, since the machine may be busy


class Browser:
    """One browser with one page at a time."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def take_places() -> None:  # the browser reads commands from descriptor 3 and answers on 4
            spare = [os.dup(to_browser), os.dup(from_browser)]
            high = [os.dup2(fd, 50 + i) for i, fd in enumerate(spare)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(command, preexec_fn=take_places, close_fds=False, stdin=nothing, stdout=nothing,
                                         stderr=nothing, env=os.environ | {"HOME": str(folder)})
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self.events, self._session = b"", 0, list[dict[str, Any]](), ""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events on the way are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + LIMIT
        while True:
            answer = self._receive(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser does not answer")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(self, page: Path, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Load a page at a width of the window and with a colour scheme; `events` then holds what happened."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                     mobile=width < 600)
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.command("Page.navigate", url=page.as_uri())
        end = time.monotonic() + LIMIT
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive(end))

    def value(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.command("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def point(self, selector: str, click: bool = False) -> None:
        """Move the mouse to the middle of an element, and click if asked."""
        x, y = self.value(f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
                          "e.scrollIntoView({block: 'center'}); const b = e.getClientRects()[0];"
                          "return [b.x + b.width / 2, b.y + b.height / 2]; })()")
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
