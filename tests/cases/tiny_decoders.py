"""Every decoder architecture of transformers that can be built tiny: a few layers, random weights, a few thousand
parameters. Sizes are set by the names that configurations have for them; ODD has what that does not cover."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, WIDTH, LAYERS, CONTEXT = 97, 64, 4, 64
NAMES: dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    WIDTH: """hidden_size n_embd d_model embed_dim dim intermediate_size ffn_dim n_inner decoder_ffn_dim
        encoder_ffn_dim dim_feedforward dff shared_intermediate_size attention_hidden_size lru_width
        word_embed_proj_dim d_inner embedding_size ffn_hidden_size max_position_embeddings n_positions max_seq_len
        n_ctx
        max_sequence_length
        context_length""",
    LAYERS: """num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_attention_heads n_head
        n_heads num_heads decoder_attention_heads encoder_attention_heads swa_num_attention_heads num_experts
        n_routed_experts num_local_experts moe_num_experts linear_num_value_heads linear_num_heads
        linear_conv_kernel_dim mamba_d_conv conv_kernel index_topk""",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    16: """head_dim kv_channels linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim
        q_lora_rank kv_lora_rank qk_head_dim attention_head_dim d_head index_head_dim swa_head_dim""",
    8: """qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_d_state mamba_n_heads mamba_chunk_size mamba_dt_rank
        state_size ssm_state_size time_step_rank chunk_size mamba_num_heads sliding_window hidden_size_per_layer_input
        block_size rotary_dim""",
    2: """num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk
        moe_k linear_num_key_heads mamba_expand index_n_heads""",
    1: "n_group topk_group mamba_n_groups n_groups mamba_ngroups n_mamba_heads type_vocab_size first_k_dense_replace",
    0: "pad_token_id rescale_every",
}
SIZES: dict[str, Any] = {name: value for value, names in NAMES.items() for name in names.split()}
SIZES |= {"is_decoder": True, "mamba_d_ssm": 2 * WIDTH, "bos_token_id": 1, "eos_token_id": 2}
LATENT = """axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash minicpm3 youtu"""
ODD: dict[str, dict[str, Any]] = {
    **{kind: {"head_dim": 8, "num_key_value_heads": 4} for kind in LATENT.split()},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_moe": {"moe_k": 2, "moe_layer_start_index": 1},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "attention_head_size": 16},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8},
}
# parts of models that take more than tokens, or no decoder that goes from left to right
PARTS = ("audio", "assistant", "blt", "cpmant", "emu3", "fuyu", "git", "got_ocr2", "mllama", "moshi", "musicgen")
DECODERS = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not any(part in kind for part in PARTS)]
MOST_PARAMETERS = 16_000_000


def tiny_decoder(kind: str, dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    """Raises whatever the configuration raises; MemoryError where its sizes have names that are not known here."""
    cls = CONFIG_MAPPING[kind]
    known = set(inspect.signature(cls.__init__).parameters)
    known |= {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    config = cls(**{name: value for name, value in SIZES.items() if name in known} | ODD.get(kind, {}) | settings)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise MemoryError(f"{kind} has {count} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
