"""`penstock` on the command line: plan, simulate, explain, profile, hardware, check, train, reproduce.

Heavy modules are imported inside the commands, so that `--help` answers at once. An error of ours prints one message on
stderr and gives exit code 2; with --debug it also prints its traceback.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import os
import signal
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..ir.errors import DoesNotFit, PenstockError, PlanError
from .options import AnswerOptions, JobOptions, PlanOptions, TrainOptions, takes
from .terminal.spelling import on_command_line, spell, spell_warnings
from .terminal.working import notice, working

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..compiler.job.job import Job
    from ..passes.draft import Draft
    from .figures import Alternative

DIFFERS, ERROR, INTERRUPTED = 1, 2, 130  # exit codes
# Libraries that transformers imports whether or not they are used; without a GPU they warn of what they lack there.
TALKATIVE = ("torchao", "bitsandbytes", "torch.utils._pytree")

app = typer.Typer(
    help="Fine-tune models far bigger than your GPUs: plan, look, run.",
    epilog="--debug anywhere on the line shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def print_version(wanted: bool) -> None:
    """Print the versions that a report of a fault needs."""
    if not wanted:
        return
    version = sys.modules[str(__package__).partition(".")[0]].__version__
    print(f"penstock {version}, torch {metadata.version('torch')}, Python {sys.version.split()[0]}")
    raise typer.Exit()


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="print the version, and do nothing")
    ] = False,
) -> None:
    pass


AsJson = Annotated[bool, typer.Option("--json", help="plain data on stdout instead of tables")]
Written = Annotated[Path | None, typer.Argument(help="a directory that `penstock plan --out` wrote")]


@app.command(
    epilog="Example: penstock plan --model gpt3-175b --hardware mobius-topo2+2 --set dram=4TB --batch 4 "
    "--sequence 2048 --precision fp16. To compare: penstock plan --model gpt2-xl --hardware mobius-8gpu "
    "--hardware mobius-v100 --precision fp16"
)
@takes(PlanOptions, AnswerOptions)
def plan(
    options: PlanOptions,
    out: Annotated[Path | None, typer.Option(help="write the programs and the plan to this directory")] = None,
    dump_passes: Annotated[
        bool, typer.Option("--dump-passes", help="write the programs after each pass to OUT/passes, or print them")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="write a page that shows the plan, for a browser")] = None,
    *,
    shown: AnswerOptions,
    as_json: AsJson = False,
) -> None:
    """Plan a model on hardware that need not be here, without its weights. Exit code 2 if it fits no way.

    With several --hardware: a comparison of their speed and price.
    """
    from ..compiler.planning import rare_collections, sharing

    several = len(options.hardware or ()) > 1
    if several:
        _require_one_machine(options, shown, out is not None or dump_passes)
    if options.prove and options.plan is not None:
        raise PlanError("--prove is for a plan that is searched; leave it, or --plan, out")
    # Imports alone take seconds, and make many objects that stay.
    with sharing(), rare_collections(), working(None if several else options.items) as tell:
        from ..compiler.report.failures import failure_report, with_failures
        from .answer import answer, parse_tokens, print_answer, require_tokens
        from .figures import figures_of

        count = None if shown.tokens is None else parse_tokens(shown.tokens)
        if count is not None:
            require_tokens(options)
        if html is not None:
            from ..compiler.report.page.write import require_writable

            require_writable(html)
        if several:
            compare(options, as_json, html)
            return
        failing = with_failures(options.machine(), shown.mtbf, shown.storage)
        job, others = _find_job(options, shown.alternatives, Dump(out) if dump_passes else None, tell)
    failures = failure_report(job.plan, job.folder.interface, failing)
    figures = figures_of(options, job, count, shown.price, others, failures)
    if out is not None:
        job.write(out)
        options.remember(out)
    if html is not None:
        job.report(html, price_per_hour=shown.price, spell=spell)
    if as_json:
        document = {"hash": job.plan.hash, **job.plan.model_dump(mode="json"), "answer": figures.document()}
        if failures is not None:
            document["failures"] = failures.document()
        print_data(document)
        return
    from .tables import console, plan_tables

    screen = console()
    print_answer(screen, answer(options, job, figures, failures))
    if shown.full:
        for table in plan_tables(job.plan, list(job.folder.interface.stages.values()), job.hardware):
            screen.print(table)
    if html is not None:
        screen.print(f"report in {html}: open it in a browser")
    if out is not None:
        screen.print(f"written to {out}; next: penstock explain {out}, penstock simulate {out}")


def _find_job(
    options: PlanOptions, alternatives: bool | None, dump: Dump | None, tell: Callable[[str], None]
) -> tuple[Job, list[Alternative] | None]:
    """The best plan, and the other plans that were looked for; None: these would take minutes."""
    from .answer import alternatives as other_plans
    from .answer import or_what_fits, what_fits, why_left_out

    looks = alternatives is not False and options.plan is None
    try:
        job = (options.compile_with_proof if options.prove else options.compile)(dump)
    except DoesNotFit as miss:
        raise or_what_fits(miss, options, what_fits(options, tell) if looks else []) from None
    if not looks:
        return job, []
    if alternatives is None and why_left_out(options, len(job.folder.interface.stages)) is not None:
        return job, None
    others, better = other_plans(options, job, tell)
    return (job if dump is not None or options.prove else better), others  # whose passes were dumped, or proven


def _require_one_machine(options: PlanOptions, shown: AnswerOptions, writes: bool) -> None:
    """Raise `PlanError` for an option that goes with the answer about one machine only."""
    given = {
        "--out or --dump-passes": writes, "--plan": options.plan is not None, "--full": shown.full,
        "--prove": options.prove, "--tokens": shown.tokens is not None, "--price": shown.price is not None,
        "--mtbf": shown.mtbf is not None, "--storage": shown.storage is not None,
    }  # fmt: skip
    if found := [name for name, is_given in given.items() if is_given]:
        raise PlanError(f"{', '.join(found)}: for one machine; give one --hardware, or leave {found[0]} out")


@app.command(
    epilog="Example: penstock simulate --model t5-3b --hardware rtx4090x4 --batch 8 --sequence 512 --trace step.json"
)
@takes(JobOptions)
def simulate(
    options: JobOptions,
    directory: Written = None,
    trace: Annotated[Path | None, typer.Option(help="write a timeline that Perfetto opens")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate one training step on the described hardware, of a written directory or of a model. Nothing runs."""
    with working():
        timeline = _job_of(directory, options).simulate()
    if trace is not None:
        timeline.to_chrome_trace(trace)
    from .tables import console, timeline_json, timeline_tables

    if as_json:
        print_data(timeline_json(timeline))
        return
    screen = console()
    screen.print(timeline.describe().splitlines()[0])
    for table in timeline_tables(timeline):
        screen.print(table)
    if trace is not None:
        screen.print(f"timeline in {trace}: open it at https://ui.perfetto.dev")


