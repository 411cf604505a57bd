"""A headless Chromium (Debian's package) for tests of pages: told over two pipes what to do (its DevTools protocol)."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from shutil import which
from types import TracebackType
from typing import Any, Self

import pytest

PROGRAM = which("chromium")
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="needs Debian's package chromium")
LIMIT_S = 100.0


class Chromium:
    """One page. Each call waits for its answer."""

    def __init__(self, folder: Path) -> None:
        """`folder`: for what it writes."""
        assert PROGRAM is not None
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += [
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-proxy-server",
        ]
        # The browser reads descriptor 3 and writes 4.
        shell = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        command = [PROGRAM, *flags, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        self._log = (folder.parent / f"{folder.name}.log").open("wb")
        self._process = subprocess.Popen(
            ["bash", "-c", shell, *command],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HOME": str(folder.parent)},
        )
        os.close(to_read)
        os.close(to_write)
        self._read = b""
        self._number = 0
        self._session = ""
        self.console: list[str] = []
        """What scripts complained of."""

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._log.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What it answers. Fails where the browser has ended, or says that it cannot."""
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("method") == "Runtime.exceptionThrown":
                self.console.append(json.dumps(said["params"]["exceptionDetails"])[:500])
            elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.console.append(said["params"]["entry"]["text"])
            if said.get("id") == self._number:
                assert "error" not in said, f"{method}: {said['error']}"
                found: dict[str, Any] = said["result"]
                return found

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            more = os.read(self._from, 1 << 16)
            assert more, f"chromium ended; {self._log.name} says why"
            self._read += more
        text, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def ask(self, script: str) -> Any:
        """The value of an expression of the page; of a promise, what it comes to."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Waits for what the page shows: looked at with each change of it."""
        script = f"""new Promise((resolve, reject) => {{
            const look = () => {{ if ({condition}) {{ watcher.disconnect(); clearTimeout(late); resolve(true); }} }};
            const watcher = new MutationObserver(look);
            const late = setTimeout(() => reject(new Error("never: " + document.body.innerText)), {LIMIT_S * 1000});
            watcher.observe(document, {{ childList: true, subtree: true, characterData: true, attributes: true }});
            addEventListener("load", look);
            look();
        }})"""
        assert self.ask(script) is True

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def look(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """A picture of the beginning of the page."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
