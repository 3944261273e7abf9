"""The command line: `rollouts run | plan | up | deploy | logs | cancel | report | runs | show | machines | ...`.

Only what a command needs is imported: `plan` answers in a fraction of a second and loads neither torch nor Prefect.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from flows import housekeeping, machines
from flows.preflight import checked, outputs_of, place_store, store_named, store_of
from flows.temporary_server import TemporaryServer, start_if_wanted
from infra.inventory import load_inventory
from rollouts_core.config import PipelineConfig
from rollouts_core.config.loading import load_config
from rollouts_core.errors import BadInput, RolloutsError

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0 only when it did what was asked."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except RolloutsError as error:
        print(f"error: {error}", file=sys.stderr)
        if options.json:
            print(json.dumps({"run_id": None, "state": "Failed", "error": str(error)}))
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception:
        if not _told_to_end:
            raise
        print("interrupted", file=sys.stderr)  # a library turned the interrupt into another exception
        return INTERRUPTED


def run_command(options: argparse.Namespace) -> int:
    server = _early_server(options)
    config = _config(options)
    with checked(config, options.refresh):
        wait_for_server = _begin_server(server, config)
        from flows.post_train import post_train

        run = partial(post_train, config, options.refresh, return_state=True)
        return _run_flow(run, wait_for_server, config, options)


def prepare_prefect() -> None:
    """Set Prefect's environment variables. Must be called before Prefect is imported."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "rollouts.machines")


def _early_server(options: argparse.Namespace) -> TemporaryServer | None:
    """Begun first of all, since it takes longest."""
    prepare_prefect()
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    server = start_if_wanted()
    if server is not None and server.is_first and not options.quiet:
        print("Prefect makes its database, this once: 10 to 20 s", file=sys.stderr, flush=True)
    return server


def _begin_server(begun: TemporaryServer | None, config: PipelineConfig) -> Callable[[], None]:
    """Start the Prefect server and return a function that waits for it. Imports take as long as its start."""
    from flows.server import begin_server

    return begin_server(begun, outputs_of(config))


def _run_flow(
    start: Callable[[], Any], wait_for_server: Callable[[], None], config: PipelineConfig, options: argparse.Namespace
) -> int:
    """Show a flow on the terminal, and its record at its end."""
    from flows.terminal import print_record, stages_shown
    from rollouts_core.observe.run_list import run_of_flow

    wait_for_server()
    with stages_shown(options.quiet) as console:
        state = start()
    flow_run_id = str(state.state_details.flow_run_id)
    record = run_of_flow(store_of(config).home, flow_run_id)
    if record is None or (record.error is None and not state.is_completed()):
        raise RolloutsError(str(state.result(raise_on_failure=False)))
    if not options.quiet:
        print_record(record, console if options.json else None)
    elif record.error:
        print(record.error, file=sys.stderr)
    if options.json:
        print(json.dumps(asdict(record)))
    return 0 if state.is_completed() else 1


def eval_command(options: argparse.Namespace) -> int:
    server = _early_server(options)
    config = _config(options)
    with checked(config) as stages:
        if not stages.evaluate:
            raise BadInput("data.heldout: is required to evaluate", str(options.config))
        if options.against:
            from rollouts_core.observe.run_list import find_run

            find_run(store_of(config).home, options.against)
        wait_for_server = _begin_server(server, config)
        from flows.evaluate import evaluate_policies

        run = partial(evaluate_policies, config, options.against, return_state=True)
        return _run_flow(run, wait_for_server, config, options)


def plan_command(options: argparse.Namespace) -> int:
    from rollouts_core.stages.explain import explain
    from rollouts_core.stages.plan import plan

    config = _config(options)
    if options.estimate:
        from flows.estimating import print_estimate

        return print_estimate(config, options)
    stages = plan(config)
    explanations = explain(stages, store_of(config), config.machine)
    if options.json:
        print(json.dumps([asdict(explanation) for explanation in explanations]))
        return 0
    for explanation in explanations:
        first, *further = explanation.lines() or [""]
        print(f"{explanation.stage:<16} {explanation.key[:16]}  {explanation.state:<7}  {first}".rstrip())
        for line in further:
            print(f"{'':<43} {line}")
    for stage, served in zip(stages.served, config.served, strict=True):
        engine, asked = served.engine, " and ".join(served.asked_by)
        print(
            f"{stage.name:<16} {stage.key[:16]}  served   {engine.replicas} {engine.kind} server(s), asked by {asked}"
        )
    if any(explanation.state == "to run" for explanation in explanations):
        print(f"next: rollouts run {options.config}")
    return 0


def data_command(options: argparse.Namespace) -> int:
    from flows.data import print_data

    return print_data(_config(options), options)


def chat_command(options: argparse.Namespace) -> int:
    from flows.talking import chat_command as chat

    return chat(options)


def serve_command(options: argparse.Namespace) -> int:
    from flows.talking import serve_command as serve

    return serve(options)


def logs_command(options: argparse.Namespace) -> int:
    from flows.following import print_logs

    return print_logs(options)


