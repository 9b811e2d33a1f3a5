"""Every architecture that transformers has a class of: a tiny random checkpoint of it, and our numbers beside its own.

python -m bench.model.architectures          # the table of docs/MODELS.md
python -m bench.model.architectures falcon   # compare those whose name contains a word
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as functional
import transformers
from transformers.models.auto import modeling_auto

from bench.model.one_device import OneDevice
from manager.errors import InvalidConfig, Unsupported
from manager.function import ModelAction
from runtimes.model.checkpoint import Head
from runtimes.model.processes import Generated, TokenLogprobs, WorkItem
from runtimes.model.request import Sampling
from runtimes.model.weights import Host, refusal_of

#: Whatever a configuration calls its sizes.
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "model_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "inner_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "dff", "feed_forward_size", "ffn_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _all(kinds: Sequence[str], sizes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(kinds, sizes)


_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_MLA: dict[str, Any] = {
    **_LATENT,
    "head_dim": 8,
    "qk_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
#: What a family needs besides.
SPECIAL: dict[str, dict[str, Any]] = {
    **_all(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "mistral4", "youtu"), _MLA),
    **_all(("glm_moe_dsa", "glm4_moe_lite", "minicpm3"), _MLA),
    "longcat_flash": {**_MLA, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    **_all(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), {"num_hidden_layers": 4}),
    **_all(("qwen4_exp", "qwen4_exp_text", "lfm3"), {"num_hidden_layers": 4}),
    "bailing_hybrid": {"num_hidden_layers": 8},
    "kimi_linear": {"num_hidden_layers": 4, **_LATENT},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
    "bamba": {**_MAMBA, "num_hidden_layers": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "kv_channels": 8,
        "adapter_rank": 4,
    },
    "dots1": {"num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **_all(("dots3_note", "dots3_note_text"), {**_MLA}),
    **_all(("gptj", "codegen"), {"rotary_dim": 4}),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "zaya": {"num_experts_per_tok": 1},
    "gemma4_text": {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 8, "num_hidden_layers": 6},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 16],
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 8,
    },
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    **_all(("xlm", "flaubert"), {"emb_dim": 32}),
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 32},
    "lilt": {"hidden_size": 24},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "visual_embed": False},
    "esmc": {"num_key_value_heads": 4},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_head": 8, "d_inner": 64},
}

#: Sequences of several lengths, none with an end or padding token in it.
IDS = [[7, 3, 99, 12], [5, 5, 201, 34, 77, 140, 8, 9, 250], [8, 33, 12, 7]]
NEW_TOKENS = 3
#: Of the largest number that is told of them: further apart is another number.
RIGHT = 1e-4
#: One of each way to be loaded and computed: plain, joined experts, linear attention, both ways, no padding.
QUICK = (
    (Head.LM, "llama"),
    (Head.LM, "qwen3_moe"),
    (Head.LM, "gemma2"),
    (Head.LM, "qwen3_next"),
    (Head.LM, "bert"),
    (Head.SCORE, "gpt2"),
    (Head.STEPS, "qwen2"),
    (Head.SCORE, "bart"),
    (Head.BASE, "bert"),
    (Head.BASE, "fnet"),
    (Head.BASE, "qwen3"),
)
_ACTIONS = {
    Head.LM: ModelAction.LOGPROBS,
    Head.SCORE: ModelAction.SCORE,
    Head.STEPS: ModelAction.STEP_SCORES,
    Head.BASE: ModelAction.EMBED,
}


def classes(head: Head) -> dict[str, str]:
    """Return the class that transformers exports for a head, by model_type; of text models only for `Head.BASE`."""
    text = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    )
    every = modeling_auto.MODEL_MAPPING_NAMES
    table: Any = {Head.LM: text[0], Head.SCORE: text[1], Head.STEPS: text[4], Head.BASE: every}[head]
    known = {kind for each in text for kind in each} & set(transformers.CONFIG_MAPPING.keys())
    return {kind: name if isinstance(name, str) else name[0] for kind, name in table.items() if kind in known}


def tiny_config(kind: str, name: str) -> Any:
    """Return a small configuration of a class; raises whatever the configuration does."""
    made = transformers.CONFIG_MAPPING[kind]
    known = made().to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    for key, part in known.items():
        if key.endswith("_config") and isinstance(part, dict):
            inner = part.get("model_type", "")
            sizes[key] = {each: value for each, value in SIZES.items() if each in part} | SPECIAL.get(inner, {})
            sizes[key] |= {"model_type": inner} if inner else {}
    config = made(**{**sizes, **SPECIAL.get(kind, {})})
    wanted = getattr(transformers, name).config_class
    # Some classes are the language model alone of what the configuration describes.
    return config if wanted is None or isinstance(config, wanted) else config.get_text_config()


def write(directory: Path, kind: str, name: str) -> Path:
    """Write a random checkpoint of a class, its weights large enough for differences to show."""
    target = directory / f"{kind}-{name}"
    torch.manual_seed(0)
    model = getattr(transformers, name)(tiny_config(kind, name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(target)
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Why it is refused, or how far our numbers are from those of transformers, and in a batch from those alone."""

    refusal: str = ""
    difference: float = 0.0
    batch_difference: float = 0.0


