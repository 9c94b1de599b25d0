"""The command line: one thin function a command, the work in the modules it names.

Everything heavy is imported inside the commands, so that `sparkmoe --help` answers at once. What a command found goes
to stdout, its last line one JSON object; what it is doing goes to stderr. A `SparkmoeError` becomes one line and exit
code 2; `--debug`, anywhere on the line, shows the traceback instead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkmoe.errors import SparkmoeError

if TYPE_CHECKING:
    from sparkmoe.findings import Finding

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Make mixture-of-experts models decode faster on a live SGLang engine, and prove it. --debug: tracebacks.",
)

MachineOption = Annotated[str, typer.Option("--machine", help="auto, spark, hopper or cpu")]
ModelOption = Annotated[Path | None, typer.Option("--model", help="model folder (default: the machine's own)")]
ResultsOption = Annotated[Path, typer.Option("--results", help="where runs are kept")]


def say(text: str = "") -> None:
    """For the reader, on stderr."""
    typer.echo(text, err=True)


def answer(**fields: Any) -> None:
    """The last line of a command."""
    typer.echo(json.dumps(fields, ensure_ascii=False))


@app.command()
def doctor(
    sglang: Annotated[bool, typer.Option("--sglang", help="also: which hooks the installed SGLang needs")] = False,
    machine: MachineOption = "auto",
    results: ResultsOption = Path("results"),
) -> None:
    """What machine this is, what works, what is missing. Exit code 1 if a run would fail."""
    from sparkmoe.doctor import examine, examine_sglang
    from sparkmoe.findings import verdict
    from sparkmoe.machine import Machine

    findings = examine(Machine.named(machine), results=results)
    findings += examine_sglang() if sglang else []
    _table(findings)
    failed = [f.what for f in findings if f.state == "fail"]
    say(verdict(findings))
    answer(ok=not failed, failed=failed, warned=[f.what for f in findings if f.state == "warn"])
    raise typer.Exit(1 if failed else 0)


@app.command()
def serve(
    recipe: Annotated[str, typer.Argument(help="a recipe's name, such as baseline or nextn_k2")],
    show: Annotated[bool, typer.Option("--print", help="show the command and do nothing")] = False,
    model: ModelOption = None,
    machine: MachineOption = "auto",
    port: Annotated[int | None, typer.Option(help="default: a free one")] = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 opens the server to the network")] = "127.0.0.1",
    keep: Annotated[bool, typer.Option("--keep", help="for weeks: restart what dies or hangs, with metrics")] = False,
    key_file: Annotated[Path | None, typer.Option(help="file with the API key; made if missing")] = None,
    mem_fraction: Annotated[float | None, typer.Option(help="share of available memory; on a Spark 0.68")] = None,
    drain_s: Annotated[float, typer.Option(help="seconds that running requests get when the server ends")] = 60.0,
    patience_s: Annotated[float, typer.Option(help="with --keep: seconds without a token before a restart")] = 300.0,
    tp: Annotated[int, typer.Option(help="GPUs to split the model over")] = 1,
    node: Annotated[
        str, typer.Option(help="this machine among several, as 0/2; the others run what --print shows")
    ] = "0/1",
    meet: Annotated[str | None, typer.Option(help="host:port on machine 0, where the machines meet")] = None,
    hot_vocab: Annotated[Path | None, typer.Option(help="tokens that the draft scores: a map of `hot-vocab`")] = None,
    draft_model: Annotated[
        Path | None, typer.Option(help="folder of a DSpark draft, instead of the recipe's NEXTN draft")
    ] = None,
    attention: Annotated[str, typer.Option(help="SGLang's backend: auto, triton, flashinfer, fa3")] = "auto",
) -> None:
    """Serve a recipe in the foreground until Ctrl-C or SIGTERM. Notebooks attach to it."""
    from sparkmoe.recipe import Recipe

    chosen = Recipe.named(recipe)
    own = {"hot_vocab": hot_vocab, "draft_model": draft_model}
    changes: dict[str, Any] = {key: path and str(path.absolute()) for key, path in own.items()}
    changes |= {"mem_fraction": mem_fraction or chosen.mem_fraction, "attention": attention}
    chosen = chosen.with_(name=recipe, metrics=keep, **changes)
    chosen = chosen.on_nodes(tp, node, meet)
    if show:
        _print_command(chosen, machine, model, port, host)
        return
    if chosen.node_rank:
        raise SparkmoeError(f"machine {node} answers no requests; run there what `serve {recipe} … --print` shows")
    from sparkmoe import keeper
    from sparkmoe.notebooks_run import Interrupted, signals_raise

    def ready(engine: Any) -> None:
        say(f"{chosen.name} answers at {engine.url} after {engine.ready_s:.1f} s; Ctrl-C ends it")
        say(f"log {engine.log_path}; API key in {key_file or engine.record.path}")
        answer(url=engine.url, recipe=chosen.name, pid=engine.pid, log=str(engine.log_path), ready_s=engine.ready_s)
        sys.stdout.flush()

    key = keeper.api_key(key_file) if key_file else None
    served: dict[str, Any] = {"port": port, "host": host, "grace_s": drain_s, "api_key": key}
    with signals_raise():
        try:
            if keep:
                keeper.keep(chosen, machine, model, say, ready, patience_s=patience_s, **served)
            keeper.once(chosen, machine, model, ready, **served)
        except Interrupted as signal:
            raise typer.Exit(0 if signal.args[0] in ("SIGINT", "SIGTERM") else 1) from None


@app.command()
def verify(
    recipe: Annotated[str, typer.Argument(help="a recipe's name; its running server is taken, or one is started")],
    model: ModelOption = None,
    machine: MachineOption = "auto",
) -> None:
    """Prove that every lever of a recipe is on in a live server. Exit code 1 if one is not."""
    from sparkmoe.engagement import examine, rows
    from sparkmoe.engine import Engine

    with Engine.attach(recipe, machine, model) as engine:
        checks = examine(engine)
    _print_rows(rows(checks))
    failed = [check for check in checks if check.required and not check.ok]
    for check in (check for check in checks if not check.ok):
        say(f"{check.name}: {'usual cause' if check.required else 'worth knowing'}: {check.cause}")
    answer(recipe=recipe, engaged=not failed, failed=[check.name for check in failed])
    raise typer.Exit(1 if failed else 0)


@app.command("hot-vocab")
def hot_vocab(
    out: Annotated[Path, typer.Argument(help="the map to write, a .pt file")],
    size: Annotated[int, typer.Option(help="how many tokens the draft scores")] = 32768,
    text: Annotated[list[Path] | None, typer.Option(help="a text file to count; may be repeated")] = None,
    from_run: Annotated[list[Path] | None, typer.Option("--run", help="a results folder: count its answers")] = None,
    keep: Annotated[list[int] | None, typer.Option(help="a token id to keep in any case; may be repeated")] = None,
    model: ModelOption = None,
    machine: MachineOption = "auto",
) -> None:
    """Choose the tokens that a draft scores, from texts or from a run's own answers."""
    from itertools import chain

    from tokenizers import Tokenizer

    from sparkmoe import checkpoint
    from sparkmoe import hot_vocab as hot
    from sparkmoe.machine import Machine

    folder = checkpoint.resolve(model, Machine.named(machine))
    config = checkpoint.inspect(folder).config
    vocabulary, ends = int(config["vocab_size"]), config.get("eos_token_id")
    always = [*(ends if isinstance(ends, list) else [ends] if ends is not None else []), *(keep or [])]
    tokens: list[Any] = [hot.tokens_of_run(run) for run in from_run or []]
    if text:
        tokens.append(hot.tokens_of_texts(text, Tokenizer.from_file(str(folder / "tokenizer.json"))))
    chosen = hot.choose(hot.count(chain.from_iterable(tokens)), size, vocabulary, always=always)
    hot.save(out, chosen)
    say(f"{len(chosen.ids):,} of {vocabulary:,} tokens are {chosen.coverage:.2%} of {chosen.corpus_tokens:,} counted")
    answer(path=str(out), rows=len(chosen.ids), coverage=chosen.coverage, corpus_tokens=chosen.corpus_tokens)


