"""`tithe plan`: the bill before the GPU hour. Memory, bandwidth and schedule of a campaign or a plan file, as tables.

The numbers are trainer/plan's, the files tasks/plan's; this is what a person reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.errors import ConfigError

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-S", metavar="KEY=VALUE", help="A key of the recipe, or of a plan's choices (train.recompute=true)."),
]


def plan_command(
    target: Annotated[Path | None, typer.Argument(help="A recipe or a plan file; default: params.yaml.")] = None,
    model: Annotated[str | None, typer.Option(help="Config directory, config.json, known name, or class:LlamaConfig.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Known device, hardware file, or local (probes this machine).")] = None,
    devices: Annotated[int | None, typer.Option(help="Training devices.")] = None,
    sampling_devices: Annotated[int | None, typer.Option(help="Devices of a sampling pool of its own.")] = None,
    overrides: Overrides = None,
    price: Annotated[float | None, typer.Option(help="Dollars per device and hour.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Find the fewest devices and the settings that fit.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Conventional RL, method S and method L side by side.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole plan as JSON, on standard output.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with stacked bars.")] = None,
    details: Annotated[bool, typer.Option("--details", help="Every term of every place.")] = False,
    calibrate: Annotated[Path | None, typer.Option(metavar="RUN", help="Learn this machine's speed from a finished run.")] = None,
    names: Annotated[bool, typer.Option("--list", help="Known models and devices.")] = False,
) -> None:
    """Say before it starts whether a campaign fits, what binds and what it costs.

    Examples:

    tithe plan  (the default campaign on this machine)

    tithe plan recipes/plans/lora-async-1.2t-as-published.yaml

    tithe plan --model qwen3-8b --hardware h100-80gb -S train.method=lora --html plan.html

    tithe plan --model kimi-k2 --hardware h100-80gb --compare
    """
    console = Console(highlight=False, soft_wrap=True)
    if names:
        show_names(console)
        return
    from tasks.plan import Asked, gather, write_page
    from trainer.plan.advice import advise
    from trainer.plan.plan import make_plan

    if calibrate is not None:
        show_calibration(console, calibrate, hardware or "local")
        return
    if compare and (search or html is not None):
        other = "--search" if search else "--html"
        raise ConfigError("--compare", other, "the comparison searches by itself and is a table or JSON; leave one of them out")
    asked = Asked(target, model, hardware, devices, sampling_devices, price, tuple(overrides or ()))
    request = gather(asked)
    if compare:
        show_comparison(console, request, as_json)
        return
    changed: tuple[str, ...] = ()
    if search:
        from trainer.plan.search import search as find

        found = find(request)
        if found.plan is None:
            problem = f"no number of {request.hardware.device.name} up to 2,048 fits {request.card.name} this way"
            if as_json:
                print(json.dumps({"verdict": {"fits": False, "sentence": problem}}))
            else:
                console.print(problem, style="red")
            raise typer.Exit(1)
        request, changed = found.plan.request, found.changed
    plan = make_plan(request)
    advice = advise(plan)
    if html is not None:
        write_page(plan, html, advice)
        print(f"page: {html}", file=sys.stderr)
    if as_json:
        print(json.dumps({**plan.as_tree(), "advice": advice_tree(advice), "changed": list(changed)}, indent=2, default=str))
    else:
        show(console, plan, advice, changed, details)
    if not plan.verdict.fits:
        raise typer.Exit(1)


def advice_tree(advice: Any) -> dict[str, Any]:
    def steps(way: Iterable[Any]) -> list[dict[str, str]]:
        return [{"change": step.change.says(step.after.request), "effect": step.effect} for step in way]

    return {
        "fit": steps(advice.fit),
        "fits_then": advice.fits_then,
        "alternatives": [steps(way) for way in advice.alternatives],
        "faster": steps(advice.faster),
    }


def show(console: Console, plan: Any, advice: Any, changed: tuple[str, ...], details: bool) -> None:
    """Print a plan: the verdict first, then what to change, then the three accounts."""
    from trainer.plan.flags import flags

    request, verdict, schedule, card = plan.request, plan.verdict, plan.schedule, plan.request.card
    active = f", {count(card.active_parameters)} active" if card.is_moe else ""
    adapter = f", adapter of {count(request.adapter_parameters)}" if request.adapter_parameters else ""
    console.print(f"[b]{request.name}[/b]: {card.name}, {count(card.parameters)} parameters{active}{adapter}")
    for note in request.hardware.notes:
        console.print(f"  {request.hardware.name}: {note}", style="dim")
    console.print(
        Text(verdict.sentence[0].upper() + verdict.sentence[1:] + ".", style="bold green" if verdict.fits else "bold red")
    )
    console.print(f"{schedule.binds[0].upper()}{schedule.binds[1:]} sets the pace.\n")
    if changed:
        console.print("[b]Settings found[/b]")
        for sentence in changed:
            console.print(f"  - {sentence}", markup=False)
        console.print()
    show_advice(console, advice, verdict.fits)
    for sentence in flags(plan):
        console.print(Text("! ", style="yellow") + Text(sentence))
    console.print(memory_table(plan))
    if details:
        for room in verdict.rooms:
            console.print(terms_table(plan, room))
    console.print(flow_table(plan))
    console.print(schedule_table(plan))


def show_advice(console: Console, advice: Any, fits: bool) -> None:
    if advice.fit:
        console.print("[b]The cheapest way to make it fit[/b]" if advice.fits_then else "[b]What helps, but not enough[/b]")
        for number, step in enumerate(advice.fit, 1):
            console.print(f"  {number}. {step.change.says(step.after.request)}", markup=False)
            console.print(f"     {step.effect}", style="dim", markup=False)
        if advice.fits_then:
            after = advice.fit[-1].after
            console.print(
                f"  then it {after.verdict.sentence}; a step takes {seconds(after.schedule.step_seconds)}\n", markup=False
            )
    for way in advice.alternatives:
        console.print("  or: " + "; ".join(step.change.says(step.after.request) for step in way), style="dim", markup=False)
    if fits and advice.faster:
        console.print("[b]Faster, and still fits[/b]")
        for step in advice.faster:
            console.print(f"  - {step.change.says(step.after.request)}: {step.effect}", markup=False)
        console.print()


def count(parameters: float) -> str:
    """Return a number of parameters as people say it: 8.19B, 332k."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= scale:
            return f"{parameters / scale:.3g}{unit}"
    return f"{parameters:,.0f}"


