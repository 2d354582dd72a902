"""A tiny random Llama in Hugging Face layout, with a byte-level tokenizer and a chat template.

It loads in milliseconds and its text is nonsense, but every token depends on all before it: a
wrong KV block changes the rest of the answer.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.byte_tokenizer import EOS, VOCAB_SIZE, write_byte_tokenizer


def write_tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 512,
) -> Path:
    """Write config, weights (float32) and tokenizer files to ``folder``; returns it."""
    write_byte_tokenizer(folder)
    head_dim = hidden // heads
    inner = 2 * hidden
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": VOCAB_SIZE,
                "hidden_size": hidden,
                "intermediate_size": inner,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": head_dim,
                "hidden_act": "silu",
                "max_position_embeddings": context,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
                "attention_bias": False,
                "mlp_bias": False,
                "eos_token_id": EOS,
                "torch_dtype": "float32",
            }
        )
    )
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    # Wide projections make attention sharp, so that the answer wanders instead of repeating.
    tensors = {
        "model.embed_tokens.weight": normal(VOCAB_SIZE, hidden, 1.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(VOCAB_SIZE, hidden, 0.5),
    }
    # An end that comes by chance would cut tests short: make it as unlikely as can be.
    tensors["lm_head.weight"][EOS] = 0.0
    for i in range(layers):
        name = f"model.layers.{i}"
        tensors |= {
            f"{name}.input_layernorm.weight": torch.ones(hidden),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}.self_attn.q_proj.weight": normal(heads * head_dim, hidden, 0.3),
            f"{name}.self_attn.k_proj.weight": normal(kv_heads * head_dim, hidden, 0.3),
            f"{name}.self_attn.v_proj.weight": normal(kv_heads * head_dim, hidden, 0.3),
            f"{name}.self_attn.o_proj.weight": normal(hidden, heads * head_dim, 0.3),
            f"{name}.mlp.gate_proj.weight": normal(inner, hidden, 0.2),
            f"{name}.mlp.up_proj.weight": normal(inner, hidden, 0.2),
            f"{name}.mlp.down_proj.weight": normal(hidden, inner, 0.2),
        }
    save_file(tensors, str(folder / "model.safetensors"))
    return folder