@app.command()
def compare(
    run_a: Annotated[str, typer.Argument(help="a run's folder or id")],
    run_b: Annotated[str, typer.Argument(help="the run to hold against it")],
    results: ResultsOption = Path("results"),
) -> None:
    """Two runs side by side: the conditions that differ, then each metric with its interval and the ratio B ÷ A."""
    from sparkmoe.compare import compare_command

    typer.echo(compare_command(run_a, run_b, root=results))


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="a run's folder or id")],
    results: ResultsOption = Path("results"),
) -> None:
    """Write what a run found as one HTML file into its folder. `run` ends with it."""
    from sparkmoe.report import report as write_report

    path = write_report(run, root=results)
    answer(report=str(path), bytes=path.stat().st_size)


@app.command()
def gate(
    run: Annotated[str, typer.Argument(help="a run's folder or id")],
    baseline: Annotated[str, typer.Option("--baseline", help="a baseline file, or a run's folder or id")],
    thresholds: Annotated[
        Path | None, typer.Option("--thresholds", help="a TOML file; default: the shipped one")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="make RUN the baseline: writes the file")] = False,
    results: ResultsOption = Path("results"),
) -> None:
    """Did anything get worse than in the baseline? gate.md and gate.xml go into the run's folder. Exit code 1 if so."""
    from sparkmoe import baseline as baselines
    from sparkmoe import gate as gates
    from sparkmoe.results import Run

    store = Run.open(run, root=results)
    if update:
        made = baselines.update(store, baseline)
        answer(baseline=baseline, run=made["run"], notebooks=list(made["notebooks"]))
        return
    outcome = gates.gate(store, baselines.load(baseline, root=results), gates.thresholds(thresholds))
    gates.write(outcome, store)
    typer.echo(outcome.markdown())
    answer(**outcome.as_dict())
    raise typer.Exit(0 if outcome.ok else 1)


