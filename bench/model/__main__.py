"""The model bench: restore, swap and overlap on one device, and exactness on every family and DoP.

    python -m bench.model --device cpu --quick --json
    python -m bench.model --device cuda --directory /dev/shm --budget 540 --json     # a random 8B model in bfloat16

It needs torch, transformers, safetensors and numpy, nothing else of the project's dependencies. The limits of the two
devices differ where the hardware does: a host has no copy engine, so that on ``cpu`` a restore and a computation can
at best take turns on the same cores, and the limits say that they lose nothing by overlapping.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from bench.model.architectures import QUICK, RIGHT, classes, compare_all
from bench.model.checkpoints import SHAPES
from bench.model.engines import histories, real_difference
from bench.model.exactness import differences
from bench.model.rig import ModelRig, median_ratio
from bench.report import BenchReport, parser, play
from runtimes.model.checkpoint import Head

GIB = 2**30
#: Largest plain copy on CUDA: its rate is what counts, and torch rounds pinned memory up to a power of two.
CEILING_BYTES_MAX = 4 * GIB


def restores(rig: ModelRig) -> None:
    """Restore against the plain copy of as many bytes, and evict, in turns."""
    size = rig.images[Head.LM].layout.size_bytes
    plain_bytes = min(size, CEILING_BYTES_MAX) if rig.cuda else size
    copy = rig.plain_copy(plain_bytes)
    plain_s, restore_s, evict_s = [], [], []
    rig.compute(Head.LM)
    for _ in rig.rounds():
        plain_s.append(rig.timed(copy) * size / plain_bytes)
        evict_s.append(rig.timed(rig.engine.evict))
        restore_s.append(rig.timed(lambda: rig.restore(Head.LM)))
        rig.restore_and_bind(Head.LM)  # so that evict has a model to park
    report = rig.report
    report.figure("model_bytes", size)
    report.figure("rounds", len(plain_s) - 1)
    report.figure("plain_copy_gib_per_s", size / median(plain_s[1:]) / GIB)
    report.figure("restore_gib_per_s", size / median(restore_s[1:]) / GIB)
    report.figure("restore_s", median(restore_s[1:]))
    if rig.cuda:
        report.check("restore_over_h2d_ceiling", median_ratio(plain_s, restore_s), 0.90, "higher")
    else:
        report.check("restore_over_memcpy", median_ratio(restore_s, plain_s), 1.25, "lower")
    report.check("evict_ms", median(evict_s[1:]) * 1e3, 1.0, "lower")


def loading(rig: ModelRig) -> None:
    """`from_pretrained`, its weights really in place, against restore and bind; the page cache is warm."""
    loaded_s, bound_s = [], []
    for _ in rig.rounds():
        loaded_s.append(rig.timed(rig.from_pretrained))
        rig.engine.evict()
        bound_s.append(rig.timed(lambda: rig.restore_and_bind(Head.LM)))
    rig.report.figure("from_pretrained_s", median(loaded_s[1:]))
    rig.report.figure("restore_and_bind_s", median(bound_s[1:]))
    limit = 6.0 if rig.cuda else 4.0
    rig.report.check("from_pretrained_over_restore", median_ratio(loaded_s, bound_s), limit, "higher")
    model = rig.from_pretrained()
    restored = dict(rig.engine.skeleton(rig.place(Head.LM)).model.named_parameters())
    wrong = sum(not torch.equal(theirs, restored[name]) for name, theirs in model.named_parameters())
    rig.report.check("wrong_weights", wrong, 0, "lower")
    del model
    gc.collect()
    if rig.cuda:
        torch.cuda.empty_cache()


def swaps(rig: ModelRig) -> None:
    """Swap A for B against the restore of B alone, in turns."""
    alone_s, swap_s = [], []

    def swap() -> None:
        rig.engine.evict([str(Head.LM)])
        rig.restore_and_bind(Head.SCORE)

    for _ in rig.rounds():
        rig.engine.evict()
        alone_s.append(rig.timed(lambda: rig.restore_and_bind(Head.SCORE)))
        rig.engine.evict()
        rig.restore_and_bind(Head.LM)
        swap_s.append(rig.timed(swap))
    rig.report.check("swap_over_restore", median_ratio(swap_s, alone_s), 1.1, "lower")


def overlaps(rig: ModelRig) -> None:
    """A cold action against the longer of restore and compute, and what a restore beside it costs a running action."""
    restore_s, cold_s, warm_s, beside_s = [], [], [], []
    expected, wrong = rig.compute(Head.LM), 0
    for _ in rig.rounds():
        rig.engine.evict()
        restore_s.append(rig.timed(lambda: rig.restore(Head.LM)))
        rig.engine.evict()
        cold: list[object] = []
        cold_s.append(rig.timed(lambda found=cold: found.extend(rig.compute(Head.LM))))  # type: ignore[misc]
        wrong += cold != expected
        warm_s.append(rig.timed(lambda: rig.compute(Head.LM)))
        beside_s.append(rig.computed_beside_a_restore())
    longer_s = [max(pair) for pair in zip(restore_s, warm_s, strict=True)]
    turns_s = [sum(pair) for pair in zip(restore_s, warm_s, strict=True)]
    report = rig.report
    report.figure("compute_s", median(warm_s[1:]))
    report.figure("cold_action_s", median(cold_s[1:]))
    limit = 1.15 if rig.cuda else 1.15 * median_ratio(turns_s, longer_s)
    report.check("cold_over_max_restore_compute", median_ratio(cold_s, longer_s), limit, "lower")
    limit = 1.05 if rig.cuda else 1.15 * median_ratio(turns_s, warm_s)
    report.check("prefetch_slowdown", median_ratio(beside_s, warm_s), limit, "lower")
    report.check("wrong_cold_actions", wrong, 0, "lower")


def parking(rig: ModelRig) -> None:
    """What a service that was used and evicted keeps on the device, beyond the arena."""
    held = []
    for _ in range(2):  # what the first time leaves behind (workspaces of the libraries) is no service's
        for head in rig.images:
            rig.compute(head)
        rig.engine.evict()
        rig.engine.release_cache()
        gc.collect()
        held.append(rig.device_bytes())
    rig.report.check("parked_bytes", max(held[1] - held[0], rig.parked_buffer_bytes()), 0, "lower")


def host_memory(rig: ModelRig) -> None:
    """One image serves every DoP: its bytes against those of the checkpoint."""
    files = sum(file.stat().st_size for file in rig.paths[Head.LM].glob("*.safetensors"))
    rig.report.check("host_bytes_over_model", rig.images[Head.LM].layout.size_bytes / files, 1.05, "lower")


def exactness(directory: Path, report: BenchReport) -> None:
    """Every family against plain transformers and every DoP against one, on ``cpu`` devices."""
    found = differences(directory)
    report.check("family_max_abs_diff", found.family, 1e-5, "lower")
    report.check("dop_max_abs_diff", found.dop, 1e-5, "lower")


def architectures(directory: Path, report: BenchReport, quick: bool) -> None:
    """Every architecture of transformers and every head: right, or refused before anything is computed."""
    found = compare_all(directory, QUICK if quick else [(head, kind) for head in Head for kind in classes(head)])
    report.figure("families_right", found.right)
    report.figure("families_refused", found.refused)
    report.check("wrong_silently", len(found.wrong), 0, "lower")
    report.check("architecture_max_abs_diff", found.difference, RIGHT, "lower")
    report.check("batch_over_alone_max_abs_diff", found.batch_difference, RIGHT, "lower")
    for each in found.wrong:
        report.note(each)


def engines(report: BenchReport, quick: bool) -> None:
    """Engines that sleep, wake, drift and are killed at random: never two awake, never another number, nothing left."""
    found = histories(40 if quick else 200)
    report.figure("engine_calls", {name: found[name] for name in ("right", "failed")})
    report.check("awake_together", found["together"], 0, "lower")
    report.check("engine_wrong_answers", found["wrong"], 0, "lower")
    report.check("engines_left", found["left"], 0, "lower")


def vllm(directory: Path, report: BenchReport) -> None:
    """vLLM's CPU build, started as the gateway starts it, against transformers; fetched at its first use (3 GB)."""
    report.check("engine_max_abs_diff", real_difference(directory), 1e-3, "lower")


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    size = options.size or ("8b" if options.device == "cuda" else "tiny" if options.quick else "small")
    report = BenchReport("model")
    report.figure("torch", torch.__version__)
    report.figure("device", torch.cuda.get_device_name() if options.device == "cuda" else "cpu")
    report.figure("size", size)
    directory = Path(tempfile.mkdtemp(prefix="bench-model-", dir=options.directory))
    rounds = 5 if options.quick else 9
    report.ends_s = time.monotonic() + options.budget
    if options.device == "cpu":
        report.note("On cpu a copy and a computation share the cores: overlap limits are those of taking turns.")
    try:
        rig = ModelRig(options.device, size, rounds, directory, report)
        timed = (restores, loading, swaps, overlaps, parking, host_memory)
        parts: dict[str, Callable[[], object]] = {part.__name__: partial(part, rig) for part in timed}
        parts["exactness"] = lambda: exactness(directory, report)
        parts["architectures"] = lambda: architectures(directory, report, options.quick)
        parts["engines"] = lambda: engines(report, options.quick)
        if not options.quick or options.only:
            parts["vllm"] = lambda: vllm(directory, report)
        return play(report, options, parts)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    command = parser("model", parts=True)
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--size", choices=tuple(SHAPES), help="of the timed model; small on cpu, 8b on cuda")
    command.add_argument("--directory", type=Path, help="for the checkpoints, 33 GB with 8b; a temporary one")
    command.add_argument("--budget", type=float, default=3600.0, help="seconds after which no further part is begun")
    return command.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
