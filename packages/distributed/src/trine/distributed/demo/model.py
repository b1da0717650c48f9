"""A GPT that reads and writes bytes. It knows nothing of sharding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "GPTConfig", "generate", "next_byte_loss"]

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """The size of a `GPT`; as it stands, 1.9 million parameters."""

    width: int = 192
    depth: int = 4
    heads: int = 6
    context: int = 128


class Block(nn.Module):
    """Attention over the bytes so far, then a perceptron on each; both add to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp_in = nn.Linear(config.width, 4 * config.width, bias=False)
        self.mlp_out = nn.Linear(4 * config.width, config.width, bias=False)
        # A block that adds nothing at first lets the loss fall from the first steps on.
        nn.init.zeros_(self.attention_out.weight)
        nn.init.zeros_(self.mlp_out.weight)
        for linear in (self.qkv, self.mlp_in):
            nn.init.normal_(linear.weight, std=config.width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, time, width]` to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """From bytes to the logits of the byte that follows each of them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.context = config.context
        self.byte_embedding = nn.Embedding(VOCABULARY, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for module in (self.byte_embedding, self.position_embedding):
            nn.init.normal_(module.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.01)  # logits near 0: a loss near log(256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 `[batch, time]`, time at most `context`, to logits `[batch, time, 256]`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_byte_loss(logits: Tensor, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, a scalar in fp32.

    Args:
        logits: what the model said to `windows[:, :-1]`.
        windows: int64 `[batch, time + 1]`.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, count: int, context: int, seed: int) -> bytes:
    """Let the model continue `prompt` by `count` bytes.

    A sharded model needs every rank to call this alike, since each forward gathers
    parameters.

    Args:
        model: maps tokens to logits, as `GPT` does.
        prompt: at least one byte.
        count: how many bytes to add.
        context: how many bytes the model can see.
        seed: of the choice among likely bytes.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(count):
        logits = model(tokens[:, -context:])[0, -1].float().cpu()
        likely = torch.softmax(logits / 0.8, dim=-1)
        chosen = torch.multinomial(likely, 1, generator=generator)
        tokens = torch.cat([tokens, chosen[None].to(device)], dim=1)
    return bytes(tokens[0, len(prompt) :].tolist())
