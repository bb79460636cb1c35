"""Whether a model predicts the next token, which perplexity and KL divergence presuppose."""

from __future__ import annotations

from gguf import PoolingType

from .gguf_file import GGUFFile

# architectures whose graphs in llama.cpp end without logits; tests/package/test_patches.py compares them with its sources
ENCODERS = frozenset((
    "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert", "gemma-embedding",
    "llama-embed", "t5encoder", "wavtokenizer-dec", "clip",
))


def describe_other_model(file: GGUFFile) -> str | None:
    """Describe a model that predicts no next token, as "an encoder (bert)"; None for a language model.

    A non-causal model that pools its outputs is an encoder whatever its architecture; text diffusion models do not pool and have logits.
    """
    architecture = file.value("general.architecture", "")
    pooling = file.value(f"{architecture}.pooling_type", PoolingType.NONE)
    if pooling == PoolingType.RANK:
        return f"a reranker ({architecture})"
    is_causal = file.value(f"{architecture}.attention.causal", True)
    if architecture in ENCODERS or (not is_causal and pooling != PoolingType.NONE):
        return f"an encoder ({architecture})"
    return None
