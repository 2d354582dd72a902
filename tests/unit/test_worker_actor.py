"""What looking a worker up costs the process that does it."""

from __future__ import annotations

import subprocess
import sys


def test_the_actors_module_does_not_import_torch() -> None:
    """Ray imports it in the controller, whose event loop would stand still for seconds."""
    program = "import sys, deepinfer.workers.actor; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
