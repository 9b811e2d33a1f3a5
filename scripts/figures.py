"""Every figure of the docs, made from the runs that lie in docs/dev/figures.

``python -m bench.NAME --keep`` adds a run there, and ``python -m scripts.figures`` writes the tables of BENCHMARKS.md,
PAPER.md and MODELS.md. What is read aloud elsewhere is compared with them by tests/docs/test_figures.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "dev" / "figures"
#: A run of ``scripts/gpu-check``: sections, and no runs of one bench.
CUDA = "cuda"
BEGIN, END = "<!-- generated: python -m scripts.figures -->", "<!-- end -->"

Run = Mapping[str, Any]


def runs(name: str) -> list[Run]:
    """Return the runs of a bench, the oldest first."""
    return list(json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8")))


def figure(name: str, key: str) -> Any:
    """Return a figure of a bench, or the value of a check."""
    for run in runs(name):
        values = {**run["figures"], **{check["name"]: check["value"] for check in run["checks"]}}
        if key in values:
            return values[key]
    raise KeyError(f"docs/dev/figures/{name}.json has no {key}")


def cuda() -> Mapping[str, Any]:
    """Return the run on a machine with CUDA."""
    return dict(json.loads((KEPT / f"{CUDA}.json").read_text(encoding="utf-8")))


def benchmarks() -> str:
    """Return a table for each run of each bench."""
    names = sorted(path.stem for path in KEPT.glob("*.json") if path.stem != CUDA)
    return "\n\n".join(_run(run) for name in names for run in runs(name) if _rows(run))


def _run(run: Run) -> str:
    table = ["| figure | value | limit |", "|---|---|---|", *_rows(run)]
    return f"`{run['command']}`, {run['date']}, {_machine(run['machine'])}:\n\n" + "\n".join(table)


def _machine(machine: Mapping[str, Any]) -> str:
    """Return what is known of a machine."""
    words = [str(machine["cpu"])] if "cpu" in machine else []
    words.append(f"{machine['cores']} cores")
    words += [f"Python {machine['python']}, load {machine['load_1m']}"] if "python" in machine else []
    return ", ".join(words)


def _rows(run: Run) -> list[str]:
    rows = []
    for check in run["checks"]:
        sign = "<=" if check["better"] == "lower" else ">="
        missed = "" if check["ok"] else " **missed**"
        rows.append(f"| `{check['name']}` | {number(check['value'])} | {sign} {number(check['limit'])}{missed} |")
    for name, value in run["figures"].items():
        if isinstance(value, int | float):
            rows.append(f"| `{name}` | {number(value)} | |")
        elif run["bench"] != "paper" and all(isinstance(each, int | float) for each in value.values()):
            rows += [f"| `{name}`: {key} | {number(each)} | |" for key, each in value.items()]
    return rows


def number(value: float) -> str:
    """Return three digits that count, and all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def factors() -> str:
    """Return how many times each baseline of the paper takes what ours takes, as it reports and as it is here."""
    rows = {
        (figure, name): row
        for run in runs("paper")
        for figure, factors in run["figures"].items()
        if figure.startswith(("Figure", "Table"))
        for name, row in factors.items()
    }
    lines = ["| figure | compared | paper | here |", "|---|---|---|---|"]
    return "\n".join(
        lines
        + [
            f"| {figure} | {name} | {_times(row['paper'])} | {_times(row['here'])} |"
            for (figure, name), row in sorted(rows.items(), key=lambda one: one[0][0])
        ]
    )


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.2f}x"


def models() -> str:
    """Return what was measured on a machine with CUDA."""
    run = cuda()
    large, served, rate = run["large"], run["served"], run["rate"]
    figures = large["figures"]
    checks = {check["name"]: check["value"] for check in large["checks"]}
    size = f"{figures['model_bytes'] / 1e9:.1f} GB"
    rows = {
        f"swap of a random 8B model in bfloat16 ({size}): evict one, restore the other": (
            f"{figures['restore_and_bind_s']:.2f} s, {figures['restore_gib_per_s']:.0f} GiB/s: "
            f"{checks['restore_over_h2d_ceiling']:.2f} of a plain copy from pinned memory"
        ),
        "the same model by `from_pretrained`, page cache warm": (
            f"{figures['from_pretrained_s']:.1f} s, {checks['from_pretrained_over_restore']:.1f} times as long"
        ),
        f"an action on an absent 8B model, against the longer of restore ({figures['restore_s']:.2f} s) and compute "
        f"({figures['compute_s']:.2f} s)": f"{checks['cold_over_max_restore_compute']:.2f}",
        "a computation beside a restore, against alone": f"{checks['prefetch_slowdown']:.2f}",
        "score, step scores, logprobs and embed in float32, bfloat16 and float16, five families, against "
        "transformers": f"at most {max(run['correct']['differences'].values()):.1e}".replace("e-0", "e-"),
        "a gateway over HTTP, four services of 0.6B of which two fit, one sequence of 256 tokens": (
            f"{served['warm_ms']:.0f} ms warm, {served['cold_ms']:.0f} ms with a swap"
        ),
        "the same, 64 calls at once of one service": f"{served['calls_per_s_at_once']:.0f} calls a second",
        "log-probabilities, 16 sequences of 512 tokens, 0.6B": _rate(rate, "logprobs"),
        "generate, 16 sequences, 0.6B": f"{_rate(rate, 'generate')}. An engine is many times faster",
    }
    about = f"`{run['command']}`, {run['date']}, one {run['card']}, {run['machine']['cores']} cores, torch "
    about += f"{run['machine']['torch']}, transformers {run['machine']['transformers']}:\n\n"
    return about + "\n".join(
        ["| what | figure |", "|---|---|", *(f"| {what} | {said} |" for what, said in rows.items())]
    )


def _rate(rate: Mapping[str, Any], action: str) -> str:
    ours, theirs = rate[f"{action}_tokens_per_s"], rate[f"transformers_{action}_tokens_per_s"]
    digits = -3 if ours >= 10_000 else 0
    return f"{round(ours, digits):,.0f} tokens a second; plain transformers {round(theirs, digits):,.0f}"


#: Page -> its table.
TABLES = {"BENCHMARKS.md": benchmarks, "PAPER.md": factors, "MODELS.md": models}


def written(text: str, table: str) -> str:
    """Return a page with its table put between the marks; raises ValueError where a page has no marks."""
    block = f"{BEGIN}\n\n{table}\n\n{END}"
    made, count = re.subn(rf"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda match: block, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} blocks {BEGIN} ... {END}")
    return made


def main() -> None:
    for name, table in TABLES.items():
        page = ROOT / "docs" / name
        page.write_text(written(page.read_text(encoding="utf-8"), table()), encoding="utf-8")


if __name__ == "__main__":
    main()
