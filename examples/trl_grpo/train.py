"""TRL's GRPO on a tiny model, its rewards from pytest in sandboxes and a handler, its teachers in shared slots.

    examples/trl_grpo/run                 # seed 0; minutes, on the CPU
    examples/trl_grpo/run --seed 1
    examples/trl_grpo/run --kill          # kills the gateway in the middle; rewards must equal those of an unkilled run

A real training loop in small: a student that gets about a quarter of its programs right is trained on what their tests
say, then learns from two teachers, each of which knows one domain.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import torch
import trl.generation.vllm_client
from datasets import Dataset
from pretrain import right_share, student, teacher
from programs import DOMAINS, TASKS, prompt_of, source_of, suite_of, tokenizer, write_checkpoint
from served import ServedGateway
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tangram.adapters.trl import reward

STEPS, PROMPTS, GENERATIONS = 24, 8, 8
#: Where `--kill` kills: in the middle of the training, between two rewards of one step.
KILLED_AT = STEPS // 2
DISTILLED = 16


class Ledger:
    """Every reward that a run was given, in order, by what it was for."""

    def __init__(self, gateway: ServedGateway, kill: bool) -> None:
        self.steps: list[list[tuple[str, str, float]]] = []
        self._gateway, self._kill = gateway, kill
        options = {"server": gateway.url, "token": gateway.token, "task": "grpo"}
        self._passes = reward("passes", _suite, name="passes", **options)
        self._brief = reward("brief", _program, name="brief", **options)

    async def passes(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
        """Judge the programs of one step by their tests; what the student wrote twice is tested once."""
        if self._kill and len(self.steps) == KILLED_AT:
            self._gateway.kill_soon()
        given = list(zip(prompts, completions, strict=True))
        asked = list(dict.fromkeys(given))
        told = await self._passes(
            [prompt for prompt, _ in asked],
            [completion for _, completion in asked],
            task=[prompt.split()[1] for prompt, _ in asked],
        )
        scores = dict(zip(asked, told, strict=True))
        self.steps.append([(prompt, completion, scores[prompt, completion]) for prompt, completion in given])
        return [scores[each] for each in given]

    async def brief(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
        """Judge how short they are, in a warm process; a program is as short for one prompt as for another."""
        asked = list(dict.fromkeys(completions))
        scores = dict(zip(asked, await self._brief([""] * len(asked), asked), strict=True))
        return [scores[completion] for completion in completions]

    def mean(self, begin: float, end: float) -> float:
        """Return the mean reward of a part of the run."""
        steps = self.steps[int(begin * len(self.steps)) : int(end * len(self.steps))]
        return fmean(score for step in steps for _, _, score in step)


def _suite(prompt: str, completion: str, row: dict[str, Any]) -> dict[str, Any]:
    return {"tests": {"program.py": source_of(completion), "test_program.py": suite_of(row["task"])}}


def _program(prompt: str, completion: str, row: dict[str, Any]) -> dict[str, Any]:
    return {"program": source_of(completion)}


def grpo(seed: int, gateway: ServedGateway, start: Path, out: Path, *, kill: bool) -> Ledger:
    """Train the student that lies at ``start``; return every reward."""
    ledger = Ledger(gateway, kill)
    # One function for each, as TRL asks for functions.

    async def passes(prompts: Any, completions: Any, **columns: Any) -> Any:
        return await ledger.passes(prompts, completions)

    async def brief(prompts: Any, completions: Any, **columns: Any) -> Any:
        return await ledger.brief(prompts, completions)

    config = GRPOConfig(
        output_dir=str(out),
        seed=seed,
        max_steps=STEPS,
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=10,
        learning_rate=5e-4,  # at 2e-3 some students unlearn all that they knew within ten steps
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        reward_weights=[1.0, 0.1],
        **_quiet(),
    )
    rows = [{"prompt": prompt_of(task)} for task in TASKS] * 16
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start),
        reward_funcs=[passes, brief],
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    trainer.train()
    trainer.model.save_pretrained(out / "trained")
    tokenizer().save_pretrained(out / "trained")
    return ledger


def distil(seed: int, gateway: ServedGateway, start: Path, out: Path) -> dict[str, tuple[float, float]]:
    """Let the student at ``start`` learn from each domain's teacher in turn; return its shares of right programs."""
    from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

    # TRL wants vLLM installed before it lets its HTTP client ask a server; that client alone needs none.
    trl.generation.vllm_client.is_vllm_available = lambda *arguments, **given: True
    model = AutoModelForCausalLM.from_pretrained(start)
    told = {}
    for name, tasks in DOMAINS.items():
        before = right_share(model, tasks, 64)
        config = ServerDistillationConfig(
            output_dir=str(out / name),
            seed=seed,
            max_steps=DISTILLED,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            max_completion_length=10,
            teacher_model_server_url=f"{gateway.url}/models/~{gateway.token}/{name}",
            beta=0.0,
            loss_top_k=8,
            **_quiet(),
        )
        trainer = ServerDistillationTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt_of(task)} for task in tasks] * 32),
            processing_class=tokenizer(),
        )
        trainer.train()
        told[name] = (before, right_share(model, tasks, 64))
    return told


