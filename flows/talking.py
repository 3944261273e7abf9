"""`rollouts chat` and `rollouts serve`: a policy one talks to, in the terminal or over OpenAI's protocol."""

import argparse
import socket
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import anyio
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from flows.preflight import store_named
from infra.servers.here import servers_here
from infra.servers.model import ServedModel
from rollouts_core.errors import BadInput, RolloutsError
from rollouts_core.serving.find import FoundPolicy, find_policy
from rollouts_core.serving.talker import Manner, Talker, said, talker_of
from rollouts_core.stages.job import prepare_torch
from rollouts_core.types import ToolResult
from rollouts_core.types.episode import AgentState

HELP = "Ask, and press Enter. /again forgets the conversation, /quit or Ctrl-D ends."
LOOPBACK = "127.0.0.1"


def chat_command(options: argparse.Namespace) -> int:
    store = store_named(options.store)
    names = [options.policy, *([options.against] if options.against else [])]
    found = [find_policy(store, name) for name in names]
    device = prepare_torch("cpu" if options.cpu else "auto")
    return anyio.run(_chat, found, device, options)


def serve_command(options: argparse.Namespace) -> int:
    """Serve a policy until it is interrupted."""
    store = store_named(options.store)
    found = find_policy(store, options.policy)
    device = prepare_torch("cpu" if options.cpu else "auto")
    with ExitStack() as stack:
        opened = stack.enter_context(_free_port(options.port))
        servers = None
        if found.config is not None and found.config.engine.kind != "embedded" and not options.embedded:
            engine = found.config.engine
            length = options.context or found.config.data.max_length
            model = ServedModel(str(found.directory.resolve()), found.config.model.dtype, length)
            servers = stack.enter_context(servers_here(engine, model, store.home.resolve(), device == "cuda"))
        return anyio.run(_serve, found, device, options, opened, servers)


async def _chat(found: list[FoundPolicy], device: str, options: argparse.Namespace) -> int:
    console = Console(highlight=False)
    manner = Manner(options.temperature, seed=options.seed)
    async with AsyncExitStack() as stack:
        talkers = [await stack.enter_async_context(talker_of(one, device, options.context)) for one in found]
        first = [talker.begin(options.system) for talker in talkers]
        states = first
        _introduce(talkers, console)
        for question in _questions(options.prompt, console):
            if question == "/again":
                states = first
                continue
            asked = [said(state, question) for state in states]
            try:
                states = await _answers(talkers, asked, manner, options.max_new_tokens, console)
            except RolloutsError as error:
                console.print(Text(f"error: {error}", "red"), soft_wrap=True)
                if options.prompt:
                    return 1
    return 0


def _introduce(talkers: list[Talker], console: Console) -> None:
    if not sys.stdin.isatty():
        return
    for talker in talkers:
        tools = [tool.name for tool in talker.environment.get_tools()] if talker.environment else []
        told = f", with {', '.join(tools)}" if tools else ""
        console.print(f"[bold]{talker.name}[/]  {talker.max_length} tokens of context{told}", soft_wrap=True)
    console.print(HELP, style="dim")


def _questions(given: list[str], console: Console) -> Iterator[str]:
    """The questions that were given or typed, or the lines of standard input."""
    if given:
        yield from given
        return
    while True:
        try:
            line = console.input("[bold]> [/]") if sys.stdin.isatty() else next(sys.stdin)
        except (EOFError, StopIteration):
            return
        if line.strip() in ("/quit", "/exit"):
            return
        if line.strip():
            yield line.strip()


async def _answers(
    talkers: list[Talker], states: list[AgentState], manner: Manner, tokens: int | None, console: Console
) -> list[AgentState]:
    """Streamed as they come: one as text, two side by side."""
    told = [Text() for _ in talkers]
    ended = list(states)

    async def answer(place: int, live: Live | None) -> None:
        async for part in talkers[place].answer(states[place], manner, tokens):
            if isinstance(part, AgentState):
                ended[place] = part
                continue
            piece = _result(part) if isinstance(part, ToolResult) else Text(part)
            told[place].append_text(piece)
            if live is not None:
                live.update(_beside(talkers, told))
            else:
                console.print(piece, end="", soft_wrap=True)

    if len(talkers) == 1:
        await answer(0, None)
        console.print()
        return ended
    if not console.is_terminal:
        for place, talker in enumerate(talkers):
            console.print(f"{talker.name}:", soft_wrap=True)
            await answer(place, None)
            console.print()
        return ended
    with Live(_beside(talkers, told), console=console) as live:
        async with anyio.create_task_group() as tasks:
            for place in range(len(talkers)):
                tasks.start_soon(answer, place, live)
    return ended


def _result(result: ToolResult) -> Text:
    arguments = ", ".join(f"{name}={value!r}" for name, value in result.call.arguments.items())
    return Text(f"\n[{result.call.name}({arguments}) = {result.content}]\n", "red" if result.failed else "cyan")


def _beside(talkers: list[Talker], told: list[Text]) -> Columns:
    panels = [Panel(text, title=talker.name) for talker, text in zip(talkers, told, strict=True)]
    return Columns(panels, equal=True, expand=True)


async def _serve(
    found: FoundPolicy, device: str, options: argparse.Namespace, opened: socket.socket, servers: Path | None
) -> int:
    import uvicorn

    from rollouts_core.serving.api import app_for

    length = options.context or (found.config.data.max_length if servers and found.config else None)
    async with talker_of(found, device, length, servers) as talker:
        settings = uvicorn.Config(app_for(talker), log_level="warning", access_log=False, timeout_graceful_shutdown=2)
        url = f"http://{LOOPBACK}:{opened.getsockname()[1]}/v1"
        print(f"{talker.name} answers at {url} (model {talker.name!r}); Ctrl-C ends it", flush=True)
        await uvicorn.Server(settings).serve(sockets=[opened])
    return 0


@contextmanager
def _free_port(port: int) -> Iterator[socket.socket]:
    """Taken before the model is loaded. Raises `BadInput` where another program has it."""
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((LOOPBACK, port))
        except OSError as error:
            raise BadInput(
                f"--port {port}: another program uses it ({error.strerror}); 0 chooses a free port"
            ) from None
        yield opened
