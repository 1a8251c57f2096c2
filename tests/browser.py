"""Headless Chromium, controlled over a pipe by the DevTools protocol without a driver package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
"""The browser of Debian's package, or ``None``."""
_COMMANDS_FD, _ANSWERS_FD = 3, 4  # fixed by Chromium
_SECONDS = 60.0


class Page:
    """A page of a running browser."""

    def __init__(self, commands: BinaryIO, answers: BinaryIO) -> None:
        self._commands, self._answers, self._number = commands, answers, 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = json.loads(self._next_message())
            if answer.get("id") == self._number:
                assert "result" in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _next_message(self) -> bytes:
        message = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser ended"
            message += byte
        return bytes(message)

    def open(self, url: str) -> None:
        """Navigate to ``url`` and wait until the page has loaded."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState == 'complete' && location.href != 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page, a promise's value after it settles."""
        asked = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Evaluate an expression until it is true, and return its value."""
        deadline = time.monotonic() + _SECONDS
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"still false: {script}"
            time.sleep(0.05)
        return value


@contextmanager
def chromium(profile: Path, *options: str) -> Iterator[Page]:
    """Context manager that runs the browser, with its profile in an empty folder."""
    assert CHROMIUM is not None
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
        "--no-first-run", "--disable-dev-shm-usage", "--window-size=1280,900",
        f"--user-data-dir={profile}", *options,
    ]  # fmt: skip
    # The shell moves the pipes to the numbers that Chromium expects.
    moved = f'exec "$@" {_COMMANDS_FD}<&{read_commands} {_ANSWERS_FD}>&{write_answers}'
    process = subprocess.Popen(
        ["bash", "-c", moved, "bash", *command],
        pass_fds=(read_commands, write_answers), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(read_commands)
    os.close(write_answers)
    with open(write_commands, "wb") as commands, open(read_answers, "rb") as answers:
        try:
            yield Page(commands, answers)
        finally:
            process.kill()
            process.wait()