def watch_command(options: argparse.Namespace) -> int:
    from flows.watching import watch_command as watch

    return watch(options)


def checksums_command(options: argparse.Namespace) -> int:
    from flows.checksums import checksums_command as checksums

    return checksums(options)


def cancel_command(options: argparse.Namespace) -> int:
    from flows.following import cancel_run

    return cancel_run(options)


def replay_command(options: argparse.Namespace) -> int:
    from flows.replaying import replay_command as replay

    return replay(options)


def up_command(options: argparse.Namespace) -> int:
    prepare_prefect()
    from flows.up import up_command as up

    return up(options)


def deploy_command(options: argparse.Namespace) -> int:
    prepare_prefect()
    from flows.deployments import deploy_command as deploy

    return deploy(options)


def report_command(options: argparse.Namespace) -> int:
    from flows.reporting import report_command as report

    return report(options)


def completion_command(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(_parser(), options.shell))
    return 0


def runs_command(options: argparse.Namespace) -> int:
    from rollouts_core.metrics.sparkline import sparkline
    from rollouts_core.observe.listed import listed_runs
    from rollouts_core.observe.run_list import list_runs
    from rollouts_core.observe.run_records import encode_records

    home = store_named(options.store).home
    if options.json:
        print(encode_records(list_runs(home)))
        return 0
    for run in listed_runs(home, home.resolve().parent / "outputs"):
        record = run.record
        accuracies = "  ".join(f"{entry.point} {100 * entry.accuracy:.1f} %" for entry in record.accuracies)
        curve = f"{run.curve} {sparkline(run.values, 20)}" if run.values else ""
        print(f"{record.run_id:<40} {record.state:<10} {record.seconds:8.1f} s  {accuracies:<36}  {curve}".rstrip())
    return 0


def show_command(options: argparse.Namespace) -> int:
    from rollouts_core.observe.run_list import find_run

    record = find_run(store_named(options.store).home, options.run)
    if options.json:
        print(json.dumps(asdict(record)))
        return 0
    from flows.terminal import print_record

    for stage in record.stages:
        print(f"{stage.name:<16} {(stage.key or '')[:16]:<16}  {stage.state:<10} {stage.seconds:8.1f} s")
    print_record(record)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rollouts", description="Post-train language models, stage by cached stage.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--store", help="where artifacts live: a directory or an fsspec URL (or ROLLOUTS_STORE)")
    shared.add_argument("--json", action="store_true", help="print JSON on standard output")
    configured = argparse.ArgumentParser(add_help=False, parents=[shared])
    configured.add_argument("config", type=Path, help="a Python file with `config = PipelineConfig(...)`, or JSON")
    configured.add_argument("--machine", metavar="NAME", help="a machine of the inventory, for the heavy stages")
    configured.add_argument("-q", "--quiet", action="store_true", help="print only errors")
    configured.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="as in rl.steps=20")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str, parent: Any) -> Any:
        added = commands.add_parser(name, parents=[parent], help=text, description=text)
        added.set_defaults(command=command)
        return added

    run = add("run", run_command, "run the whole chain", configured)
    run.add_argument(
        "--refresh", action="append", default=[], metavar="STAGE", help="make a stage, and what depends on it, again"
    )
    evaluation = add("eval", eval_command, "evaluate the existing policies, without training", configured)
    evaluation.add_argument("--against", metavar="RUN", help="a run to compare with, on the same prompts")
    planned = add("plan", plan_command, "show which stages are cached, which will run, and why", configured)
    planned.add_argument("--estimate", action="store_true", help="estimate the memory, tokens and time of each")
    data = add("data", data_command, "show the training data token by token", configured)
    data.add_argument("--rows", type=int, default=1000, help="how many rows of each source to read; default: 1000")
    data.add_argument("--examples", type=int, default=3, help="how many to show of each source; default: 3")
    _add_talking(add, shared)
    logs = add("logs", logs_command, "print the output of a run's jobs", shared)
    logs.add_argument("run", metavar="RUN")
    logs.add_argument("stage", metavar="STAGE", nargs="?", help="only of this stage")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    watch = add("watch", watch_command, "follow a run's stages, progress and curves", shared)
    watch.add_argument("run", metavar="RUN")
    compared = add("checksums", checksums_command, "compare the weights that a run's servers hold", shared)
    compared.add_argument("run", metavar="RUN")
    cancel = add("cancel", cancel_command, "end a run and all its jobs, wherever they run", shared)
    cancel.add_argument("run", metavar="RUN")
    replay = add("replay", replay_command, "train a run's RL again from its kept batches, without an engine", shared)
    replay.add_argument("run", metavar="RUN")
    replay.add_argument(
        "--generate", type=int, metavar="STEPS", help="generate this number of batches, without training"
    )
    replay.add_argument("--out", help="directory for the batches; default: outputs/RUN/generated")
    _add_machines(commands, shared)
    _add_prefect(add, shared)
    add("runs", runs_command, "list runs, the latest first", shared)
    report = add("report", report_command, "write a run's page and rollout viewer again", shared)
    report.add_argument("run", metavar="RUN")
    report.add_argument("--against", metavar="RUN", help="another run, to compare its curves and answers")
    show = add("show", show_command, "show one run", shared)
    show.add_argument("run", metavar="RUN", help="a run's id, or the beginning of it")
    diff = add("diff", housekeeping.diff_command, "show the differences of two runs", shared)
    diff.add_argument("one", metavar="RUN")
    diff.add_argument("other", metavar="RUN")
    lineage = add("lineage", housekeeping.lineage_command, "show what an artifact was made from", shared)
    lineage.add_argument("artifact", metavar="ARTIFACT", help="its name, the beginning of it, its key, or its path")
    verify = add("verify", housekeeping.verify_command, "read artifacts whole; take damaged ones out of use", shared)
    verify.add_argument("artifact", nargs="*", metavar="ARTIFACT", help="default: all")
    pin = add("pin", housekeeping.pin_command, "keep a run or an artifact from gc", shared)
    pin.add_argument("name", nargs="?", metavar="NAME", help="a run or an artifact; without it, pins are listed")
    pin.add_argument("--reason", default="", help="why it is kept")
    pin.add_argument("--remove", action="store_true", help="no longer keep it")
    gc = add("gc", housekeeping.gc_command, "remove what no kept run needs", shared)
    _add_gc_options(gc)
    completion = add("completion", completion_command, "print a script that completes commands in your shell", shared)
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    return parser


