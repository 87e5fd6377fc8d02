"""The evaluation's report for people: Markdown tables of the numbers in `report.json`, of one drafter or several."""

from __future__ import annotations

from typing import Any

from stages.evaluate.degraded import CHANCE, SIGNS, enough_prompts
from stages.evaluate.subjects import GUARDED
from stages.evaluate.tables import Row, interval, percent, relative, spread, table

Report = dict[str, Any]

THROUGH_BOTH = (
    "Greedy decoding of the drafters and all speed beside the verifier alone through vLLM; temperature above 0 and prompt lookup",
    "through our own loop, which samples drafts as they are meant to be sampled.",
)


def temperatures(report: Report) -> list[float]:
    return sorted({cell["temperature"] for cell in report["cells"]})


def headlines(report: Report, temperature: float) -> list[dict[str, Any]]:
    """Each drafter's cell at its trained K, prompt lookup last."""
    return sorted(
        (cell for cell in report["cells"] if cell["headline"] and cell["temperature"] == temperature),
        key=lambda cell: cell["drafter"] not in report["drafters"],
    )


def verdict_lines(report: Report) -> list[str]:
    return [f"- **{name}: {verdict['verdict']}.** {verdict['reason']}." for name, verdict in report["verdicts"].items()]


def failure_lines(report: Report) -> list[str]:
    return ["", "**Degraded outputs:**", "", *(f"- {line}" for line in report["failures"])] if report["failures"] else []


def length_section(report: Report, temperature: float) -> list[str]:
    """Acceptance length per kind of every drafter at its trained K, then who leads whom."""
    cells = headlines(report, temperature)
    kinds = cells[0]["acceptance_length"]["per_kind"]
    rows: list[Row] = [
        (kind, str(entry["prompts"]), *(f"{cell['acceptance_length']['per_kind'][kind]['value']:.2f}" for cell in cells)) for kind, entry in kinds.items()
    ]
    rows.append(("macro average", "", *(f"{cell['acceptance_length']['macro']:.2f}" for cell in cells)))
    totals = [[sum(entry[key] for entry in cell["acceptance_length"]["per_kind"].values()) for key in ("tokens", "passes")] for cell in cells]
    rows.append(("tokens / passes", "", *(f"{tokens} / {passes}" for tokens, passes in totals)))
    leads = [
        (f"{lead['first']} over {lead['second']}", relative(lead["relative"]), interval(lead["macro"]))
        for lead in report["leads"]
        if lead["temperature"] == temperature
    ]
    through = {"engine": "through the engine", "loop": "through our own loop"}
    where = [
        f"{', '.join(cell['drafter'] for cell in cells if (cell['by'], cell['draft_tokens']) == way)} {through[way[0]]}, K = {way[1]}"
        for way in sorted({(cell["by"], cell["draft_tokens"]) for cell in cells})
    ]
    return [
        f"### Temperature {temperature:g}",
        "",
        f"{'; '.join(where)}.",
        "",
        *table(("kind", "prompts", *(cell["drafter"] for cell in cells)), rows),
        "",
        *(table(("lead of the macro average", "relative", "tokens per pass"), leads) if leads else []),
        "",
    ]


def sweep_rows(report: Report) -> list[Row]:
    """Every drafter, temperature and K: acceptance, and speed beside the verifier alone where it was measured."""
    speeds = {(entry["drafter"], entry["draft_tokens"]): entry for entry in report["speed"]["measured"] if entry["batch_size"] == 1}
    rows: list[Row] = []
    for cell in report["cells"]:
        speed = speeds.get((cell["drafter"], cell["draft_tokens"])) if cell["temperature"] == 0.0 else None
        rows.append(
            (
                cell["drafter"],
                f"{cell['temperature']:g}",
                str(cell["draft_tokens"]),
                f"{cell['interval']['estimate']:.2f} [{cell['interval']['low']:.2f}, {cell['interval']['high']:.2f}]",
                f"{speed['drafted']['median']:.1f}" if speed else "–",
                spread(speed["ratio"]) if speed else "–",
            )
        )
    return rows


def left_out_lines(report: Report) -> list[str]:
    return [f"K = {', '.join(map(str, left))} left out for {name}: above what it was trained for." for name, left in report["left_out"].items() if left]