def compare(directory: Path, kind: str, head: Head) -> Comparison:
    """Serve a tiny random checkpoint as it is registered, and by plain transformers, one sequence at a time."""
    name = classes(head)[kind]
    early = _early_refusal(kind, name, head)
    if early:
        return Comparison(refusal=early)
    path = write(directory, kind, name)
    device = OneDevice(Host(4096, threads=1))
    try:
        try:
            place = device.place(path, head)
        except (InvalidConfig, Unsupported) as error:
            return Comparison(refusal=error.message)
        plain = getattr(transformers, name).from_pretrained(path).eval()
        items = [item_of(head, ids) for ids in IDS]
        alone = [_numbers(device.run(place, [item], 1000)) for item in items]
        together = [_numbers([each]) for each in device.run(place, items, 1000)]
        expected = [plain_numbers(plain, head, ids) for ids in IDS]
        difference = max(_apart(alone, expected), _apart(together, expected))
        if head is Head.LM:
            difference = max(difference, _generated_apart(device, place, plain))
        return Comparison(difference=difference, batch_difference=_apart(together, alone))
    finally:
        device.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of many comparisons: how many were right, what was served and wrong, and the largest differences."""

    right: int
    refused: int
    wrong: tuple[str, ...]
    difference: float
    batch_difference: float


def compare_all(directory: Path, cases: Sequence[tuple[Head, str]]) -> Summary:
    """Compare each of these; one that fails where it was not refused is wrong."""
    found, wrong = [], []
    for head, kind in cases:
        try:
            one = compare(directory, kind, head)
        except Exception as error:  # noqa: BLE001  # a failure that nobody foretold
            wrong.append(f"{head} {kind}: {type(error).__name__}: {error}"[:200])
            continue
        found.append(one)
        if max(one.difference, one.batch_difference) > RIGHT:
            wrong.append(f"{head} {kind}: {one.difference:g} from transformers, {one.batch_difference:g} in a batch")
    refused = sum(bool(one.refusal) for one in found)
    return Summary(
        right=len(found) - refused - sum("in a batch" in each for each in wrong),
        refused=refused,
        wrong=tuple(wrong),
        difference=max((one.difference for one in found), default=0.0),
        batch_difference=max((one.batch_difference for one in found), default=0.0),
    )


def item_of(head: Head, ids: Sequence[int]) -> WorkItem:
    """Return what is asked of a sequence."""
    return WorkItem(ids=tuple(ids), action=_ACTIONS[head], positions=tuple(range(len(ids))))


def _early_refusal(kind: str, name: str, head: Head) -> str:
    """Return why a class is refused before a checkpoint of it is looked at; some of them cannot even be made small."""
    made = getattr(transformers, name, None)
    try:
        config = tiny_config(kind, name)
    except Exception:  # noqa: BLE001  # it is refused by its name, or the comparison fails
        config = transformers.CONFIG_MAPPING[kind]
    return refusal_of(made, config, head)


def plain_numbers(model: Any, head: Head, ids: Sequence[int]) -> list[float]:
    """Return what transformers computes of a sequence, alone on the model's device: what `item_of` asks for."""
    given = torch.tensor([list(ids)], device=model.device)
    with torch.inference_mode():
        said = model(input_ids=given, attention_mask=torch.ones_like(given))
        if head in (Head.SCORE, Head.STEPS):
            values = said.logits[0].float().flatten()
        elif head is Head.BASE:
            values = functional.normalize(said.last_hidden_state[0].float().mean(0), dim=-1)
        else:
            values = said.logits[0].float().log_softmax(-1)[:-1].gather(1, given[0, 1:, None])[:, 0]
        return [float(value) for value in values]