@app.command()
def workshop(
    reset: Annotated[bool, typer.Option("--reset", help="put the seat back: servers ended, fresh notebooks")] = False,
    check: Annotated[bool, typer.Option("--check", help="only check the seat, open nothing")] = False,
    machine: MachineOption = "auto",
    results: ResultsOption = Path("results"),
) -> None:
    """Check a workshop seat in a minute and open the first notebook in JupyterLab. Exit code 1 if the seat fails."""
    import os

    from sparkmoe import workshop as seats
    from sparkmoe.machine import Machine
    from sparkmoe.processes import end_all

    stopped = len(end_all()) if reset else 0
    laid = seats.lay_out(seats.seat(), reset=reset)
    if reset:
        answer(seat=str(seats.seat()), laid_out=laid, stopped=stopped)
        return
    findings = seats.examine_seat(Machine.named(machine), results=results)
    _table(findings)
    failed = [f.what for f in findings if f.state == "fail"]
    answer(ok=not failed, failed=failed, seat=str(seats.seat()))
    sys.stdout.flush()
    if failed or check:
        raise typer.Exit(1 if failed else 0)
    argv = seats.lab_command(seats.seat())
    os.execv(argv[0], argv)


@app.command()
def download(
    repository: Annotated[str, typer.Argument(help="on the Hugging Face hub")] = "inclusionAI/Ling-3.0-flash-fp4",
    to: Annotated[Path | None, typer.Option(help="default: where the spark profile looks for it")] = None,
    revision: Annotated[str, typer.Option(help="branch, tag or commit")] = "main",
) -> None:
    """Fetch a model: free space first, resumed where it broke off, every file's hash compared."""
    from sparkmoe import download as hub

    folder = to or hub.default_folder(repository)
    say(f"{repository} to {folder}; interrupted, the same command goes on")
    seen = hub.download(repository, folder, revision=revision)
    answer(path=str(folder), bytes=seen.weight_bytes, experts=seen.experts, draft_layers=seen.draft_layers)


@app.command()
def precompile(
    at_once: Annotated[int | None, typer.Option("--jobs", help="compilers side by side; default: by memory")] = None,
    limit: Annotated[int | None, typer.Option(help="only so many objects, of every kind, to see what it takes")] = None,
) -> None:
    """Build FlashInfer's fused MoE for the GB10 (sm_121a), before any weights are loaded. Resumes."""
    from sparkmoe import precompile as kernels
    from sparkmoe.machine import GIB, Machine, available_bytes

    ninja = kernels.plan()
    todo, all_of_it = kernels.missing(ninja), kernels.objects(ninja)
    chosen = kernels.sample(todo, limit) if limit else []
    side_by_side = at_once or kernels.jobs(available_bytes(), Machine.detect().cores)
    say(f"{len(chosen) or len(todo)} of {len(all_of_it)} objects to build, {side_by_side} at once, in {ninja.parent}")
    built = []
    for one in kernels.build(ninja, chosen, at_once=side_by_side):
        built.append({"name": one.name, "seconds": one.seconds, "peak_gib": round(one.peak_bytes / GIB, 2)})
        say(f"[{len(built)}/{len(chosen) or len(todo)}] {one.name}: {one.seconds:.1f} s, {built[-1]['peak_gib']} GiB")
    answer(folder=str(ninja.parent), objects=len(all_of_it), missing=len(kernels.missing(ninja)), built=built)


