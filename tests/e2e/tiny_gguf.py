"""Writes small random Llama-architecture GGUF files with the `gguf` package."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 2, 256, 512, 4, 2, 64
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(256 + others.index(b)) if b in others else chr(b) for b in range(256)]


MERGES = ["h e"]  # the library leaves an empty list out
TOKENS = [*CONTROL, *byte_tokens(), "he"]
VOCAB = len(TOKENS)


def tensor_shapes(tied: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }.items():
            shapes[f"blk.{i}.{name}.weight"] = shape
    return shapes


def random_raw(shape: tuple[int, ...], kind: Type, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a random tensor; for K-quants, which gguf cannot write, random blocks."""
    if kind in (Type.Q4_K, Type.Q6_K):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
        scale = (rng.uniform(0.5, 1.0, (*raw.shape[:2], 2)) * 1e-4).astype(np.float16)
        if kind == Type.Q4_K:  # d, dmin first
            scale[..., 1] *= 8  # so that weights have a mean near 0
            raw[..., :4] = scale.view(np.uint8)
        else:  # d last
            raw[..., -2:] = (scale[..., :1] * np.float16(0.1)).view(np.uint8)
        return raw.reshape(shape[0], -1)
    values = rng.standard_normal(shape).astype(np.float32) * (0.05 if len(shape) == 2 else 0.2)
    if len(shape) == 1:
        values += 1.0
    return gguf.quants.quantize(values, kind)


def write(
    path: Path,
    kinds: Callable[[str], Type] = lambda name: Type.Q4_1,
    *,
    tied: bool = True,
    template: str | None = TEMPLATE,
    architecture: str = "llama",
    change_shapes: Callable[[dict[str, tuple[int, ...]]], None] = lambda shapes: None,
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    extra: dict[str, np.ndarray] | None = None,
    more_control: tuple[str, ...] = (),
) -> Path:
    """A file at `path`: matrices of the kind that `kinds` gives for their name, norms in F32.

    more_control: control tokens that the vocabulary has at its end.
    """
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB + len(more_control))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*TOKENS, *more_control])
    ordinary = [1] * (VOCAB - len(CONTROL))
    writer.add_token_types([3] * len(CONTROL) + ordinary + [3] * len(more_control))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
    metadata(writer)
    shapes = tensor_shapes(tied)
    for name in {"token_embd.weight", "output.weight"} & set(shapes):
        shapes[name] = (VOCAB + len(more_control), HIDDEN)
    change_shapes(shapes)
    for name, shape in shapes.items():
        kind = kinds(name) if len(shape) == 2 else Type.F32
        writer.add_tensor(name, random_raw(shape, kind, rng), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
