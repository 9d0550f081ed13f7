"""The architectures there are."""

from billfish.models import llama

ARCHITECTURES = (llama.ARCHITECTURE,)
