"""`gptlab dash`: the runs of a folder as a live page on this machine."""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from gptlab.cli.arguments.parser import Positional, parse
from gptlab.config.errors import UserError
from gptlab.config.fields import checked_dataclass, require

DEFAULT_PORT = 8327

DESCRIPTION = """\
Show the runs in and below a folder as a live page: list, curves, labs, and a prompt box for every run that has a \
checkpoint. The page is served on this machine only, and reads run folders; it changes nothing."""


@checked_dataclass("--")
class DashArguments:
    folder: Positional[str] = "runs"
    """Folder that holds runs, at any depth. Labs are looked for in labs/ beside it."""
    port: int = DEFAULT_PORT
    """Port on 127.0.0.1. 0: any free one."""
    open: bool = False
    """Open the page in the browser."""

    def __post_init__(self) -> None:
        require(0 <= self.port < 65_536, "--port", self.port, "must be between 0 and 65535", DEFAULT_PORT)


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C."""
    arguments = parse(DashArguments, argv, prog="gptlab dash", description=DESCRIPTION)
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name one that holds runs")
    from gptlab.report.dashboard.server import Dashboard

    with Dashboard(folder, arguments.port) as server:
        print(f"{server.url}  shows {folder} until Ctrl-C", flush=True)
        if arguments.open:
            # After the server answers, and not in its way: some browsers return when they are closed.
            threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
