"""The architectures there are."""

from billfish.models import gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3, smollm3

ARCHITECTURES = tuple(
    module.ARCHITECTURE for module in (llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3, smollm3)
)