def seconds(value: float) -> str:
    if value >= 7200:
        return f"{value / 3600:,.1f} h"
    if value >= 120:
        return f"{value / 60:,.1f} min"
    return f"{value:,.3g} s" if value >= 0.1 else f"{value * 1e3:,.3g} ms"


def memory_table(plan: Any) -> Table:
    from trainer.plan.plan import size

    table = Table(title="memory: what each phase holds", title_justify="left")
    table.add_column("phase")
    rooms = plan.verdict.rooms
    for room in rooms:
        table.add_column(room.place, justify="right")
    for phase in plan.memory.phases("device"):
        cells = []
        for room in rooms:
            held = plan.memory.total(room.place, phase)
            style = "bold red" if held > room.capacity_bytes else "bold" if phase == room.phase else ""
            cells.append(Text(size(held), style=style))
        table.add_row(phase, *cells)
    table.add_section()
    table.add_row("usable", *(size(room.capacity_bytes) for room in rooms))
    table.add_row("left", *(Text(size(room.margin_bytes), style="" if room.fits else "bold red") for room in rooms))
    for rank in range(3):
        largest = [plan.memory.at(room.place, room.phase)[rank:][:1] for room in rooms]
        table.add_row("fullest by" if rank == 0 else "", *(f"{t[0].name} {size(t[0].bytes)}" if t else "" for t in largest))
    return table