def _numbers(results: Sequence[object]) -> list[float]:
    (result,) = results
    if isinstance(result, TokenLogprobs):
        return result.logprobs
    return [float(each) for each in torch.tensor(result).flatten()]


def _apart(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Return the largest difference; infinite where a value is missing or not finite."""
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one, other, strict=True)]
    found = torch.tensor([abs(one - other) for one, other in pairs])
    return float(found.max()) if bool(found.isfinite().all()) else float("inf")


def _generated_apart(device: OneDevice, place: Any, plain: Any) -> float:
    """Return 0 if the tokens of a greedy generation are those of transformers, and infinity if not."""
    sampling = Sampling(max_new_tokens=NEW_TOKENS, stop_ids=(2,))
    items = [WorkItem(ids=tuple(ids), action=ModelAction.GENERATE, sampling=sampling) for ids in IDS[:2]]
    untyped: Any = transformers.GenerationConfig
    options = untyped(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=2, pad_token_id=0)
    for ids, made in zip(IDS, device.run(place, items, 1000), strict=False):
        given = torch.tensor([ids])
        whole = plain.generate(given, attention_mask=torch.ones_like(given), generation_config=options)
        expected = whole[0, len(ids) :].tolist()
        expected = expected[: expected.index(2)] if 2 in expected else expected
        if not isinstance(made, Generated) or list(made.ids) != expected:
            return float("inf")
    return 0.0


def table() -> str:
    """Return the families that are served and refused by action, as docs/MODELS.md has them."""
    names = {Head.LM: "logprobs, generate", Head.SCORE: "score", Head.STEPS: "step_scores", Head.BASE: "embed"}
    lines = [f"transformers {transformers.__version__}"]
    for head, actions in names.items():
        refusals = {kind: _early_refusal(kind, name, head) for kind, name in sorted(classes(head).items())}
        served = [kind for kind, why in refusals.items() if not why]
        lines += ["", f"{actions}: {len(served)} families", *_wrapped(served)]
        for why in Counter(refusals.values()) - Counter({"": len(served)}):
            lines += [f"refused, {why}:", *_wrapped([kind for kind, each in refusals.items() if each == why])]
    return "\n".join(lines)


def _wrapped(words: Sequence[str]) -> Iterator[str]:
    line = " "
    for word in words:
        if len(line) + len(word) > 116:
            yield line
            line = " "
        line += f" {word}"
    yield line


def main() -> None:
    """Print the table, or compare the families whose name contains a word."""
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not sys.argv[1:]:
        print(table())
        return
    with tempfile.TemporaryDirectory() as directory:
        for head in Head:
            for kind in classes(head):
                if sys.argv[1] in kind:
                    try:
                        print(head, kind, compare(Path(directory), kind, head))
                    except Exception as error:  # noqa: BLE001  # told, and the next
                        print(head, kind, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