@app.command()
def stop() -> None:
    """Stop every server that sparkmoe started here."""
    from sparkmoe.processes import end_all

    ended = end_all()
    for record in ended:
        say(f"stopped {record.recipe['name']} on port {record.port}")
    answer(stopped=len(ended))


@app.command()
def run(
    notebooks: Annotated[list[str] | None, typer.Argument(help="names such as 02_baseline; default: all")] = None,
    quick: Annotated[bool, typer.Option("--quick/--full", help="minutes, or a measurement with all its boots")] = True,
    parameter: Annotated[list[str] | None, typer.Option("-p", help="name=value for the notebooks' parameters")] = None,
    results: ResultsOption = Path("results"),
) -> None:
    """Execute notebooks; copies, logs and data under results/<run>/. Exit code 1 if one fails."""
    import contextlib
    import time

    from sparkmoe import notebooks_run as runner
    from sparkmoe.report import report as write_report
    from sparkmoe.results import Run

    chosen = runner.select(notebooks or [])
    known = {name for path in chosen for name in runner.parameters_of(path)}
    given = runner.assign(parameter or [], known)
    mode = "quick" if quick else "full"
    say(f"{len(chosen)} notebooks ({mode}), about {runner.minutes(chosen, quick):.0f} minutes on two cores")
    done: list[runner.Executed] = []
    begun = time.monotonic()
    with runner.signals_raise():
        store = Run.create(results, name=mode, notebooks=[p.stem for p in chosen], parameters=given, quick=quick)
        say(f"results in {store.path}")
        try:
            with contextlib.closing(runner.execute(chosen, store.path, given, quick=quick, announce=say)) as executed:
                for result in executed:
                    done.append(result)
                    say(f"  {result.name}: {'ok' if result.ok else 'FAILED'}, {result.seconds:.0f} s")
                    if result.error:
                        say(f"    {result.error}")
        except runner.Interrupted as interrupted:
            runner.forget(store.path, done)
            say(f"interrupted ({interrupted}); kernels and servers are stopped")
            raise typer.Exit(128 + interrupted.signum) from None
    summary = runner.as_json(store.path, done, time.monotonic() - begun) | {"report": None}
    store.write_json("run.json", summary)  # the report reads it
    try:
        summary["report"] = str(write_report(store))
        say(f"report in {summary['report']}")
    except SparkmoeError as error:
        say(f"no report: {error}")
    store.write_json("run.json", summary)
    answer(**summary)
    raise typer.Exit(0 if summary["ok"] else 1)


def _print_command(recipe: Any, machine: str, model: Path | None, port: int | None, host: str) -> None:
    from sparkmoe import checkpoint
    from sparkmoe.gates import free_port
    from sparkmoe.machine import Machine
    from sparkmoe.processes import new_api_key

    where = Machine.named(machine)
    known = model or where.default_model
    folder = checkpoint.resolve(model, where) if known else Path(f"/path/to/{recipe.name}-model")
    seen = checkpoint.inspect(folder) if folder.exists() else None
    recipe.require(where, seen)
    typer.echo(recipe.shell(where, model=folder, port=port or free_port(host), host=host, api_key=new_api_key()))


def _table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for column in ("check", "", "found", "expected", "what to do"):
        table.add_column(column, overflow="fold")
    for f in findings:
        table.add_row(f.what, {"ok": "ok", "warn": "warn", "fail": "FAIL"}[f.state], f.found, f.expected, f.advice)
    Console(width=None if sys.stdout.isatty() else 140).print(table, markup=False)


def _print_rows(rows: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0], show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*row.values())
    Console(width=None if sys.stdout.isatty() else 140).print(table, markup=False)


def main(argv: list[str] | None = None) -> None:
    """Console script `sparkmoe`."""
    given = sys.argv[1:] if argv is None else argv
    debug = "--debug" in given
    try:
        app([word for word in given if word != "--debug"], prog_name="sparkmoe")
    except SparkmoeError as error:
        if debug:
            raise
        say(f"error: {error}")
        raise SystemExit(2) from None
