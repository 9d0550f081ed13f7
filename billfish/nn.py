"""INT4 linear layers for anybody's module.

from billfish.nn import quantize_

quantize_(model, only=lambda name, _: name != "lm_head")
"""

from billfish.layers.linear import QuantLinear, quantize_

__all__ = ["QuantLinear", "quantize_"]