@app.command(
    epilog="Example: penstock adapters --model llama-8b --hardware rtx4090x1 --batch 4 --sequence 1024 --rank 16"
)
@takes(JobOptions)
def adapters(
    options: JobOptions,
    rank: Annotated[list[int] | None, typer.Option(min=1, help="rank of LoRA; repeatable; default 16")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare frozen bases (bf16, int8, nf4) and ranks of LoRA on a machine: a plan and its speed for each."""
    with working() as tell:
        from .adapter_table import adapter_rows, adapter_tables

        rows = adapter_rows(options, rank or [16], tell)
    if as_json:
        print_data([row.to_json() for row in rows])
        return
    from .tables import console

    for table in adapter_tables(rows):
        console().print(table)


@app.command(epilog="Example: penstock explain --model gpt2-xl --hardware rtx3090x2 --batch 8 --sequence 1024")
@takes(JobOptions)
def explain(
    options: JobOptions,
    directory: Written = None,
    full: Annotated[bool, typer.Option("--full", help="all of it: stages, bounds, what would help, rivals")] = False,
) -> None:
    """Explain a plan: the answer of `penstock plan`. With --full: stages, what bounds the step, what would help, the
    rivals and why they lost."""
    with working(options.items if directory is None else None):
        text = _job_of(directory, options).explain(full=full)
    print(on_command_line(text))


@app.command(
    epilog="Example: penstock check --model gpt2:n_layer=4,n_embd=128,n_head=4,vocab_size=2048 --hardware cpu "
    "--set memory=12MB --batch 8 --sequence 64"
)
@takes(JobOptions)
def check(
    options: JobOptions,
    job: Annotated[Path | None, typer.Option(help="a directory that `penstock plan --out` wrote")] = None,
    steps: Annotated[int, typer.Option(min=1, help="training steps to compare")] = 3,
    trust: Annotated[bool, typer.Option("--trust", help="run the files of --job even if they were edited")] = False,
    as_json: AsJson = False,
) -> None:
    """Train by the plan and by plain PyTorch on the same seeds and compare. Exit code 1 where they differ."""
    with notice("training by the plan and by plain PyTorch; a large model takes minutes"):
        from .check_job import check_named, check_written

        report = check_named(options, steps) if job is None else check_written(job, options, steps, trust)
    if as_json:
        print_data(dataclasses.asdict(report) | {"passed": report.passed})
    else:
        from .tables import check_table, console

        screen = console()
        screen.print(check_table(report))
        if report.skipped is not None:
            screen.print(f"the model itself was not compared: {report.skipped}")
    if not report.passed:
        raise typer.Exit(DIFFERS)


@app.command(
    epilog="Example: penstock train --model gpt-dir --data notes.txt --hardware cpu --set memory=200MB --batch 8 "
    "--sequence 128 --max-steps 100 --save-every 20"
)
@takes(TrainOptions)
def train(
    context: typer.Context,
    options: TrainOptions,
    config: Annotated[Path | None, typer.Argument(help="a YAML file with sections of these options")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="print the whole file and exit")] = False,
) -> None:
    """Fine-tune a causal language model, an encoder-decoder or a classifier. Ctrl-C stops it after the step under way.

    An option on the command line overrides the file.
    """
    from .config import config_text, read_config

    if config is not None:
        given = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)
                 if is_given(context, field.name)}  # fmt: skip
        options = TrainOptions(**{**read_config(config), **given})
    if print_config:
        print(config_text(options))
        return
    with notice("loading libraries"):
        from .tables import console
        from .training import train as run

    try:
        result = run(options, console())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    finally:  # one more Ctrl-C has nothing left to end but the interpreter, which would print a traceback
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option is given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


@app.command(epilog="Example: penstock profile --model gpt2 --hardware auto --batch 4 --sequence 512 --micro-batches 4")
@takes(JobOptions)
def profile(options: JobOptions, as_json: AsJson = False) -> None:
    """Time one block of each kind on this machine, forward and backward, beside the times that the rates predict."""
    with notice("timing blocks; takes minutes"):
        from .profile_table import profile_report, profile_tables
        from .tables import console

        report = profile_report(options)
    if as_json:
        print_data(report.to_json())
        return
    screen = console()
    for table in profile_tables(report):
        screen.print(table)


@app.command("hardware", epilog="Example: penstock hardware rtx4090x4-2rc --set dram=512GB --save box.yaml")
def show_hardware(
    name: Annotated[str, typer.Argument(help="a preset, a YAML file, or detect: this machine")] = "detect",
    change: Annotated[
        list[str] | None, typer.Option("--set", help="change a figure, such as dram=4TB; repeatable")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="also time links, disks, matrix products and the optimizer (20 s)")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="write the machine as YAML, for --hardware")] = None,
    names: Annotated[bool, typer.Option("--list", help="print the names of all presets")] = False,
) -> None:
    """Describe a machine: this one, a preset, or a YAML document."""
    if names:
        from ..ir.machine.presets import preset_names

        print("\n".join(preset_names()))
        return
    if measure and name != "detect":
        raise PlanError(f"--measure times this machine; it goes with `detect`, not with {name!r}")
    from ..runtime.processes.joint_hardware import typed_hardware

    found = typed_hardware(name, change, measure)
    if os.environ.get("RANK", "0") != "0":  # of a torchrun, whose first rank tells of all
        return
    print(found.describe())
    if save is not None:
        found.save(save)
        print(f"written to {save}; use it as --hardware {save}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Exits with 0, with 1 if a check found a difference, or with 2 for an error."""
    given = sys.argv[1:] if arguments is None else arguments
    for library in TALKATIVE:
        logging.getLogger(library).setLevel(logging.ERROR)
    add_commands()
    try:
        with spell_warnings():
            app([argument for argument in given if argument != "--debug"], prog_name="penstock")
    except (PenstockError, OSError) as error:  # `OSError` for a file that cannot be read or written
        if "--debug" in given:
            raise
        what = "does not fit" if isinstance(error, DoesNotFit) else "error"
        print(f"{what}: {on_command_line(str(error))}", file=sys.stderr)
        sys.exit(ERROR)
    except SystemExit as ended:
        if ended.code == ERROR:
            print_meant(given)
        raise


def print_meant(words: list[str]) -> None:
    """After a command line that was refused: what to write for options of other trainers, and for a bare model."""
    from .config import option_of_others

    for word in words:
        if word.startswith("--") and (meant := option_of_others(word)):
            print(f"instead of {word}: {meant}", file=sys.stderr)
    if len(words) > 1 and words[0] in ("plan", "adapters", "train") and not words[1].startswith("-"):
        print(f"a model is named by an option: --model {words[1]}", file=sys.stderr)


def add_commands() -> None:
    """Add the commands of rooms above this one; each is a `typer.Typer` that an entry point names."""
    known = {command.callback for command in app.registered_commands}
    for entry in metadata.entry_points(group="penstock.commands"):
        more = entry.load().registered_commands
        app.registered_commands += [command for command in more if command.callback not in known]


class Dump:
    """Prints the programs after each pass, or writes one file per pass below a directory."""

    def __init__(self, out: Path | None):
        self.folder = None if out is None else out / "passes"
        self.count = 0

    def __call__(self, name: str, draft: Draft) -> None:
        from ..ir.program import print_program

        self.count += 1
        parts = [f"# device {p.device}\n{print_program(p, comments=True)}" for p in draft.programs]
        text = "\n\n".join(parts) if parts else f"# {len(draft.blocks)} blocks, {len(draft.stages)} stages; no programs"
        if self.folder is None:
            print(f"# after {name}\n{text}\n")
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{self.count:02d}-{name}.txt").write_text(text + "\n")


def compare(options: JobOptions, as_json: bool, html: Path | None = None) -> None:
    """Print the comparison of machines; `html`: also as a part of the report of the first that fits. Exits with `ERROR`
    if the model fits none of them."""
    from .compare import compare_machines, compare_tables, unpriced_text
    from .tables import console

    found = compare_machines(options)
    rows = [row for row, _ in found]
    job = next((job for _, job in found if job is not None), None)
    if html is not None and job is not None:
        job.report(html, machines=[row.to_json() for row in rows], spell=spell)
    if as_json:
        print_data([row.to_json() for row in rows])
    else:
        screen = console()
        for table in compare_tables(rows):
            screen.print(table)
        if note := unpriced_text(rows):
            screen.print(note)
        if html is not None:
            screen.print("no report: the model fits none" if job is None else f"report in {html}: open it in a browser")
    if not any(row.fits for row in rows):
        raise typer.Exit(ERROR)


def print_data(data: Any) -> None:
    """Print plain data, as `--json` asks."""
    print(json.dumps(spell(data), indent=1))


def _job_of(directory: Path | None, options: JobOptions) -> Job:
    """The job of a written directory if one is given, else the job that the options describe."""
    if directory is None:
        return options.compile()
    if options.model is not None:
        raise PlanError(f"both the directory {directory} and --model {options.model} were given; choose one")
    from torch import nn

    from ..compiler.job.job import Job
    from ..compiler.load import read_programs

    folder, programs = read_programs(directory)
    return Job(nn.Module(), folder, programs, ties={}, directory=directory)  # nothing is run: no model is needed


if __name__ == "__main__":
    main()
