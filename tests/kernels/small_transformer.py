"""A language model of one transformer block, of torch's operators or of the general kernels."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from billfish.kernels import general


def swiglu(x):
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def geglu(x):
    gate, up = x.chunk(2, -1)
    return functional.gelu(gate, approximate="tanh") * up


class Block(nn.Module):
    """A language model of one transformer block; `ours` says whose operations it uses."""

    def __init__(self, ours, vocabulary=31, width=16, heads=2):
        super().__init__()
        self.ours, self.heads = ours, heads
        self.embed = nn.Embedding(vocabulary, width)
        self.norms = nn.ParameterList([torch.ones(width) for _ in range(3)])
        self.biases = nn.ParameterList([torch.zeros(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = (
            nn.ModuleList([nn.Linear(*sizes) for _ in range(2)])
            for sizes in ((width, 4 * width), (2 * width, width))
        )
        angles = torch.arange(32).unsqueeze(1) / 100.0 ** torch.linspace(0, 1, width // heads // 2)
        self.register_buffer("cos_sin", torch.cat((angles.cos(), angles.sin()), -1))

    def forward(self, tokens, target):
        ours = self.ours
        x = self.embed(tokens)
        batch, length, width = x.shape
        rms = general.rms_norm if ours else lambda x, w, e: functional.rms_norm(x, w.shape, w, e)
        rotary = general.rotary_embedding if ours else general.rotary_embedding_reference
        q, k, v = (
            self.qkv(rms(x, self.norms[0], 1e-5)).view(batch * length, 3, self.heads, -1).unbind(1)
        )
        q, k = rotary(q, k, torch.arange(length, device=x.device).repeat(batch), self.cos_sin)
        q, k, v = (
            part.reshape(batch, length, self.heads, -1).transpose(1, 2) for part in (q, k, v)
        )
        scores = q @ k.transpose(2, 3) / (width // self.heads) ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        weights = general.softmax(scores) if ours else scores.softmax(-1)
        attended = self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        if ours:
            h, x = general.rms_norm(attended, self.norms[1], 1e-5, x)
        else:
            x = attended + x
            h = rms(x, self.norms[1], 1e-5)
        gates = (general.silu_mul, general.gelu_tanh_mul) if ours else (swiglu, geglu)
        x = x + self.down[0](gates[0](self.up[0](h)))
        x = x + self.down[1](gates[1](self.up[1](x)))
        if ours:
            x = general.layer_norm(x, self.norms[2], self.biases[0])
            flat = x.reshape(-1, width)
            return general.linear_cross_entropy(flat, self.embed.weight, target.flatten(), chunk=20)
        x = functional.layer_norm(x, (width,), self.norms[2], self.biases[0])
        logits = x @ self.embed.weight.t()
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def loss_curves(device: torch.device, steps: int = 60) -> list[Tensor]:
    """Losses of training with torch's operators, and with the general kernels."""
    text = torch.randint(0, 31, (4, 13), generator=torch.Generator().manual_seed(5)).to(device)
    torch.manual_seed(3)
    theirs = Block(ours=False)
    ours = Block(ours=True)
    ours.load_state_dict(theirs.state_dict())
    options = {"lr": 1e-2, "weight_decay": 0.05}
    curves = []
    for model, make in ((theirs, torch.optim.AdamW), (ours, general.AdamW)):
        optimizer = make(model.to(device).parameters(), **options)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(text[:, :-1], text[:, 1:])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(torch.tensor(losses))
    return curves