def position_section(report: Report, temperature: float) -> list[str]:
    """Acceptance at each position of the drafters at their trained K: rate with its counts, survival, and each kind's rate."""
    lines: list[str] = []
    for cell in headlines(report, temperature):
        if cell["drafter"] not in report["drafters"]:
            continue
        tables = cell["per_position"]
        rows = [
            (
                str(row["position"]),
                f"{row['accepted']} / {row['reached']}",
                percent(row["rate"]),
                percent(row["cumulative"]),
                *(percent(kind[index]["rate"]) for kind in tables["per_kind"].values()),
            )
            for index, row in enumerate(tables["all"])
        ]
        lines += [f"### {cell['drafter']}, temperature {temperature:g}", ""]
        lines += [*table(("position", "accepted / reached", "rate", "survival", *tables["per_kind"]), rows), ""]
    return lines


def guard_line(report: Report) -> str:
    """What the guard of prompt lookup does."""
    cells = {cell["drafter"]: cell for cell in report["cells"] if cell["temperature"] == 0.0 and cell["drafter"] not in report["drafters"]}
    guarded, bare = cells[GUARDED], next(cell for name, cell in cells.items() if name != GUARDED)
    return (
        f"The guard of prompt lookup dropped {guarded['counters'].get('guarded_tokens', 0)} drafted tokens that would have extended a loop: "
        f"acceptance length {bare['acceptance_length']['macro']:.2f} without it, {guarded['acceptance_length']['macro']:.2f} with it (greedy). "
        "What is gained on loops is gained on text that nobody wants."
    )


def speed_rows(report: Report) -> list[Row]:
    return [
        (
            entry["drafter"],
            str(entry["draft_tokens"]),
            str(entry["batch_size"]),
            f"{entry['baseline']['median']:.1f}",
            f"{entry['drafted']['median']:.1f}",
            spread(entry["ratio"]),
            ", ".join(f"{repeat['ratio']:.2f}" for repeat in entry["repeats"]),
        )
        for entry in report["speed"]["measured"]
    ]


def speed_section(report: Report) -> list[str]:
    speed = report["speed"]
    timed = [
        f"Greedy, up to {speed['max_tokens']} tokens each (reading the prompt included), {speed['prompts']} prompts or as many as the batch, with and",
        "without the drafter in turn: medians, and the range of the ratios of the pairs.",
        "",
        *table(("drafter", "K", "batch", "alone, tokens/s", "drafted, tokens/s", "ratio", "pairs"), speed_rows(report)),
        "",
        "![Speed against batch size](plots/speed.png)",
        "",
        "Beside guarded prompt lookup, in our own loop (no engine has the guard), one prompt at a time:",
        "",
        *table(("drafter", "lookup, tokens/s", "drafted, tokens/s", "ratio"), lookup_speed_rows(report)),
        "",
    ]
    return [
        "## Speed",
        "",
        *(timed if speed["measured"] else []),
        "Parts of a round in our own loop; head: the Markov chain, part of the drafter.",
        "",
        *table(("drafter", "temperature", "K", "batch", "ms per round", "verifier", "drafter", "head", "other"), round_rows(report)),
        "",
    ]


def lookup_speed_rows(report: Report) -> list[Row]:
    return [
        (entry["drafter"], f"{entry['baseline']['median']:.1f}", f"{entry['drafted']['median']:.1f}", spread(entry["ratio"]))
        for entry in report["speed_beside_lookup"]
    ]


def round_rows(report: Report) -> list[Row]:
    """Where the seconds of a round of our own loop go; the head is part of the drafter."""

    def row(name: str, temperature: float, draft_tokens: int, batch: int, seconds: dict[str, float]) -> Row:
        rounds = max(1.0, seconds["rounds"])
        whole = seconds["verifier"] + seconds["drafter"] + seconds["other"]
        parts = [seconds[part] / max(whole, 1e-12) for part in ("verifier", "drafter", "head", "other")]
        return (name, f"{temperature:g}", str(draft_tokens), str(batch), f"{1000 * whole / rounds:.1f}", *map(percent, parts))

    trained = {cell["drafter"]: cell["draft_tokens"] for cell in report["cells"] if cell["headline"]}
    rows = [row(entry["drafter"], 0.0, trained[entry["drafter"]], 1, entry["seconds"]) for entry in report["speed_beside_lookup"]]
    cells = [cell for cell in report["cells"] if cell["seconds"] is not None and cell["drafter"] in report["drafters"]]
    return rows + [row(cell["drafter"], cell["temperature"], cell["draft_tokens"], report["batch_size"], cell["seconds"]) for cell in cells]


