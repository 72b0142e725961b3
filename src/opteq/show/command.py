"""The command `opteq show`."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable
from pathlib import Path

from opteq.show.loading import open_viewer
from opteq.show.server import ShowServer


def show(run: Path, port: int, browser: bool, trust: bool, tell: Callable[[str], None]) -> None:
    """Serve the page of a run until the user interrupts it.

    Args:
        run: folder of a finished run, or the name of a pretrained network.
        port: where; 0 for any that is free.
        browser: whether to open the page in the user's browser.
        trust: whether the run may name classes that are not opteq's.
        tell: receives what the user has to know.

    Raises:
        ConfigError: if there is no such network, or the port is not to be had.
    """
    with ShowServer(open_viewer(run, trust), port) as server:
        tell(f"{run} is at {server.address} on this machine; Ctrl-C ends it.")
        if browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            tell("\nEnded.")
