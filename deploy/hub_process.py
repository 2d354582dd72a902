"""Downloads from a hub in a process of their own, which can be ended at any moment.

The library downloads in threads that outlive a Ctrl-C until their files are there: hours, for a
large model. Parent and child talk in lines of JSON; a child whose parent is gone sees the end of
its input and goes too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from deepinfer.deploy.hub_library import HubError, Library


class Downloads:
    """A child that fetches files of one repository; it lives as long as the context."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        offline = {"HF_HUB_OFFLINE": "1" if self._library.offline else "0"}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "deepinfer.deploy.hub_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **offline},
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C is for the parent, who ends the child
        )
        self._tell(asdict(self._library))  # not as arguments, which everyone could read
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        child = self._running()
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what the child no longer read
                    pipe.close()

    def fetch(self, files: Sequence[str], progress: Callable[[int], None]) -> Path:
        """Return the folder that ``files`` are in now. Raises HubError."""
        self._tell(list(files))
        output = self._running().stdout
        assert output is not None
        for line in output:
            match json.loads(line):
                case {"done": int(done)}:
                    progress(done)
                case {"folder": str(folder)}:
                    return Path(folder)
                case {"error": str(message)}:
                    raise HubError(message)
        raise HubError(
            f"{self._library.repo} cannot be fetched: the download ended with status "
            f"{self._running().wait()}"
        )

    def _running(self) -> subprocess.Popen[str]:
        assert self._child is not None, "used outside of its context"
        return self._child

    def _tell(self, value: Any) -> None:
        pipe = self._running().stdin
        assert pipe is not None
        try:
            pipe.write(f"{json.dumps(value)}\n")
            pipe.flush()
        except BrokenPipeError:
            pass  # it has ended: reading its answer says how


def main() -> None:
    """Serve one parent: its library first, then lists of files."""
    asked: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    library = Library(**json.loads(asked.get()))
    while True:
        files = json.loads(asked.get())
        try:
            folder = library.download(files, lambda done: _say({"done": done}))
        except HubError as error:
            _say({"error": str(error)})
        else:
            _say({"folder": str(folder)})


def _listen(asked: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        asked.put(line)
    os._exit(0)  # the parent is gone, and the library's threads would keep this process


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