def _add_gc_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep-last", type=int, metavar="N", help="keep the last N runs of each name; default: all")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be removed")


def _add_talking(add: Callable[..., Any], shared: argparse.ArgumentParser) -> None:
    policy = argparse.ArgumentParser(add_help=False, parents=[shared])
    policy.add_argument("policy", metavar="RUN", help="a run, an artifact, or a model directory")
    policy.add_argument(
        "--context", type=int, metavar="TOKENS", help="tokens of prompt and answer; default: 8192 or less"
    )
    policy.add_argument("--cpu", action="store_true", help="answer on the CPU, even if there is a GPU")
    chat = add("chat", chat_command, "talk to a policy in the terminal", policy)
    chat.add_argument("--against", metavar="OTHER", help="another policy, to compare the answers")
    chat.add_argument("--system", default="", metavar="TEXT", help="a system message")
    chat.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="ask this and end; repeatable")
    chat.add_argument("--temperature", type=float, default=0.0, help="default: 0, the likeliest answer")
    chat.add_argument("--max-new-tokens", type=int, metavar="TOKENS", help="tokens of each answer; default: what fits")
    chat.add_argument("--seed", type=int, default=0, help="seed of the random draws; default: 0")
    serve = add("serve", serve_command, "answer OpenAI's protocol for a policy, on this machine only", policy)
    serve.add_argument("--embedded", action="store_true", help="with the embedded engine")
    serve.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes a free one")


def _add_prefect(add: Callable[..., Any], shared: argparse.ArgumentParser) -> None:
    folder = argparse.ArgumentParser(add_help=False, parents=[shared])
    folder.add_argument("configs", type=Path, nargs="?", default=Path("configs"), help="a folder of configs")
    up = add("up", up_command, "start a Prefect server and a worker here, with every config to run from its UI", folder)
    up.add_argument("--port", type=int, default=4200, help="port of the server; default: 4200")
    add("deploy", deploy_command, "register every config with the Prefect server of PREFECT_API_URL", folder)


def _add_machines(commands: Any, shared: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("machines", help="the machines that runs may use", description="The inventory.")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    listed = actions.add_parser("ls", parents=[shared], help="list the machines")
    listed.set_defaults(command=machines.ls_command)
    checked = actions.add_parser("check", parents=[shared], help="check a machine, and say what to do if it is not fit")
    checked.add_argument("name", metavar="NAME")
    checked.set_defaults(command=machines.check_command)
    collected = actions.add_parser("gc", parents=[shared], help="remove what no kept run needs on a machine")
    collected.add_argument("name", metavar="NAME")
    _add_gc_options(collected)
    collected.set_defaults(command=machines.gc_command)
    drained = actions.add_parser(
        "drain", parents=[shared], help="lease nothing on a machine any more; its servers leave"
    )
    drained.add_argument("name", metavar="NAME")
    drained.add_argument("--undo", action="store_true", help="lease it again")
    drained.set_defaults(command=machines.drain_command)
    added = actions.add_parser("add", parents=[shared], help="add a machine")
    added.add_argument("name", metavar="NAME")
    machines.add_fields(added)
    added.set_defaults(command=machines.add_command)


def _config(options: argparse.Namespace) -> PipelineConfig:
    changes = list(options.set)
    if options.machine:
        host = load_inventory().get(options.machine)
        kind = "slurm" if host and host.slurm else "ssh"
        changes += [f"machine.kind={kind}", f"machine.name={options.machine}"]
    return place_store(load_config(options.config, changes), options.config, options.store)


_told_to_end: list[int] = []
"""The signals that asked for it."""


def _interrupt(number: int, frame: Any) -> NoReturn:
    _told_to_end.append(number)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
