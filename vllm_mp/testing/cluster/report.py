"""Figures of a simulated cluster, and a table of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_mp.testing.cluster.cluster import ClusterOptions, Outcome


def figures(options: ClusterOptions, outcome: Outcome) -> dict[str, Any]:
    """Return the figures of one run. Times are in seconds, rates per second of simulated time."""
    jobs, cores = outcome.jobs, outcome.cores
    first = np.array([job.first_token_s - job.request.arrival for job in jobs])
    spans = [
        (job.ended_s - job.first_token_s) / (job.request.num_output - 1) for job in jobs if job.request.num_output > 1
    ]
    num_prompt, num_output = sum(job.request.num_prompt for job in jobs), sum(job.request.num_output for job in jobs)
    seconds = max(job.ended_s for job in jobs) - min(job.request.arrival for job in jobs)
    num_reread = sum(core.num_reread for core in cores)
    pauses = [pause for job in jobs for pause in job.pauses]
    return {
        "cores": options.num_cores,
        "policy": options.policy,
        "fronts": options.num_fronts,
        "requests": len(jobs),
        "seconds": seconds,
        "requests_per_s": len(jobs) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "prompt_tokens_per_s": num_prompt / seconds,
        "busy": sum(core.busy_s for core in cores) / seconds / len(cores),
        "first_token_median_s": float(np.median(first)),
        "first_token_p99_s": float(np.quantile(first, 0.99)),
        "token_mean_s": float(np.mean(spans)) if spans else 0.0,
        "prefix_hits": sum(job.hit or 0 for job in jobs) / num_prompt,
        "preemptions": sum(core.num_preemptions for core in cores),
        "deaths": outcome.num_deaths,
        "moved": outcome.num_moved,
        "dead_tokens": outcome.num_dead,
        "lost_tokens": num_reread,
        "lost_s": num_reread * options.model.read + outcome.unfinished_s,
        "pause_p99_s": float(np.quantile(pauses, 0.99)) if pauses else 0.0,
    }


_COLUMNS = (
    ("cores", "cores", "{:,}"),
    ("policy", "policy", "{}"),
    ("output_tokens_per_s", "tokens/s", "{:,.0f}"),
    ("busy", "busy", "{:.0%}"),
    ("first_token_median_s", "first token, median s", "{:.3f}"),
    ("first_token_p99_s", "p99 s", "{:.2f}"),
    ("token_mean_s", "each token, mean s", "{:.4f}"),
    ("prefix_hits", "prefix hits", "{:.1%}"),
)
_FRONTS = (("fronts", "fronts", "{:,}"),)
_LOSSES = (
    ("deaths", "deaths", "{:,}"),
    ("moved", "moved", "{:,}"),
    ("lost_tokens", "lost tokens", "{:,}"),
    ("lost_s", "lost core s", "{:.1f}"),
    ("pause_p99_s", "pause, p99 s", "{:.2f}"),
)


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the figures of runs as a Markdown table, with columns about fronts and deaths if there are several."""
    columns = _COLUMNS[:1] + (_FRONTS if any(record["fronts"] > 1 for record in records) else ()) + _COLUMNS[1:]
    columns += _LOSSES if any(record["deaths"] for record in records) else ()
    rows = [[title for _, title, _ in columns], ["---"] * len(columns)]
    rows += [[form.format(record[key]) for key, _, form in columns] for record in records]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
