"""`python -m kt_core.serve --model BASE [--adapter [name=]DIR ...]`"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import traceback
from pathlib import Path

import uvicorn
from transformers.utils import logging as hf_logging

from kt_core import formats
from kt_core.serve.app import Service, create_app
from kt_core.serve.loading import Loader, ServePlan, check
from kt_core.settings import ExpertSettings

SHUTDOWN_SECONDS = 10  # for running answers to end after Ctrl-C or SIGTERM


def plan(options: argparse.Namespace) -> ServePlan:
    """What the command line asks for. Raises ValueError or OSError."""
    return check(
        options.model,
        options.name,
        options.adapter,
        ExpertSettings(
            options.format, options.group, options.threads, options.numa_nodes, options.packed_dir
        ),
        context_length=options.context_length,
        max_waiting=options.max_waiting,
    )


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m kt_core.serve", description="OpenAI-compatible chat server."
    )
    out.add_argument("--model", required=True, help="directory of the base model")
    out.add_argument("--name", help="its name for clients (default: the directory's)")
    out.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help="PEFT adapter, chosen by clients through `model`; may be repeated",
    )
    out.add_argument("--host", default="127.0.0.1")
    out.add_argument("--port", type=int, default=8000)
    names = f"{', '.join(formats.names())}; default: {formats.DEFAULT}"
    out.add_argument("--format", help=f"of the expert weights ({names})")
    out.add_argument("--group", type=int, help="weights per scale (default: the format's)")
    out.add_argument("--threads", type=int, help="for the experts (default: all allowed CPUs)")
    out.add_argument("--numa-nodes", type=int, help="to spread over (default: those there are)")
    out.add_argument("--packed-dir", type=Path, help="keep packed experts here for the next start")
    out.add_argument("--context-length", type=int, help="in tokens (default: the model's)")
    out.add_argument("--max-waiting", type=int, default=8, help="queued requests (default: 8)")
    return out


class Server(uvicorn.Server):
    """Begins to load once the port is open: a port in use ends the process before any work."""

    loader: Loader

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loader.start()

    def stop(self) -> None:
        self.should_exit = True


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not sys.stderr.isatty():
        hf_logging.disable_progress_bar()
    try:
        asked = plan(options)
    except (ValueError, OSError) as error:
        return _failed(error)
    service = Service(asked.names)
    server = Server(
        uvicorn.Config(
            create_app(service),
            host=options.host,
            port=options.port,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
    )
    loader = server.loader = Loader(asked, service, failed=server.stop)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if loader.error is not None:
        return _failed(loader.error)
    if loader.running:  # Ctrl-C; a thread in the middle of a kernel cannot be unwound
        sys.stderr.flush()
        os._exit(0)
    return 0


def _failed(error: BaseException) -> int:
    """The sentence of an error that is the user's to mend; anything else in full."""
    if not isinstance(error, (ValueError, OSError, MemoryError)):
        traceback.print_exception(error)
    else:
        print(f"error: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
