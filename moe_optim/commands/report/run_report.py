"""The report of one run: what it was, how it went, what its experts have lost, where time went."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from moe_optim.commands.report import plots
from moe_optim.commands.report.page import Page, Picture, Section, Table
from moe_optim.commands.report.reading import Run, read_run, require_no_run
from moe_optim.commands.train.run_folder import RunFolder
from moe_optim.formats.health_figures import TAGS
from moe_optim.screen import results_console

HEAT_MAPS = {  # figure of health -> label, and whether colours go by magnitude
    "amax": ("largest magnitude", True),
    "error": ("relative error of the quantized weight", False),
    "flushed": ("share flushed to zero", False),
    "saturated": ("share saturated", False),
}
TRENDS = {"error": "relative error", "distance": "distance of experts"}
_OF_LAYERS = ("amax", "error", "saturated", "flushed", "dead_blocks", "norm_ratio", "distance")
_MAY_BE_NONE = ("resumed from", "knobs")
_MOST_WARNINGS = 12
_MOST_LINES = 8


def report(path: Path, out: Path | None = None) -> int:
    """Write the report of a run folder, say where it is, and return 0.

    Args:
        path: of the run folder.
        out: folder of the report; ``report`` in the run folder if not given.

    Raises:
        ConfigError: ``out`` is the folder of a run, or of the report of another one.
        LayoutError: there is no run in the folder.
    """
    out = out or RunFolder(path).report
    require_no_run(out, own=path)
    written = build_page(read_run(path)).write(out)
    results_console().print(str(written))
    return 0


def build_page(run: Run) -> Page:
    """Return the report of a run."""
    unfinished = "" if run.summary else ", not finished"
    return Page(
        title=f"Run {run.name}",
        subtitle=f"{run.format} expert weights, iteration {run.curves.train[-1].iteration}"
        f"{unfinished}",
        sections=list(_sections(run)),
    )


def _sections(run: Run) -> Iterator[Section]:
    unit = run.loss_unit
    yield Section(
        title="Loss",
        table=Table(rows=_loss_rows(run, unit)),
        pictures=[
            Picture(
                name="loss",
                png=plots.plot_loss(run.curves, unit),
                alt="Training and held-out loss over iterations",
            )
        ],
    )
    yield _curve(run, "Gradient norm", {"grad-norm": "gradient norm"}, "gradient-norm")
    yield _health(run)
    yield _tokens(run)
    yield _time(run)
    yield Section(title="What the run was", table=Table(rows=list(_what(run))))


def _loss_rows(run: Run, unit: str) -> list[tuple[str, str]]:
    train, held_out = run.curves.train, run.curves.validation
    rows = [("training loss", f"{train[0].value:.4f} → {train[-1].value:.4f} {unit}")]
    if held_out:
        ends = dict.fromkeys(f"{point.value:.4f}" for point in (held_out[0], held_out[-1]))
        rows.append(("held-out loss", f"{' → '.join(ends)} {unit}"))
    if (test := run.summary.get("test_loss")) is not None:
        rows.append(("test loss", f"{test:.4f} {unit}"))
    if (entropy := run.summary.get("byte_entropy")) is not None:
        rows.append(("byte entropy", f"{entropy:.4f} nats/byte, of the held-out text"))
    return rows


def _curve(run: Run, title: str, tags: dict[str, str], name: str, note: str = "") -> Section:
    """Return a section with one picture of scalars, or one that says that there are none."""
    curves = {label: run.points(tag) for tag, label in tags.items() if run.points(tag)}
    if not curves:
        return Section(title=title, note=f"Not logged by this run: {', '.join(tags)}.")
    label = ", ".join(curves) if len(curves) == 1 else title.lower()
    png = plots.plot_curves(curves, label)
    alt = f"{title} over iterations"
    return Section(title=title, pictures=[Picture(name=name, png=png, alt=alt)], note=note)


def _health(run: Run) -> Section:
    title = "Health of quantized experts"
    layers = run.health_layers
    if not layers:
        return Section(
            title=title,
            note="Not looked at. Train with --set moe_optim.health_interval=100 and quantized "
            "weights.",
        )
    warnings = run.health_warnings()
    more = len(warnings) - _MOST_WARNINGS
    last = run.look("amax")
    assert last is not None  # a look writes every figure
    return Section(
        title=title,
        text=[f"At iteration {last.iteration}, the last that was looked at."],
        warnings=warnings[:_MOST_WARNINGS] + ([f"and {more} more"] if more > 0 else []),
        table=_layers(run, layers),
        pictures=[*_heat_maps(run), *_trends(run, layers, TRENDS)],
        note="error: |value - weight| / |weight|. distance: one minus the mean cosine of two "
        "experts. norm ratio: of the largest to the smallest expert.",
    )


def _heat_maps(run: Run) -> Iterator[Picture]:
    """Draw the figures of the last look that are not zero everywhere."""
    for figure, (label, logarithmic) in HEAT_MAPS.items():
        look = run.look(figure)
        if look is not None and (look.values > 0).any():
            yield Picture(
                name=figure,
                png=plots.plot_heat_map(look, label, logarithmic=logarithmic),
                alt=f"Heat map: {label} of each expert of each layer",
            )


def _trends(run: Run, layers: list[str], figures: Mapping[str, str]) -> Iterator[Picture]:
    """Draw figures of linears over iterations, of at most eight linears."""
    for figure, label in figures.items():
        curves = {layer: run.points(f"{TAGS}{layer}/{figure}") for layer in layers}
        if any(len(points) > 1 for points in curves.values()):
            some = dict(list(curves.items())[:: -(-len(curves) // _MOST_LINES)])
            png = plots.plot_curves(some, label)
            alt = f"{label} over iterations, by layer"
            yield Picture(name=f"{figure}-over-time", png=png, alt=alt)


def _layers(run: Run, layers: list[str]) -> Table:
    rows = []
    for layer in layers:
        last = [run.points(f"{TAGS}{layer}/{figure}")[-1:] for figure in _OF_LAYERS]
        rows.append([layer, *(f"{point[0].value:.3g}" if point else "" for point in last)])
    return Table(header=["layer", *(name.replace("_", " ") for name in _OF_LAYERS)], rows=rows)


def _tokens(run: Run) -> Section:
    title = "Tokens an expert"
    look = run.look("tokens")
    if look is not None:
        return Section(
            title=title,
            text=[
                f"Of the iterations between the last two looks, up to iteration {look.iteration}."
            ],
            pictures=[
                Picture(
                    name="tokens",
                    png=plots.plot_heat_map(
                        look.of_mean(), "tokens, divided by the mean of the layer"
                    ),
                    alt="Heat map: tokens of each expert of each layer",
                ),
                *_trends(
                    run,
                    run.layers_with("tokens"),
                    {"imbalance": "busiest expert, divided by the mean"},
                ),
            ],
        )
    balance = {tag: tag for tag in run.events.scalars if tag.endswith("load_balancing_loss")}
    absent = "Not counted: health_interval counts them."
    if not balance:
        return Section(title=title, note=f"{absent} This run has no load-balancing loss, either.")
    note = f"{absent} Megatron's load-balancing loss grows with the imbalance."
    return _curve(run, title, balance, "balance", note)


def _time(run: Run) -> Section:
    title = "Time by parts"
    times = {name: time for name, time in run.times.items() if math.isfinite(time) and time > 0}
    speed = run.summary.get("iterations_per_second")
    text = [f"{speed:.2f} iterations/s, evaluations and saves included."] if speed else []
    absent = "The parts of an iteration are logged with --timing-log-level 1."
    if not times:
        note = f"Not logged by this run: --log-timers-to-tensorboard. {absent}"
        return Section(title=title, text=text, note=note)
    ordered = dict(sorted(times.items(), key=lambda item: -item[1]))
    return Section(
        title=title,
        text=text,
        pictures=[
            Picture(
                name="time",
                png=plots.plot_bars(ordered, "median ms an iteration"),
                alt="Median time of each part of an iteration",
            )
        ],
        note="Parts lie inside of each other: optimizer in iteration, and so on."
        if len(times) > 1
        else absent,
    )


def _what(run: Run) -> Iterator[tuple[str, str]]:
    """Yield what is known of a run, in the order of a table."""
    texts, model, summary = run.events.texts, run.model, run.summary
    environment, seconds = model.get("environment") or {}, summary.get("seconds")
    facts = {
        "command": summary.get("command"),
        "recipe": texts.get("moe_optim_recipe"),
        "knobs": texts.get("moe_optim_set", "").strip("[]").replace("'", "").replace('"', ""),
        "experts": model.get("format"),
        "optimizer": model.get("optimizer"),
        "step": (model.get("rank0") or {}).get("step"),
        "parameters": _count(model.get("parameters")),
        "of them quantized": _count(model.get("quantized_parameters")),
        "ranks": summary.get("world_size") or texts.get("world_size"),
        "device": environment.get("device"),
        "commit": environment.get("commit"),
        "versions": ", ".join(f"{k} {v}" for k, v in (environment.get("versions") or {}).items()),
        "seed": texts.get("seed"),
        "took": None if seconds is None else f"{seconds:.0f} s",
        "resumed from": summary.get("resumed_from"),
        "folder": str(run.path),
    }
    absent = [name for name, fact in facts.items() if fact in (None, "", "None")]
    for name, fact in facts.items():
        if name not in absent:
            yield name, str(fact)
    missing = [name for name in absent if name not in _MAY_BE_NONE]
    if missing:
        yield "not recorded", ", ".join(missing)


def _count(number: int | None) -> str | None:
    return None if number is None else f"{number:,}"
