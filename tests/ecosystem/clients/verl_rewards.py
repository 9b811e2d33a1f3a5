"""verl's own reward loop, its workers Ray's actors, with our `compute_score`: ``URL DIRECTORY``."""

import json
import os
import sys
from pathlib import Path

url = os.environ["TANGRAM_SERVER"] = sys.argv[1]
os.environ["RAY_USAGE_STATS_ENABLED"] = os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
import numpy as np
import ray
import torch
import verl
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker
from verl.trainer.ppo.reward import extract_reward

directory = Path(sys.argv[2])
DEFAULTS = Path(verl.__file__).parent / "trainer" / "config" / "reward" / "reward.yaml"
WORDS = ["[PAD]", "[EOS]", "it", "is", "4", "5", "def", "add(a,b):return", "a+b", "a-b", "anything"]
TEST = "from solution import add\n\ndef test_add():\n    assert add(2, 2) == 4\n"
ROWS, RESPONSE = 3, 8


def tokenizer():
    """Return a tokenizer of a few words, as a model's directory has one."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]", unk_token="[PAD]")
    fast.save_pretrained(directory)
    return fast


def rollouts(words, texts, **columns):
    """Return rollouts with these responses, padded as verl pads them."""
    ids = [words.encode(text, add_special_tokens=False) for text in texts]
    responses = torch.tensor([each + [0] * (RESPONSE - len(each)) for each in ids])
    prompts = torch.full((len(texts), ROWS), 2)
    mask = torch.cat([torch.ones_like(prompts), (responses != 0).long()], dim=1)
    many = {name: np.array(values, dtype=object) for name, values in columns.items()}
    tensors = {"prompts": prompts, "responses": responses, "attention_mask": mask}
    return DataProto.from_dict(tensors=tensors, non_tensors=many)


def configured(function, **options):
    """Return a configuration of verl's with our reward, as a user writes it."""
    config = OmegaConf.create({"reward": OmegaConf.load(DEFAULTS), "actor_rollout_ref": {"model": {}}})
    config.actor_rollout_ref.model = {"path": str(directory), "tokenizer_path": None}
    config.reward.num_workers = 1
    kwargs = {"function": function, **options}
    chosen = {"path": "pkg://tangram.adapters.verl_reward", "name": "compute_score", "reward_kwargs": kwargs}
    config.reward.custom_reward_function = chosen
    return config


def looped(config, data):
    """Return each rollout's reward and where it stands, by verl's reward loop and its actors, or how it failed."""
    try:
        tensor, extra = extract_reward(RewardLoopManager(config).compute_rm_score(data))
    except ray.exceptions.RayTaskError as error:
        return failure(error.cause)
    places = [int(row.nonzero()[0]) if row.any() else -1 for row in tensor]
    return {"sums": tensor.sum(dim=1).tolist(), "places": places, "acc": extra["acc"].tolist()}


def worked(config, data):
    """Return each rollout's reward, by verl's worker in this process, or how it failed."""
    worker = RewardLoopWorker(config)
    try:
        told = worker.loop.run_until_complete(worker.compute_score_batch(data))
    except Exception as error:
        return failure(error)
    return [each["reward_score"] for each in told]


def failure(error):
    return {"raised": type(error).__name__, "reason": getattr(error, "reason", ""), "told": str(error)[:300]}


words = tokenizer()
# On loopback, and with nothing of this machine's own clusters.
ray.init(address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
told = {}
label, source = {"ground_truth": "4", "style": "rule"}, "tests"
texts = ["it is 4", "it is 5", "4", "it is 4"]
count = len(texts)
judged = rollouts(words, texts, data_source=[source] * count, reward_model=[label] * count, extra_info=[{}] * count)
suite = {"tests": {"solution.py": "{solution}", "test_it.py": TEST}}
programs = rollouts(
    words, ["def add(a,b):return a+b", "def add(a,b):return a-b"], data_source=[source] * 2,
    reward_model=[label] * 2, extra_info=[{"input": suite}, {"input": suite}],
)  # fmt: skip
told["tested"] = worked(configured("tests"), programs)
told["worth"] = worked(configured("broken_judge", failed_as={"handler_error": -1.0}), judged)
told["broken"] = worked(configured("broken_judge"), judged)
told["nothing"] = worked(configured("mute_judge"), judged)
told["unknown"] = worked(configured("nowhere"), judged)
told["judged"] = looped(configured("judge"), judged)
told["lost"] = looped(configured("broken_judge"), judged)
ray.shutdown()
print(json.dumps(told))