def output_rows(report: Report) -> list[Row]:
    return [
        (
            cell["drafter"],
            f"{cell['temperature']:g}",
            str(cell["draft_tokens"]),
            str(cell["outputs"]["ok"]),
            str(cell["outputs"]["degraded"]),
            str(cell["outputs"]["identical"]),
            *(f"{cell['outputs']['signs'][sign]['worse']} : {cell['outputs']['signs'][sign]['better']}" for sign in SIGNS),
        )
        for cell in report["cells"]
    ]


def calibration_section(report: Report) -> list[str]:
    """Expected calibration error per position, before and after, of the drafters that have a confidence head."""
    lines: list[str] = []
    for name, modes in report["calibration"].items():
        for mode, found in modes.items():
            rows = [(str(row["position"]), str(row["blocks"]), *(f"{row[key]:.4f}" for key in ("ece_before", "ece_after"))) for row in found["held_out"]]
            lines += [f"{name}, {mode}, fitted on {found['fitted_on']} blocks of other texts:", ""]
            lines += [*table(("position", "blocks", "error before", "error after"), rows), ""]
    if not lines:
        return []
    return ["## Calibration", "", "Expected calibration error of the survival up to each position.", "", *lines, "![Calibration](plots/calibration.png)", ""]


def markdown(report: Report) -> str:
    """The whole report."""
    speed = report["speed"]
    lines = [
        f"# Evaluation of {'the drafter' if len(report['drafters']) == 1 else 'drafters'}",
        "",
        *verdict_lines(report),
        *failure_lines(report),
        "",
        f"{report['prompts']} held-out prompts, up to {report['max_tokens']} tokens each, {report['dtype']}.",
        *(THROUGH_BOTH if speed["measured"] else ["Through our own loop; nothing was timed beside the verifier alone."]),
        "",
        "## Acceptance length",
        "",
        "Tokens committed per verifier pass, the verifier's own token included (1 = no speculation). Leads with 95 % paired bootstrap",
        "intervals over the prompts.",
        "",
        *(line for temperature in temperatures(report) for line in length_section(report, temperature)),
        guard_line(report),
        "",
        "![Acceptance length per kind](plots/acceptance_length.png)",
        "",
        "## Drafts per round",
        "",
        "Acceptance length (macro average, 95 % interval), and tokens per second one prompt at a time beside the verifier alone. The engine feeds a block of K",
        "positions, our own loop the trained block of which it verifies the first K.",
        "",
        *table(("drafter", "temperature", "K", "length", "tokens/s", "against alone"), sweep_rows(report)),
        "",
        *left_out_lines(report),
        "",
        "![Acceptance and speed by drafts per round](plots/sweep.png)",
        "",
        "## Acceptance per position",
        "",
        "Rate: of the rounds that accepted every draft before this position, how many accepted this one too. Survival: the",
        "product of the rates so far. The columns on the right are the rates per kind.",
        "",
        *(line for temperature in temperatures(report) for line in position_section(report, temperature)),
        "![Acceptance per position](plots/acceptance_per_position.png)",
        "",
        *speed_section(report),
        "## Outputs",
        "",
        "Against the verifier alone, same prompt, same sampling settings. Degraded: an output that loops, is empty or ends early where the",
        "verifier's own does not; in the columns on the right, how often that was so, and how often the other way round.",
        f"A lossless drafter shows both equally often; the stage fails where chance explains the difference with less than {CHANCE:g} over all tests",
        f"(so {enough_prompts(len(report['cells']))} prompts are the fewest that can show anything).",
        "",
        *table(("drafter", "temperature", "K", "ok", "degraded", "identical", *SIGNS), output_rows(report)),
        "",
        *calibration_section(report),
    ]
    return "\n".join(lines)
