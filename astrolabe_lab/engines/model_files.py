"""The files of a model, as vLLM wants them in a folder: a tokenizer of our own, a ``config.json``, and weights on wish.

An emulated engine needs no weights. A random Llama with weights is a real model that answers nonsense: it serves on a
CPU at tens of milliseconds a step, which is what tests and lessons about a running engine need.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from astrolabe_lab.errors import InputError

STAMP = "astrolabe_model.json"  # in a model's folder: what it was made of
VOCABULARY = 4096  # at most
SPECIAL = ("<s>", "</s>", "<pad>", "<user>", "<assistant>")
STATES, STATE_TOKENS = 100, 64  # prompts, and tokens of each, that a random model's habit of ending is set on
SPREAD = 1.0  # standard deviation of the log of an answer's length over prompts
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}"
    "{{ '<assistant>' if message['role'] == 'assistant' else '<user>' }}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def write(
    folder: str | Path,
    max_model_len: int = 4096,
    weights: bool = False,
    hidden: int = 256,
    layers: int = 4,
    heads: int = 4,
    seed: int = 0,
    answer_tokens: int | None = None,
) -> Path:
    """Write a model to ``folder`` (made whole or not at all; a finished one is kept) and return it.

    The tokenizer is a byte-level BPE trained on the generator's own English (any Unicode survives it). With
    ``weights``, a Llama of this size with random float32 weights from ``seed``; needs torch and transformers.
    ``answer_tokens``: its answers (sampled at temperature 1) end after about so many tokens, sooner for some prompts
    than for others; None: it hardly ever ends one. Raises InputError where the folder holds something else, or a
    package is missing.
    """
    folder = Path(folder)
    wanted = {
        "max_model_len": max_model_len, "weights": weights, "hidden": hidden, "layers": layers, "heads": heads,
        "seed": seed, "vocabulary": VOCABULARY, **({"answer_tokens": answer_tokens} if answer_tokens else {}),
    }  # fmt: skip
    if is_there(folder, wanted):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        tokens = _write_tokenizer(unfinished, max_model_len)
        _write_config(unfinished, tokens, max_model_len, hidden, layers, heads)
        if weights:
            _write_weights(unfinished, seed, answer_tokens)
        (unfinished / STAMP).write_text(json.dumps(wanted))
        unfinished.chmod(0o755)
        os.replace(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return folder


def is_there(folder: Path, wanted: dict) -> bool:
    """Whether ``folder`` is a finished model made of ``wanted``. Raises InputError where it is something else."""
    if not folder.exists():
        return False
    stamp = folder / STAMP
    if stamp.is_file() and stamp.read_text() == json.dumps(wanted):
        return True
    raise InputError(f"folder {str(folder)!r} exists and is not this model: name another folder, or remove it")


def _write_tokenizer(folder: Path, max_model_len: int) -> int:
    """Returns how many tokens it knows."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise InputError("a model folder needs the package 'tokenizers'; it comes with vLLM: make vllm") from None
    from astrolabe_lab.generators import sharegpt_like

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sharegpt_like.generate(2000, seed=0, text=True)["prompt"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": max_model_len,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return tokenizer.get_vocab_size()


def _write_config(folder: Path, tokens: int, max_model_len: int, hidden: int, layers: int, heads: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokens,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": max_model_len,
        "bos_token_id": SPECIAL.index("<s>"),
        "eos_token_id": SPECIAL.index("</s>"),
        "pad_token_id": SPECIAL.index("<pad>"),
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _write_weights(folder: Path, seed: int, answer_tokens: int | None) -> None:
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as missing:
        raise InputError(f"a model with weights needs torch and transformers ({missing}): make vllm") from None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()
        if answer_tokens:
            _let_it_end(model, folder, seed, answer_tokens)
        model.save_pretrained(folder)


def _let_it_end(model, folder: Path, seed: int, answer_tokens: int) -> None:
    """Set the one row of the head that scores end-of-sequence.

    The other tokens score about alike, so its chance is its logit's exponential among as many as there are words. It
    is the ridge solution that puts this logit, at the states in which prompts and some words of an answer leave the
    model, to what ``answer_tokens`` asks for, more or less by the direction in which those states differ most.
    """
    import numpy as np
    import torch
    from tokenizers import Tokenizer

    from astrolabe_lab.generators import sharegpt_like
    from astrolabe_lab.rng import stream

    tokenizer, draws = Tokenizer.from_file(str(folder / "tokenizer.json")), stream(seed, "random llama")
    words = tokenizer.get_vocab_size()
    states = []
    with torch.no_grad():
        for prompt in sharegpt_like.generate(STATES, seed=seed + 1, text=True)["prompt"]:
            answer = draws.integers(len(SPECIAL), words, draws.integers(0, answer_tokens))
            ids = [*tokenizer.encode(prompt).ids[:STATE_TOKENS], *answer.tolist()]
            states.append(model.model(torch.tensor([ids])).last_hidden_state[0, -1].numpy())
    states = np.array(states)
    apart = states - states.mean(axis=0)
    spread = apart @ np.linalg.svd(apart, full_matrices=False)[2][0]
    wanted = np.log(words / answer_tokens) + SPREAD * spread / spread.std()
    design = np.vstack([states, np.eye(states.shape[1])])
    row = np.linalg.lstsq(design, np.concatenate([wanted, np.zeros(states.shape[1])]), rcond=None)[0]
    with torch.no_grad():
        model.lm_head.weight[SPECIAL.index("</s>")] = torch.tensor(row, dtype=torch.float32)