def _quiet() -> dict[str, Any]:
    return {
        "use_cpu": True,
        # Its models generate between steps, and are small.
        "gradient_checkpointing": False,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1000,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill", action="store_true", help="kill the gateway in the middle, and compare every reward")
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # it ends its gateway then, too
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # so small a model only loses by sharing its work out, and runs are the same
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trl-grpo-") as name:
        work = Path(name)
        work.chmod(0o755)
        told = run(options.seed, options.kill, work, quiet=options.json)
    told["seconds"] = round(time.monotonic() - begun_s)
    print(json.dumps(told))
    return 0 if told["gained"] and told.get("same_rewards", True) else 1


def run(seed: int, kill: bool, work: Path, *, quiet: bool) -> dict[str, Any]:
    """Do all of it; return what came of it."""

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    made, share = student(seed)
    start = write_checkpoint(made, work / "student")
    for number, (domain, tasks) in enumerate(DOMAINS.items()):
        write_checkpoint(teacher(seed + 100 + number, tasks), work / "models" / domain)
    say(f"pre-trained: {share:.0%} of the student's programs are right")
    with ServedGateway(work, sorted(DOMAINS)) as gateway:
        ledger = grpo(seed, gateway, start, work / "grpo", kill=False)
        first, last = ledger.mean(0, 0.25), ledger.mean(0.75, 1)
        say(f"GRPO, {STEPS} steps: mean reward {first:.2f} in the first quarter, {last:.2f} in the last")
        told: dict[str, Any] = {"seed": seed, "pretrained": round(share, 3), "first_quarter": round(first, 3)}
        told |= {"last_quarter": round(last, 3), "gained": last >= first + 0.1}
        if kill:
            again = grpo(seed, gateway, start, work / "killed", kill=True)
            pairs = list(zip(ledger.steps, again.steps, strict=True))
            different = sum(left != right for one, other in pairs for left, right in zip(one, other, strict=True))
            told |= {"gateway_starts": gateway.starts, "rewards": sum(map(len, again.steps)), "different": different}
            told["same_rewards"] = different == 0 and gateway.starts == 2
            say(f"killed at step {KILLED_AT}: {different} of {told['rewards']} rewards differ from the unkilled run's")
        shares = distil(seed, gateway, start, work / "distilled")
        for domain, (before, after) in shares.items():
            say(f"distilled from the teacher of {domain}: {before:.0%} -> {after:.0%} of its programs are right")
        told["distilled"] = {domain: [round(each, 3) for each in pair] for domain, pair in shares.items()}
        told["living_trajectories"] = gateway.living()
    assert not math.isnan(told["last_quarter"])
    return told


if __name__ == "__main__":
    sys.exit(main())
