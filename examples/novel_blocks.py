"""A small decoder with three blocks that no library has kernels for, as a model folder with its own code.

python examples/novel_blocks.py novel
graft autofuse novel --trust-remote-code -o novel-fusions
"""

from __future__ import annotations

import sys
from pathlib import Path

CODE = '''"""MLP gated by a cubed ReLU, a residual that is gated by the block's input, a norm scaled by logits."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class NovelConfig(LlamaConfig):
    model_type = "novel"


class CubedReluMlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(torch.relu(self.gate_proj(x)).pow(3) * self.up_proj(x))


class LogitScaledNorm(nn.Module):
    """Every channel of the normed row is scaled by the sigmoid of a learned logit."""

    def __init__(self, config):
        super().__init__()
        self.logit = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * torch.sigmoid(self.logit) * 1.5


class NovelLayer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.mlp = CubedReluMlp(config)
        self.input_layernorm = LogitScaledNorm(config)
        self.post_attention_layernorm = LogitScaledNorm(config)
        self.gate = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states, **given):
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **given)
        hidden_states = hidden_states + torch.sigmoid(self.gate(normed)) * attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class NovelForCausalLM(LlamaForCausalLM):
    config_class = NovelConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers = nn.ModuleList([NovelLayer(config, i) for i in range(config.num_hidden_layers)])
        self.post_init()
'''


def write_model(folder: Path, *, hidden: int = 256, layers: int = 8) -> None:
    """Random weights from a fixed seed."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "modeling_novel.py").write_text(CODE)
    space: dict = {"__name__": "modeling_novel"}
    exec(compile(CODE, str(folder / "modeling_novel.py"), "exec"), space)
    torch.manual_seed(0)
    config = space["NovelConfig"](
        vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024, initializer_range=0.05,
        tie_word_embeddings=True, architectures=["NovelForCausalLM"],
        auto_map={
            "AutoConfig": "modeling_novel.NovelConfig", "AutoModelForCausalLM": "modeling_novel.NovelForCausalLM"
        },
    )  # fmt: skip
    space["NovelForCausalLM"](config).save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1] if len(sys.argv) > 1 else "novel"))
