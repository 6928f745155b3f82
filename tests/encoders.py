"""A tiny BERT with random weights and a vocabulary of the words it is given: an encoder that needs no download."""

from pathlib import Path


def tiny_bert(folder: Path, words, seed: int = 0, width: int = 32, layers: int = 2, longest: int = 64) -> Path:
    """Write encoder and tokenizer to ``folder`` as ``save_pretrained`` does; return it."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: i for i, word in enumerate([*special, *sorted(set(words))])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.normalizer = normalizers.Lowercase()
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * width,
        max_position_embeddings=longest,
        pad_token_id=0,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        BertModel(config).save_pretrained(folder)
    return folder