def terms_table(plan: Any, room: Any) -> Table:
    from trainer.plan.plan import size

    table = Table(title=f"{room.place}, phase {room.phase}", title_justify="left")
    for column, justify in (("term", "left"), ("bytes", "right"), ("formula", "left")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for term in plan.memory.at(room.place, room.phase):
        table.add_row(term.name, size(term.bytes), term.formula)
    return table


def flow_table(plan: Any) -> Table:
    from trainer.plan.bandwidth import LINKS
    from trainer.plan.plan import size

    table = Table(title="what travels in a step, per device", title_justify="left")
    for column, justify in (
        ("what", "left"),
        ("over", "left"),
        ("bytes", "right"),
        ("time", "right"),
        ("waited for", "right"),
        ("hides from", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for flow in plan.bandwidth.flows:
        waited = "hidden" if flow.hidden else seconds(flow.exposed_seconds)
        threshold = f"{flow.threshold_tokens:,.0f} tokens" if flow.threshold_tokens else ""
        table.add_row(flow.name, LINKS[flow.link], size(flow.bytes), seconds(flow.seconds), waited, threshold)
    return table


def schedule_table(plan: Any) -> Table:
    schedule = plan.schedule
    table = Table(title="time and money", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    parts = {
        "sampling": schedule.sample_seconds,
        "scoring the reference": schedule.score_seconds,
        "training": schedule.train_seconds,
        "hand-over": schedule.sync_seconds,
        "everything else": schedule.fixed_seconds,
    }
    for name, value in parts.items():
        if value:
            table.add_row(name, seconds(value))
    table.add_row("one step", Text(seconds(schedule.step_seconds), style="bold"))
    table.add_section()
    table.add_row("completion tokens per second", f"{schedule.tokens_per_second:,.0f}")
    table.add_row("arithmetic used", f"{schedule.utilisation:.0%}")
    if schedule.lag_max:
        table.add_row("expected lag (highest), optimizer steps", f"{schedule.lag_mean:.3g} ({schedule.lag_max:.3g})")
    table.add_row(f"{schedule.steps} steps", seconds(schedule.wall_seconds))
    table.add_row(f"device-hours on {schedule.devices}", f"{schedule.device_hours:,.4g}")
    if schedule.price is not None:
        table.add_row("price", f"${schedule.price:,.0f}" if schedule.price >= 10 else f"${schedule.price:,.2f}")
    if schedule.energy_kwh is not None:
        table.add_row("energy", f"{schedule.energy_kwh:,.4g} kWh")
    return table


def show_comparison(console: Console, request: Any, as_json: bool) -> None:
    """Print the one-tenth table."""
    from trainer.plan.plan import size
    from trainer.plan.search import compare

    found = compare(request.card, request.hardware, request.choices.batch, request.choices.schedule.steps)
    if as_json:
        print(
            json.dumps(
                [{"name": f.name, "changed": f.changed, "plan": f.plan.as_tree() if f.plan else None} for f in found],
                indent=2,
                default=str,
            )
        )
        return
    usual = found[0].plan
    table = Table(
        title=f"{request.card.name} on {request.hardware.device.name}: the fewest devices that do", title_justify="left"
    )
    table.add_column("")
    columns = []
    for one in found:
        table.add_column(one.name, justify="right")
        columns.append(_comparison_column(one.plan, usual, size))
    for name in columns[0] or {}:
        table.add_row(name, *(column.get(name, "none fits") if column else "none fits" for column in columns))
    console.print(table)
    for one in found:
        for sentence in one.changed:
            console.print(f"  {one.name}: {sentence}", style="dim", markup=False)


def _comparison_column(plan: Any, usual: Any, size: Any) -> dict[str, str]:
    if plan is None:
        return dict.fromkeys(("devices",), "none fits")
    choices, schedule = plan.request.choices, plan.schedule
    count = f"{choices.devices} + {choices.sample.devices}" if choices.sample.devices else str(choices.devices)
    fullest = max(room.peak_bytes for room in plan.verdict.rooms if room.place in ("device", "sampler"))
    return {
        "devices (training + sampling)": count,
        "of conventional RL's": f"{schedule.devices / usual.schedule.devices:.0%}" if usual is not None else "",
        "fullest device": size(fullest),
        "a step": seconds(schedule.step_seconds),
        "completion tokens per second": f"{schedule.tokens_per_second:,.0f}",
        f"device-hours, {schedule.steps} steps": f"{schedule.device_hours:,.4g}",
        "price": f"${schedule.price:,.0f}" if schedule.price is not None else "",
        "paced by": schedule.binds.partition(",")[0],
    }


def show_calibration(console: Console, run: Path, hardware: str) -> None:
    """Learn from a run and print what was learned."""
    from tasks.plan import calibrate, calibration_file, finished_steps, hardware_of

    finished_steps(run)  # before the machine is probed, which takes seconds
    learned = calibrate(run, hardware_of(hardware))
    table = Table(title=f"learned from {run.name}", title_justify="left")
    table.add_column("efficiency")
    table.add_column("value", justify="right")
    for name, value in learned.items():
        table.add_row(name, f"{value:.3g}")
    console.print(table)
    console.print(f"kept in {calibration_file()}; every plan for this hardware uses it", markup=False)


def show_names(console: Console) -> None:
    from trainer.plan.hardware import device_names
    from trainer.plan.skeleton import library

    console.print("models:  " + ", ".join(sorted(library())), markup=False)
    console.print("devices: " + ", ".join(device_names()) + ", local", markup=False)
