"""The Markdown page of a GPU check."""
from __future__ import annotations

from check_run import Run

SUMMARY = "## Summary"
RATIOS = ("q2_K", "q3_K", "q4_K", "iq2_xxs", "iq3_s")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def figure_table(figures: dict[str, dict[str, float]], digits: int) -> str:
    """Return a table with a row per type and a column per figure."""
    columns = list(dict.fromkeys(column for row in figures.values() for column in row))
    return table(["type", *columns], [[name, *(f"{row[c]:.{digits}f}" if c in row else "" for c in columns)] for name, row in figures.items()])


def generation_table(figures: dict) -> str:
    """Return a table of token generation: tokens per second, ratios to upstream types, share of a copy's bandwidth."""
    speeds, shares = figures["speeds"], figures.get("bandwidth_share", {})
    rows = []
    for name, row in speeds.items():
        ratios = [f"{row['tg'] / speeds[base]['tg']:.2f}" if base in speeds else "" for base in RATIOS]
        rows.append([name, f"{row['tg']:.1f}", *ratios, f"{shares[name]:.2f}" if name in shares else ""])
    return table(["type", "t/s", *(f"x {base}" for base in RATIOS), "share of bandwidth"], rows)


def products_table(rows: list[dict]) -> str:
    return table(["type", "rows x columns x tokens", "us", "us by bandwidth", "x q8_0", "x q4_K"],
                 [[r["type"], f"{r['rows']}x{r['cols']}x{r['tokens']}" + (f", {r['used']} of {r['experts']} experts" if r.get("experts") else ""),
                   f"{r['us']:.2f}", *(f"{r[key]:.2f}" if key in r else "" for key in ("bandwidth_us", "x q8_0", "x q4_K"))] for r in rows])


def sections(run: Run) -> list[tuple[str, str]]:
    """Return titles and tables of the measured figures."""
    figures, tables = run.report["figures"], []
    perplexities = {c["name"].removeprefix("perplexity "): c["figures"] for c in run.report["checks"]
                    if c["name"].startswith("perplexity ") and c.get("figures")}
    counted = {c["name"].removeprefix("counters "): c["figures"] for c in run.report["checks"]
               if c["name"].startswith("counters ") and c.get("figures")}
    if perplexities:
        tables.append(("Perplexity of the reference model, CPU and GPU", figure_table(perplexities, 4)))
    if figures.get("speeds"):
        tables.append(("Token generation", generation_table(figures)))
        prompts = {name: {k: v for k, v in row.items() if k.startswith("pp")} for name, row in figures["speeds"].items()}
        tables.append(("Prompts, tokens per second", figure_table(prompts, 0)))
    for key, title in (("sequences", "Token generation with several sequences, tokens per second of all"), ("experts", "Mixture of experts, tokens per second")):
        if figures.get(key):
            tables.append((title, figure_table(figures[key], 0)))
    for key, title in (("products", "Single products"), ("ragged_products", "Products of ragged rows"), ("expert_products", "Products of experts")):
        if figures.get(key):
            tables.append((title, products_table(figures[key])))
    if counted:
        labels = list(dict.fromkeys(label for row in counted.values() for label in row))
        tables.append(("Counters of one vector product of 4096 x 4096", table(["type", *labels], [[n, *(r.get(x, "") for x in labels)] for n, r in counted.items()])))
    return tables


def summary(runs: list[Run]) -> str:
    """List the checks that failed, were too slow or were not run, one line each."""
    lines = []
    for run in runs:
        checks = run.report["checks"]
        lines.append(f"- {run.backend}: {len(run.of_status('passed'))} of {len(checks)} checks passed")
        for status in ("failed", "slow", "not run", "unavailable"):
            lines += [f"- {run.backend}, {status}: {c['name']}: {c['error']}" for c in run.of_status(status)]
        if run.of_status("not run"):
            lines.append("- to resume, repeat the command")
    return f"{SUMMARY}\n\n" + "\n".join(lines) + "\n"


def page(runs: list[Run], bundle: dict) -> str:
    parts = ["# GPU check\n"]
    if bundle:
        parts.append("Bundle: " + ", ".join(f"{key} {value}" for key, value in bundle.items()) + "\n")
    for run in runs:
        parts.append(f"## {run.backend}" + (" (a rehearsal: figures mean nothing)" if run.rehearsal else "") + "\n")
        parts.append(table(["machine", ""], [[key, str(value)] for key, value in run.report["environment"].items()]))
        if copy := run.report["figures"].get("copy_gb_per_s"):
            parts.append(f"A copy on the device reads and writes {copy:.0f} GB/s.\n")
        parts += [f"### {title}\n\n{text}" for title, text in sections(run)]
        parts.append("### Checks\n\n" + table(["check", "result", "seconds"], [[c["name"], c["status"], f"{c['seconds']:.1f}"] for c in run.report["checks"]]))
    return "\n".join([*parts, summary(runs)])
